"""A warm process that forks workers: torch is imported once, not once per worker.

    LocalCluster (owner)  ~~ unix socket ~~  fork server  -- fork -->  worker, worker, ...

The server is a fresh interpreter with one thread, so forking it is safe however many threads the owner has.
Nothing outlives the owner: the server ends when the owner's end of the socket or the owner itself is gone,
and the kernel kills its children when it ends. The server's directory is removed by the owner's close(), and by the
server when it ends. Only if both are killed does it stay, with the files of the clusters' stores.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import itertools
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import msgspec

from ..errors import ClusterError
from ..primitives import clock
from ..primitives.interrupts import critical, install, run_all, uninstall
from ..primitives.torch_threads import prepared
from ..rendezvous.file import temporary_directory
from ..rendezvous.group import poll_until

_LENGTH = struct.Struct("<I")
_PR_SET_PDEATHSIG = 1


class Job(msgspec.Struct, frozen=True):
    """A worker to be forked: `function` is "module:name" and gets `argument`."""

    name: str
    function: str
    argument: bytes


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Asks for the end of these children: with SIGTERM at first, with SIGKILL after so many seconds."""

    pids: list[int]
    grace: float


class Spawn(msgspec.Struct, frozen=True, tag=True):
    jobs: list[Job]


class Spawned(msgspec.Struct, frozen=True, tag=True):
    """The answer to the oldest Spawn that has none."""

    pids: list[int]


class Ended(msgspec.Struct, frozen=True, tag=True):
    """A child has ended; `status` is negative for a signal."""

    pid: int
    status: int


def import_path() -> list[str]:
    """Returns this process's sys.path, independent of the current directory."""
    # '' is the current directory. What does not exist may be a name for an import hook, and stays as it is.
    return [os.path.abspath(p) if os.path.exists(p or ".") else p for p in sys.path]


class _Request:
    """A Spawn that was sent. Guarded by the ForkServer's lock."""

    pids: list[int] | None = None  # the answer
    is_given_up = False


class ForkServer:
    """The owner's side. Can serve several clusters, one after the other or at once.

    Args:
        preload: modules that are imported once, in the server, besides torch. Each worker then has them from its start;
            an optimizer, for one, imports `torch._dynamo` when it is first made, which takes a second or more. None of
            them may start threads or use CUDA when it is imported.
    """

    def __init__(self, *, preload: Iterable[str] = ()) -> None:
        self._pid = os.getpid()  # a fork of this process has a copy of the socket, which it must not use
        self._lock = threading.Lock()  # guards the two below, and the writing
        self._requests: deque[_Request] = deque()  # without an answer, in the order in which they were sent
        self._ended: dict[int, int] = {}
        self._answered = False
        self._gone = False
        self._numbers = itertools.count(1)
        install(self)
        try:
            with critical():
                self._start(preload)
        finally:
            uninstall(self)

    def _start(self, preload: Iterable[str]) -> None:
        self.directory = tempfile.mkdtemp(prefix="telegrad-", dir=temporary_directory())  # mode 0700
        try:
            self._start_process(preload)
        except BaseException:
            shutil.rmtree(self.directory, ignore_errors=True)
            raise
        self._reader = threading.Thread(target=prepared(self._read), name="telegrad-forkserver", daemon=True)
        self._reader.start()

    def _start_process(self, preload: Iterable[str]) -> None:
        self._socket, theirs = socket.socketpair()
        code = (
            "import importlib, sys, telegrad.autograd, telegrad.cluster.local, telegrad.rpc\n"  # and with them torch
            "telegrad.cluster.seeding.numpy_random()\n"  # each worker seeds it
            "from telegrad.cluster.forkserver import serve\n"
            "for module in sys.argv[4:]: importlib.import_module(module)\n"
            "serve(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])"
        )
        with theirs:
            self._process = subprocess.Popen(
                # -P: the current directory is on the server's path only if it is on the owner's.
                [sys.executable, "-P", "-c", code, str(theirs.fileno()), str(os.getpid()), self.directory, *preload],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the owner, who ends the children in order
                env={**os.environ, "PYTHONPATH": os.pathsep.join(import_path())},
            )

    def new_path(self) -> str:
        """Returns a path for a new file, which no other user can reach and which ends with the server.

        Raises:
            ClusterError: the server has ended.
        """
        if self._gone:
            raise ClusterError("the process that forks workers has ended; start another ForkServer")
        return f"{self.directory}/{next(self._numbers)}"

    def spawn(self, jobs: list[Job], timeout: float) -> list[int]:
        """Forks one process per job; returns their process ids. If the caller is interrupted or the time is over, the
        processes are ended as soon as the server names them.

        Raises:
            ClusterError: the server did not start, or has ended.
        """
        if os.getpid() != self._pid:
            raise ClusterError(
                f"the ForkServer belongs to process {self._pid}, of which this one is a fork; start another one here"
            )
        request = _Request()
        with critical():
            try:
                self._send(Spawn(jobs), request)
                if not poll_until(lambda: request.pids is not None or self._gone, timeout):
                    raise ClusterError(
                        f"the process that forks workers did not answer within {timeout:.0f} s; its output says why"
                    )
                if request.pids is None or self._gone:
                    raise ClusterError("the process that forks workers ended; its output says why")
                return request.pids
            except BaseException:
                with self._lock:
                    request.is_given_up = True
                self._end_if_given_up(request)
                raise

    def _end_if_given_up(self, request: _Request) -> None:
        if request.is_given_up and request.pids is not None:
            with contextlib.suppress(ClusterError):  # the server is gone, and its children with it
                self._send(Stop(request.pids, 0.0))

    def stop(self, pids: list[int], grace: float) -> None:
        """Ends children: asks them with SIGTERM, kills them after `grace` seconds, and waits for their end. In a fork
        of the owner it does nothing: they are the owner's."""
        if os.getpid() != self._pid:
            return
        with critical():
            try:
                self._send(Stop(pids, grace))
            except ClusterError:
                return  # the server is gone, and its children with it
            poll_until(lambda: self._gone or all(pid in self._ended for pid in pids), grace + 10)

    def status(self, pid: int) -> int | None:
        """The exit status of a child; None while it runs."""
        return self._ended.get(pid, -signal.SIGKILL if self._gone else None)

    def _send(self, message: Any, request: _Request | None = None) -> None:
        data = _encoded(message)  # before the request counts: answers come in the order of requests
        try:
            with self._lock:
                if request is not None:
                    self._requests.append(request)
                self._socket.sendall(data)
        except OSError as error:
            raise ClusterError(f"the process that forks workers has ended: {error}") from error

    def _read(self) -> None:
        with critical():  # so a finaliser that the collector runs here does not ask the server, and wait for itself
            while (message := _receive(self._socket, Spawned | Ended)) is not None:
                if isinstance(message, Ended):
                    self._ended[message.pid] = message.status
                else:
                    self._on_spawned(message)
        self._gone = True

    def _on_spawned(self, message: Spawned) -> None:
        self._answered = True
        with self._lock:
            for pid in message.pids:
                self._ended.pop(pid, None)  # of an earlier child: the system uses numbers again
            request = self._requests.popleft()
            request.pids = message.pids
        self._end_if_given_up(request)

    def close(self) -> None:
        """Ends the server and all of its children. Any number of times. A fork of the owner closes its copy only."""
        if os.getpid() != self._pid:
            self._socket.close()
            return
        install(self)
        try:
            remove = partial(shutil.rmtree, self.directory, ignore_errors=True)  # if the server was killed
            run_all([self._hang_up, self._reader.join, self._socket.close, remove])
        finally:
            uninstall(self)

    def _hang_up(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        try:
            # One that has never answered is still importing torch, and does not look at the socket.
            self._process.wait(5 if self._answered else 0)
        except subprocess.TimeoutExpired:
            self._process.kill()  # and the kernel kills its children
            self._process.wait()

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# -- in the server ---------------------------------------------------------------------------------------


def serve(fd: int, owner: int, directory: str) -> None:
    """Runs the server: forks on request, reports children that have ended, ends with its owner, and removes the
    directory then."""
    server = os.getpid()
    try:
        if os.getppid() == owner:
            _serve(fd, os.pidfd_open(owner), directory, owner)
    finally:
        if os.getpid() == server:  # and no child
            shutil.rmtree(directory, ignore_errors=True)


def _serve(fd: int, owner_fd: int, directory: str, owner: int) -> None:
    if os.getppid() != owner:
        return
    lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    fcntl.flock(lock, fcntl.LOCK_SH)  # programs that tidy /tmp leave the directory alone
    sock = socket.socket(fileno=fd)
    wake_read, wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    # Objects that are here now stay: children's collectors need not look at them, and untouched memory is shared.
    gc.collect()
    gc.freeze()
    children: dict[int, float] = {}  # pid -> when to kill it
    poll = select.poll()
    for watched in (fd, owner_fd, wake_read):
        poll.register(watched, select.POLLIN)
    while True:
        soonest = min(children.values(), default=float("inf"))
        wait = None if soonest == float("inf") else max(0.0, soonest - clock.now()) * 1000
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
                with contextlib.suppress(OSError):  # the owner has ended: the next poll says so
                    sock.sendall(_encoded(Spawned(pids)))
            else:
                for pid in set(request.pids) & set(children):
                    os.kill(pid, signal.SIGTERM)
                    children[pid] = clock.now() + request.grace
        _kill_overdue(children)
        _report_ended(sock, children)
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    for pid in children:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


def _kill_overdue(children: dict[int, float]) -> None:
    now = clock.now()
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
                sock.sendall(_encoded(Ended(pid, os.waitstatus_to_exitcode(status))))


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


# -- messages between the two ----------------------------------------------------------------------------


def _encoded(message: Any) -> bytes:
    data = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(data)) + data


def _receive(sock: socket.socket, type_: Any) -> Any:
    """The next message; None at the end."""
    try:
        (length,) = _LENGTH.unpack(_read_exactly(sock, _LENGTH.size))
        return msgspec.msgpack.decode(_read_exactly(sock, length), type=type_)
    except (OSError, EOFError):
        return None


def _read_exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        piece = sock.recv(count - len(data))
        if not piece:
            raise EOFError
        data += piece
    return data
