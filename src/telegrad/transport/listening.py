"""Listening and connecting on stream sockets: what `unix` and `tcp` have in common before the handshake."""

from __future__ import annotations

import errno
import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from ..errors import AddressError, ConnectError, TelegradError
from ..events import logger
from ..messages import Hello
from ..primitives import clock
from ..primitives.interrupts import interruptible
from .base import Connection, CrossingError, Listener
from .poller import ARMED, Poller

Answer = Callable[[Hello], Hello]


class StreamListener(Listener):
    """Accepts connections on threads of the worker's, and hands each on after its handshake."""

    def __init__(
        self,
        sock: socket.socket,
        address: str,
        poller: Poller,
        accept: Callable[[socket.socket, Answer], Connection],
        answer: Answer,
        on_connection: Callable[[Connection], None],
        on_failed: Callable[[Hello], None],
    ) -> None:
        self.address = address
        self._sock = sock
        self._poller = poller
        self._accept = accept
        self._answer = answer
        self._on_connection = on_connection
        self._on_failed = on_failed
        # Guards all below, and the socket's closing against an accept under way. Reentrant: a finaliser may run in it.
        self._lock = threading.RLock()
        self._greeting: set[socket.socket] = set()  # whose handshake is under way
        self._spare = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)  # see _turn_away_locked
        self._closed = False
        sock.setblocking(False)
        poller.register(sock.fileno(), self._on_event)
        poller.watch(sock.fileno(), ARMED)
        _listeners.add(self)

    def _on_event(self) -> None:
        with self._lock:
            if self._closed:
                return
            sock = self._accept_locked()
            if sock is not None:
                self._greeting.add(sock)
            self._poller.watch(self._sock.fileno(), ARMED)
        if sock is None:
            return
        accepted: list[Hello] = []

        def answer(hello: Hello) -> Hello:
            ours = self._answer(hello)
            accepted.append(hello)
            return ours

        try:
            connection = self._accept(sock, answer)
        except BaseException as error:
            with self._lock:
                self._greeting.discard(sock)
            sock.close()
            for hello in accepted:
                self._on_failed(hello)
            if not isinstance(error, TelegradError):
                raise
            # That two workers dial each other at once is nothing to warn of.
            level = logging.DEBUG if isinstance(error, CrossingError) else logging.WARNING
            logger.log(level, "refused a connection at %s: %s", self.address, str(error))
            return
        with self._lock:
            self._greeting.discard(sock)
        try:
            self._on_connection(connection)
        except BaseException:
            connection.dispose()
            raise

    def _accept_locked(self) -> socket.socket | None:
        try:
            return self._sock.accept()[0]
        except BlockingIOError:
            return None
        except OSError as error:
            logger.warning("accepting a connection at %s failed: %s", self.address, str(error))
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._turn_away_locked()
            return None

    def _turn_away_locked(self) -> None:
        """Out of descriptors: the one who knocks would be announced again and again. So we take it in with the
        descriptor kept for this, and send it away."""
        os.close(self._spare)
        try:
            self._sock.accept()[0].close()
        except OSError:
            pass
        finally:
            self._spare = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._poller.unregister(self._sock.fileno())
            self._close_descriptors()
            for sock in self._greeting:  # who waits for a peer's greeting need not wait any longer
                try:
                    sock.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass

    def _close_descriptors(self) -> None:
        self._sock.close()
        os.close(self._spare)

    def abandon(self) -> None:
        """In a fork: our copies go, and nobody connects to a worker that is not there."""
        self._lock = threading.RLock()
        if not self._closed:
            self._closed = True
            self._close_descriptors()
        for sock in self._greeting:
            sock.close()


_listeners: weakref.WeakSet[StreamListener] = weakref.WeakSet()


def _in_child() -> None:
    for listener in list(_listeners):
        listener.abandon()


os.register_at_fork(after_in_child=_in_child)


def connect_socket(family: int, target: Any, address: str, timeout: float) -> socket.socket:
    """A connected socket.

    Raises:
        ConnectError: nobody answers there.
    """
    deadline = clock.now() + timeout
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.settimeout(max(0.0, timeout))
        while True:
            try:
                interruptible(sock.connect, target)
                return sock
            except BlockingIOError:  # a unix listener with a long queue; it does not let us wait for our turn
                if clock.now() >= deadline or family != socket.AF_UNIX:
                    raise
                interruptible(time.sleep, 1e-3)
    except OSError as error:
        sock.close()
        raise ConnectError(f"nobody answers at {address}: {error}") from error
    except BaseException:
        sock.close()
        raise


def split_address(address: str, scheme: str) -> str:
    if not address.startswith(f"{scheme}://"):
        raise AddressError(f"{address!r} is not an address of the {scheme} transport")
    return address.removeprefix(f"{scheme}://")
