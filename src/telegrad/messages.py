"""Every message that can cross the wire.

A message is an envelope (who, what, until when) and a body. The envelope is msgpack, cheap to read before
anything else is; the body is pickled by the codec, with its large buffers beside it.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import msgspec

WIRE_VERSION = 1

WORKER_BITS = 15  # ids are worker_id << 48 | counter, and fit a signed 64-bit integer
COUNTER_BITS = 48
MAX_WORKER_ID = (1 << WORKER_BITS) - 1


class Kind(IntEnum):
    CALL = 1
    REPLY = 2
    FAILURE = 3


class Envelope(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """What every message carries around its body."""

    kind: int
    id: int
    reply_to: int = 0  # the Call that a Reply or Failure answers
    timeout: float | None = None  # seconds that are left until the deadline; None: no limit
    depth: int = 0  # how many calls enclose this one
    modes: Modes | None = None  # None: torch's defaults
    device_map: dict[str, str] | None = None  # sender's device -> receiver's
    autograd: Any = None  # the context and log entries of a message that takes part in a backward pass
    profiling: Any = None  # what a profiled caller asks of the callee


class Modes(msgspec.Struct, frozen=True, array_like=True):
    """The caller's thread-local modes, which hold while the function runs."""

    grad: bool = True
    inference: bool = False
    autocast: tuple[tuple[str, bool, str], ...] = ()  # (device type, enabled, dtype name)
    autocast_cache: bool = True


class Call(msgspec.Struct, frozen=True):
    """Run `function(*args, **kwargs)` and answer with a Reply or a Failure."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any] | None


class Reply(msgspec.Struct, frozen=True):
    """What the function returned."""

    value: Any


class Failure(msgspec.Struct, frozen=True):
    """What the function raised, or why it could not be run."""

    exception: bytes  # the exception, pickled by itself: its type may not exist at the caller
    type_name: str
    text: str
    traceback: str


class WorkerInfo(msgspec.Struct, frozen=True):
    """A worker's name and id, as torch has it. Accepted wherever a worker's name is."""

    name: str
    id: int


class Hello(msgspec.Struct, frozen=True):
    """What two workers tell each other when they connect."""

    group: str
    id: int
    name: str
    pid: int = 0
    main: str = ""  # which script runs as __main__; functions of the same script go by reference
    to: int = -1  # the worker that the connecting side wants to reach


class Member(msgspec.Struct, frozen=True):
    """A worker's entry in the store."""

    id: int
    name: str
    addresses: tuple[str, ...]
    host: str  # which machine and user; the same for two workers that can share a unix socket
    rank: int = -1
