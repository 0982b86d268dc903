"""Floors: what the machine takes for the least that a call must do, with no RPC around it.

Ping-pong: bytes to another process and back, over a unix or a TCP socket. Blocking, each side sleeps until the
other writes, and for small messages the time is mostly that of waking an idle core; spinning, neither sleeps
while it waits for bytes. memcpy: one copy between buffers whose pages are there. This module must not import
torch: a floor has no company.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from benchmarks.figures import ALONE, Figure, Repeats, Session
from benchmarks.sampling import timed

MIB = 1 << 20

SMALL = Repeats(count=2000, warmup=200)
LARGE = Repeats(count=40, warmup=5)

Connect = Callable[[], tuple[socket.socket, socket.socket]]


def time_ping_pong(session: Session, *, connect: Connect, nbytes: int, spin: bool) -> list[float]:
    mine, theirs = connect()
    peer = multiprocessing.get_context("spawn").Process(target=_answer, args=(theirs, nbytes, spin), daemon=True)
    peer.start()
    theirs.close()
    message, reply = bytearray(b"x" * nbytes), bytearray(nbytes)

    def there_and_back() -> None:
        mine.sendall(message)
        _fill(mine, memoryview(reply), spin)

    samples = timed(there_and_back, session.repeats)
    mine.close()
    peer.join()
    return samples


def _answer(sock: socket.socket, nbytes: int, spin: bool) -> None:
    """Return what comes, whole messages at a time, until the other side closes."""
    message = bytearray(nbytes)
    with suppress(EOFError, ConnectionError):
        while True:
            _fill(sock, memoryview(message), spin)
            sock.sendall(message)


def _fill(sock: socket.socket, rest: memoryview, spin: bool) -> None:
    flags = socket.MSG_DONTWAIT if spin else 0
    while rest:
        try:
            received = sock.recv_into(rest, 0, flags)
        except BlockingIOError:
            continue
        if not received:
            raise EOFError
        rest = rest[received:]


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    for sock in (one, other):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return one, other


def time_memcpy(session: Session, *, nbytes: int) -> list[float]:
    source, target = (ctypes.create_string_buffer(nbytes) for _ in range(2))
    # Pages never written are all the one zero page, which would be copied out of the cache.
    ctypes.memset(source, 1, nbytes)
    return timed(partial(ctypes.memmove, target, source, nbytes), session.repeats)


def _ping_pong(name: str, title: str, connect: Connect, *, spin: bool) -> Figure:
    measure = partial(time_ping_pong, connect=connect, nbytes=64, spin=spin)
    return Figure(name=name, title=title, measure=measure, repeats=SMALL, setting=ALONE)


def _tcp_16mib(name: str, title: str, *, spin: bool) -> Figure:
    measure = partial(time_ping_pong, connect=tcp_pair, nbytes=16 * MIB, spin=spin)
    return Figure(name=name, title=title, measure=measure, repeats=LARGE, unit="ms", setting=ALONE)


def _memcpy(mib: int, unit: str, repeats: Repeats) -> Figure:
    name, title = f"memcpy-{mib}MiB", f"memcpy {mib} MiB"
    measure = partial(time_memcpy, nbytes=mib * MIB)
    return Figure(name=name, title=title, measure=measure, repeats=repeats, unit=unit, setting=ALONE)


FLOORS = (
    _ping_pong("unix-spin", "unix socket 64 B, spinning", socket.socketpair, spin=True),
    _ping_pong("unix-block", "unix socket 64 B, blocking", socket.socketpair, spin=False),
    _ping_pong("tcp-spin", "TCP socket 64 B, spinning", tcp_pair, spin=True),
    _ping_pong("tcp-block", "TCP socket 64 B, blocking", tcp_pair, spin=False),
    _memcpy(1, "µs", Repeats(count=200, warmup=20)),
    _memcpy(16, "ms", LARGE),
    _memcpy(64, "ms", LARGE),
    _tcp_16mib("tcp-spin-16MiB", "TCP socket 16 MiB, spinning", spin=True),
    _tcp_16mib("tcp-block-16MiB", "TCP socket 16 MiB, blocking", spin=False),
)
