"""A warm process that forks workers: torch is imported once, not once per worker.

    LocalCluster (owner)  ~~ unix socket ~~  fork server  -- fork -->  worker, worker, ...

The server is a fresh interpreter with one thread, so forking it is safe however many threads the owner has.
Nothing outlives the owner: the server ends when the owner's end of the socket or the owner itself is gone,
and the kernel kills its children when it ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from .errors import ClusterError

_LENGTH = struct.Struct("<I")
_PR_SET_PDEATHSIG = 1


class Job(msgspec.Struct, frozen=True):
    """A worker to be forked: `function` is "module:name" and gets `argument`."""

    name: str
    function: str
    argument: bytes


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End these children: politely at first, for so many seconds."""

    pids: list[int]
    grace: float


class Spawn(msgspec.Struct, frozen=True, tag=True):
    jobs: list[Job]


class Spawned(msgspec.Struct, frozen=True, tag=True):
    pids: list[int]


class Ended(msgspec.Struct, frozen=True, tag=True):
    """A child has ended; `status` is negative for a signal."""

    pid: int
    status: int


class ForkServer:
    """The owner's side. Can serve several clusters, one after the other or at once."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self._socket = ours
        code = (
            "import sys, telegrad.autograd, telegrad.cluster, telegrad.rpc\n"  # torch with them, which is the point
            "from telegrad.forkserver import serve; serve(int(sys.argv[1]), int(sys.argv[2]))"
        )
        path = os.pathsep.join(p for p in sys.path if p)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", code, str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the owner, who ends the children in order
                env={**os.environ, "PYTHONPATH": path},
            )
        self._lock = threading.Lock()  # guards all below, and the writing
        self._changed = threading.Condition(self._lock)
        self._spawned: list[Spawned] = []
        self._ended: dict[int, int] = {}
        self._answered = False
        self._gone = False
        self._requesting = threading.Lock()  # one spawn at a time, so answers match
        self._reader = threading.Thread(target=self._read, name="telegrad-forkserver", daemon=True)
        self._reader.start()

    def spawn(self, jobs: list[Job], timeout: float) -> list[int]:
        """Forks one process per job; their process ids.

        Raises:
            ClusterError: the server did not start, or has ended.
        """
        with self._requesting:
            self._send(Spawn(jobs))
            with self._changed:
                if not self._changed.wait_for(lambda: self._spawned or self._gone, timeout) or self._gone:
                    state = "ended" if self._gone else f"did not answer within {timeout:.0f} s"
                    raise ClusterError(f"the process that forks workers {state}; its output says why")
                return self._spawned.pop().pids

    def stop(self, pids: list[int], grace: float) -> None:
        """Ends children: asks them with SIGTERM, kills them after `grace` seconds, and waits for their end."""
        try:
            self._send(Stop(pids, grace))
        except ClusterError:
            return  # the server is gone, and its children with it
        with self._changed:
            self._changed.wait_for(lambda: self._gone or all(p in self._ended for p in pids), grace + 10)

    def status(self, pid: int) -> int | None:
        """How a child has ended; None while it runs."""
        with self._lock:
            return -signal.SIGKILL if self._gone and pid not in self._ended else self._ended.get(pid)

    def _send(self, message: Any) -> None:
        try:
            with self._lock:
                _send(self._socket, message)
        except OSError as error:
            raise ClusterError(f"the process that forks workers has ended: {error}") from error

    def _read(self) -> None:
        answers = Spawned | Ended
        while (message := _receive(self._socket, answers)) is not None:
            with self._changed:
                if isinstance(message, Spawned):
                    self._answered = True
                    for pid in message.pids:
                        self._ended.pop(pid, None)  # of an earlier child: the system uses numbers again
                    self._spawned.append(message)
                else:
                    self._ended[message.pid] = message.status
                self._changed.notify_all()
        with self._changed:
            self._gone = True
            self._changed.notify_all()

    def close(self) -> None:
        """Ends the server and all of its children. Any number of times."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        try:
            # One that has never answered is still importing torch, and does not look at the socket.
            self._process.wait(5 if self._answered else 0)
        except subprocess.TimeoutExpired:
            self._process.kill()  # and the kernel kills its children
            self._process.wait()
        self._reader.join()
        self._socket.close()

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# -- in the server ---------------------------------------------------------------------------------------


def serve(fd: int, owner: int) -> None:
    """The server's whole life: forks on request, reports who has ended, ends with its owner."""
    owner_fd = os.pidfd_open(owner)
    if os.getppid() != owner:
        return
    sock = socket.socket(fileno=fd)
    wake_read, wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    # What is here now stays: the children's collectors need not look at it, and memory that they don't touch is shared.
    gc.collect()
    gc.freeze()
    children: dict[int, float] = {}  # pid -> when to kill it
    poll = select.poll()
    for watched in (fd, owner_fd, wake_read):
        poll.register(watched, select.POLLIN)
    while True:
        soonest = min(children.values(), default=float("inf"))
        wait = None if soonest == float("inf") else max(0.0, soonest - time.monotonic()) * 1000
        ready = {number for number, _ in poll.poll(wait)}
        if owner_fd in ready:
            break
        if wake_read in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(wake_read, 4096)
        if fd in ready:
            request = _receive(sock, Spawn | Stop)
            if request is None:
                break
            if isinstance(request, Spawn):
                pids = [_fork(job, [sock, wake_read, wake_write, owner_fd]) for job in request.jobs]
                children.update(dict.fromkeys(pids, float("inf")))
                with contextlib.suppress(OSError):  # the owner has ended, which the next look at it tells
                    _send(sock, Spawned(pids))
            else:
                for pid in set(request.pids) & set(children):
                    os.kill(pid, signal.SIGTERM)
                    children[pid] = time.monotonic() + request.grace
        _kill_overdue(children)
        _report_ended(sock, children)
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for pid in children:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


def _kill_overdue(children: dict[int, float]) -> None:
    now = time.monotonic()
    for pid, deadline in children.items():
        if deadline <= now:
            children[pid] = now + 5
            os.kill(pid, signal.SIGKILL)


def _report_ended(sock: socket.socket, children: dict[int, float]) -> None:
    for pid in list(children):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            del children[pid]
            with contextlib.suppress(OSError):
                _send(sock, Ended(pid, os.waitstatus_to_exitcode(status)))


def _fork(job: Job, to_close: list[Any]) -> int:
    server = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        # The kernel kills this process when the server ends; it may have ended just now.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != server:
            os._exit(1)
        for thing in to_close:
            thing.close() if isinstance(thing, socket.socket) else os.close(thing)
        module, _, name = job.function.partition(":")
        function: Callable[[bytes], None] = getattr(sys.modules[module], name)
        function(job.argument)
        status = 0
    except SystemExit as exit:
        status = exit.code if isinstance(exit.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _send(sock: socket.socket, message: Any) -> None:
    data = msgspec.msgpack.encode(message)
    sock.sendall(_LENGTH.pack(len(data)) + data)


def _receive(sock: socket.socket, type_: Any) -> Any:
    """The next message; None at the end."""
    try:
        head = sock.recv(_LENGTH.size, socket.MSG_WAITALL)
        if len(head) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack(head)
        data = b""
        while len(data) < length:
            piece = sock.recv(length - len(data))
            if not piece:
                return None
            data += piece
    except OSError:
        return None
    return msgspec.msgpack.decode(data, type=type_)
