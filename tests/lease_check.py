"""Checks that a thread which holds the read lease, and reads, neither blocks nor runs users' code.

`install()` instruments telegrad's modules from outside: taking and leaving the lease; every lock that telegrad makes;
what blocks (`blocking`, `Waiter.sleep`); what runs users' code (`interruptible`, decoding, torch's engine, subscribers
of events); the end of what holds tensors, whose finalisers are users' code, too; and the log, whose handlers are. A
thread that reads may only take the locks in SHORT, which are held for a moment everywhere, and those that it does not
wait for. Anything else raises `WhileReadingError`, and is noted in `broken`; in a worker of another process, which may
survive it, in a file that the tests read.

A thread that has left its Turn with the lease may do anything: it can be relieved.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import logging
import os
import pkgutil
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import telegrad
from telegrad import events
from telegrad.gradients.context import Sent
from telegrad.gradients.leaves import GradientTable
from telegrad.gradients.local_pass import LocalPass
from telegrad.gradients.outbox import Outbox
from telegrad.primitives import interrupts, waiter
from telegrad.serialization.codec import Codec
from telegrad.transport.lease import ReadLease, Turn

# Locks that are held for a moment only, by module and attribute. Code under them looks up, counts and appends; it never
# waits, makes a system call that blocks, or runs users' code.
SHORT = {
    "gradients.contexts": {"_lock"},
    "gradients.dependency_log": {"_lock"},
    "gradients.participant": {"_lock"},
    "gradients.rooted_pass": {"lock"},
    "events": {"_changing"},
    "references.owned_values": {"_lock"},
    "runtime.flow_control": {"_lock"},
    "runtime.peers": {"_lock"},
    "runtime.pending": {"_lock"},
    "runtime.recording": {"_lock"},
    "runtime.threads": {"_lock"},
    "serialization.by_value_cache": {"_lock"},
    "serialization.namespaces": {"_lock"},
    "transport.copying": {"working"},
    "transport.device": {"_lock"},
    "transport.device_board": {"_lock"},
    "transport.device_mappings": {"_lock"},
    "transport.device_pool": {"_lock"},
    "transport.inproc": {"_lock"},
    "transport.lease": {"_lock"},
    "transport.shared_memory": {"_lock"},
}

broken: list[str] = []  # what broke the rule in this process, with the stack

_NOTES = "TELEGRAD_TESTS_NOTES"  # names the file for what breaks it in other processes
_reader = 0  # the process that reads that file
_read = 0  # bytes of it


class WhileReadingError(AssertionError):
    """A thread that reads did what it must not."""


class _Mine(threading.local):
    def __init__(self) -> None:
        self.leases: list[ReadLease] = []  # that this thread reads with now
        self.waits_in_lease = False
        self.collects = False  # garbage: on whichever thread happens to come to it


_mine = _Mine()


def is_reading() -> bool:
    """Whether this thread holds a lease, and has not left its turn with it."""
    return bool(_mine.leases)


def refuse(what: str) -> None:
    """Notes what this thread does, if it reads.

    Raises:
        WhileReadingError: it reads.
    """
    if _mine.leases and not sys.is_finalizing():
        stack = "".join(traceback.format_stack(sys._getframe(1), limit=12))
        broken.append(f"{what}\n{stack}")
        if os.getpid() != _reader and _NOTES in os.environ:
            with contextlib.suppress(OSError), open(os.environ[_NOTES], "a", encoding="utf-8") as notes:
                notes.write(f"process {os.getpid()} {broken[-1]}")
        raise WhileReadingError(f"{what}, while reading")


def read_notes() -> None:
    """Has processes that are started from now on note in a file what breaks the rule there; take_broken() reads it."""
    global _reader
    _reader = os.getpid()
    fd, os.environ[_NOTES] = tempfile.mkstemp(prefix="lease-check-")
    os.close(fd)
    atexit.register(_remove_notes, os.environ[_NOTES], _reader)


def _remove_notes(path: str, reader: int) -> None:
    if os.getpid() == reader:
        with contextlib.suppress(FileNotFoundError):
            os.remove(path)


def take_broken() -> list[str]:
    """Returns what has broken the rule since this was called last, here and in other processes."""
    global _read
    found = broken[:]
    broken.clear()
    with open(os.environ[_NOTES], "rb") as notes:
        notes.seek(_read)
        told = notes.read()
    _read += len(told)
    return [*found, told.decode()] if told else found


# -- locks --------------------------------------------------------------------------------------------------


class CheckedLock:
    """A lock that says when a thread that reads waits for it, unless it is a short one."""

    def __init__(self, lock: Any, module: str, name: str) -> None:
        self._lock = lock
        self._where = f"{module}: {name}"
        self._is_short = name in SHORT.get(module, ())

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        if blocking and not self._is_short and _mine.leases and not self._is_mine():
            refuse(f"takes the lock {self._where}")
        return self._lock.acquire(blocking, timeout)  # type: ignore[no-any-return]

    def _is_mine(self) -> bool:
        owned = getattr(self._lock, "_is_owned", None)
        return bool(owned and owned())

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lock, name)


def _name_of_caller() -> str:
    """The name that a lock gets on the line that makes it."""
    frame = sys._getframe(2)
    try:
        with open(frame.f_code.co_filename, encoding="utf-8") as file:
            line = file.read().splitlines()[frame.f_lineno - 1]
    except (OSError, IndexError):
        return "?"
    return line.partition("=")[0].partition(":")[0].strip().rpartition(".")[2]


def _maker(make: Callable[[], Any], module: str, name: str = "") -> Callable[[], Any]:
    return lambda: CheckedLock(make(), module, name or _name_of_caller())


def _check_locks(module: ModuleType) -> None:
    short = module.__name__.removeprefix("telegrad.")
    if vars(module).get("threading") is threading:
        checked = {"Lock": _maker(threading.Lock, short), "RLock": _maker(threading.RLock, short)}
        _put(module, "threading", SimpleNamespace(**{**vars(threading), **checked}))
    for maker in ("RLock", "allocate_lock"):
        if maker in vars(module):
            _put(module, maker, _maker(getattr(module, maker), short))
    for name, value in list(vars(module).items()):
        if type(value) in (type(threading.Lock()), type(threading.RLock())):
            _put(module, name, CheckedLock(value, short, name))


def _check_passes(module: ModuleType) -> None:
    """Has the lock checked that a part of a pass holds while its gradients are added up. Structs make theirs in C."""

    def make(*args: Any, **kwargs: Any) -> LocalPass:
        made = LocalPass(*args, **kwargs)
        made.committing = CheckedLock(made.committing, "gradients.local_pass", "committing")
        return made

    if vars(module).get("LocalPass") is LocalPass:
        _put(module, "LocalPass", make)


def _check_ends() -> None:
    """Has a thread that reads drop no tensors: gradients, and what was sent. These classes hold them."""

    @interrupts.finaliser
    def on_end(self: Any) -> None:
        if not _mine.leases or _mine.collects or on_collection not in gc.callbacks:  # a test may have taken it out
            return
        if holds[type(self)](self):
            with contextlib.suppress(WhileReadingError):  # it is noted; Python drops what finalisers raise
                refuse(f"drops the last reference to a {type(self).__name__} and its tensors")

    @interrupts.finaliser
    def on_collection(phase: str, _: object) -> None:
        _mine.collects = phase == "start"

    gc.callbacks.append(on_collection)
    _undo.append(partial(gc.callbacks.remove, on_collection))
    holds: dict[type, Callable[[Any], Any]] = {
        GradientTable: lambda table: table._found or table.replaced,
        Outbox: lambda outbox: outbox.gradients,
        Sent: lambda sent: sent.leaf is not None or sent.sends is not None,
    }
    for held in holds:
        held.__del__ = on_end  # type: ignore[attr-defined]
        _undo.append(partial(delattr, held, "__del__"))


# -- the lease ----------------------------------------------------------------------------------------------


def _try_take(original: Any) -> Any:
    def try_take(self: ReadLease) -> bool:
        taken: bool = original(self)
        if taken:
            _mine.leases.append(self)
        return taken

    return try_take


def _on_event(original: Any) -> Any:
    def on_event(self: ReadLease) -> None:
        if self._lock.acquire(blocking=False):
            _mine.leases.append(self)
            self.on_readable()

    return on_event


def _leave(lease: ReadLease) -> None:
    if lease in _mine.leases:
        _mine.leases.remove(lease)


def _release(original: Any) -> Any:
    def release(self: ReadLease) -> None:
        try:
            original(self)  # which may have tasks to run first
        finally:
            _leave(self)

    return release


def _turn_leave(original: Any) -> Any:
    def leave(self: Turn) -> None:
        _leave(self._lease)
        original(self)

    return leave


def _take_back(original: Any) -> Any:
    def take_back(self: Turn) -> bool:
        taken: bool = original(self)
        if taken:
            _mine.leases.append(self._lease)
        return taken

    return take_back


def _block(original: Any) -> Any:
    def block(self: ReadLease, *args: Any) -> Any:
        _mine.waits_in_lease = True  # what it is for
        try:
            return original(self, *args)
        finally:
            _mine.waits_in_lease = False

    return block


def _never(what: str) -> Callable[[Any], Any]:
    """Makes a wrapper of a function that must not be called while reading."""

    def wrap(original: Any) -> Any:
        def checked(*args: Any, **kwargs: Any) -> Any:
            if _mine.leases and not _mine.waits_in_lease:
                refuse(what.format(args[0] if args else ""))
            return original(*args, **kwargs)

        return checked

    return wrap


class _Quiet(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        refuse(f"logs {record.msg!r}")
        return True


# -- putting it in and out ----------------------------------------------------------------------------------

_undo: list[Callable[[], None]] = []
_quiet = _Quiet()


def _put(where: Any, name: str, value: Any) -> None:
    before = vars(where).get(name)
    setattr(where, name, value)
    _undo.append(lambda: setattr(where, name, before))


def _wrap(where: Any, name: str, wrapper: Callable[[Any], Any]) -> None:
    _put(where, name, wrapper(vars(where)[name]))


def modules() -> list[ModuleType]:
    """All of telegrad's modules but those of tools."""
    found = []
    for info in pkgutil.walk_packages(telegrad.__path__, "telegrad."):
        if not info.name.startswith(("telegrad.cli", "telegrad.demo", "telegrad.__main__", "telegrad.compat.__main__")):
            found.append(importlib.import_module(info.name))
    return found


def install() -> None:
    """Checks from here on, also workers that are started later. Once in a process."""
    all_modules = modules()
    for module in all_modules:
        _check_locks(module)
        _check_passes(module)
        for name, what in (("blocking", "blocks in {}"), ("interruptible", "runs users' code: {}")):
            if vars(module).get(name) is getattr(interrupts, name) and module is not interrupts:
                _wrap(module, name, _never(what))
        if "run_backward" in vars(module) and callable(module.run_backward):
            _wrap(module, "run_backward", _never("runs torch's engine"))
    _check_ends()
    for name in ("decode", "decode_exception"):
        _wrap(Codec, name, _never("decodes a body"))
    _wrap(events.Events, "emit", _never("tells subscribers"))
    _wrap(waiter.Waiter, "sleep", _never("sleeps"))
    _wrap(threading.Thread, "start", _never("starts a thread, and waits for it to begin"))
    for name, wrapper in (
        ("try_take", _try_take), ("_on_event", _on_event), ("release", _release), ("_block", _block),
    ):  # fmt: skip
        _wrap(ReadLease, name, wrapper)
    _wrap(Turn, "leave", _turn_leave)
    _wrap(Turn, "take_back", _take_back)
    logger = logging.getLogger("telegrad")
    logger.addFilter(_quiet)
    _undo.append(lambda: logger.removeFilter(_quiet))


def uninstall() -> None:
    """Undoes it."""
    while _undo:
        _undo.pop()()
