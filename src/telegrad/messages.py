"""Every message that can cross the wire.

A message is an envelope (who, what, until when) and a body. The envelope is msgpack, cheap to read before
anything else is; the body is pickled by the codec, with its large buffers beside it.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable
from enum import IntEnum
from typing import Any

import msgspec

WIRE_VERSION = 9

WORKER_BITS = 15  # ids are worker_id << 48 | counter, and fit a signed 64-bit integer
COUNTER_BITS = 48
MAX_WORKER_ID = (1 << WORKER_BITS) - 1
# No worker has a negative id.
PROBE_ID = -1
MIN_OBSERVER_ID = -1 << WORKER_BITS  # from here to -2


class Kind(IntEnum):
    CALL = 1
    REPLY = 2
    FAILURE = 3
    # A backward pass: see docs/backward.md.
    BEGIN = 4
    GRADIENTS = 5
    DONE = 6
    END = 7
    RELEASE = 8
    # Handles to values: see references/.
    HOLD = 9
    DROP = 10
    RETURN = 11
    # Gradients outside of contexts: see gradients/plain.py.
    FORGET = 12
    # Gradients in `.grad`: see Note [.grad is cleared in its turn] in gradients/commits.py.
    CLEAR = 13


KIND_NAMES = {int(kind): kind.name.lower() for kind in Kind}


def sender_of(message_id: int) -> int:
    """The id of the worker that made a message, context or pass with this id."""
    return message_id >> COUNTER_BITS


def message_ids(worker_id: int) -> Callable[[], int]:
    """Makes what gives the ids of a worker's messages, contexts and values. They begin anywhere: a tensor that was
    received can outlive its group, and must not be taken for one of the next group."""
    return itertools.count((worker_id << COUNTER_BITS) + secrets.randbits(COUNTER_BITS - 1) + 1).__next__


class Envelope(msgspec.Struct, array_like=True, omit_defaults=True):
    """The part of a message that is read first. The sender fills it in on the way out, until `Worker.send` encodes it;
    the receiver changes nothing in it."""

    kind: int
    id: int
    # The Call that a Reply or Failure answers; the message whose gradients these are; the pass of a Begin, or of a Done
    # with a failure; the value of the receiver's, an optimizer, for whose parameters a Clear is
    reply_to: int = 0
    timeout: float | None = None  # seconds that are left until the deadline; None: no limit
    depth: int = 0  # how many calls enclose this one
    modes: Modes | None = None  # None: torch's defaults
    device_map: dict[str, str] | None = None  # sender's device -> receiver's
    autograd: Autograd | None = None  # of a message that was sent in a context, or has tensors that require grad
    profiling: Profiling | None = None  # what a profiled sender asks of the receiver
    creates: int = 0  # of a Call: the value that its result becomes, and stays there
    lent: tuple[Lent, ...] = ()  # the handles in the body
    dropped: tuple[tuple[int, int], ...] = ()  # as in Drop: any message can carry it
    placed: tuple[Placed, ...] = ()  # the tensors that lie in device memory: see transport/device.py
    lane: tuple[Offer | Answer, ...] = ()  # about device memory: any message can carry it
    forgotten: tuple[int, ...] = ()  # as in Forget: any message can carry it
    ended: tuple[int, ...] = ()  # passes of the sender's that are done, as in End: any message can carry it
    released: tuple[int, ...] = ()  # contexts that have ended, as in Release: any message can carry it
    untracked: bool = False  # of a Call outside of contexts: tensors that require grad are leaves in it and its answer
    changed: str = ""  # of a Reply: the arguments that the function has changed in place


class Modes(msgspec.Struct, frozen=True, array_like=True):
    """The caller's modes, which hold while the function runs."""

    grad: bool = True
    inference: bool = False
    autocast: tuple[tuple[str, bool, str], ...] = ()  # (device type, enabled, dtype name)
    autocast_cache: bool = True
    anomaly: bool = False
    check_nan: bool = True  # with `anomaly`
    recomputes: int = 0  # the process whose checkpoint makes the call again: see runtime/recomputing.py


class Settings(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """Settings of the recording of operators."""

    shapes: bool = False
    memory: bool = False
    flops: bool = False
    stack: bool = False
    modules: bool = False
    activities: tuple[str, ...] = ()  # torch's names; none: all that the worker has


class Session(msgspec.Struct, frozen=True, array_like=True):
    """A timeline that is being recorded: see runtime/recording.py. Its id is made as a message's is, by its root."""

    id: int
    settings: Settings


class Profiling(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """Requests of a profiled sender to the receiver."""

    call: Settings | None = None  # of a Call: to run it under torch's profiler, and to answer with the events
    session: Session | None = None  # to take part in a timeline


class LogEntry(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One entry of the log: what a sent tensor depends on. A negative id is no tensor, but stands for several."""

    id: int
    context: int
    depends_on: tuple[int, ...]


class Autograd(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """The history of the tensors in a message."""

    context: int  # that it was sent in; 0: none
    sent: tuple[LogEntry, ...] = ()  # its tensors that require grad, each with an id of its own
    entries: tuple[LogEntry, ...] = ()  # what the receiver may not know yet of all that is upstream of them
    during: int = 0  # the backward pass that gradients belong to, or in whose hooks a call was made
    # Of gradients:
    done: bool = False  # with them the sender's part in the pass is done
    more: tuple[int, ...] = ()  # messages beside `reply_to` whose gradients these are
    begin: Begin | None = None  # the pass begins with them


class Call(msgspec.Struct, frozen=True):
    """Run `function(*args, **kwargs)` and answer with a Reply or a Failure."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any] | None


class Reply(msgspec.Struct, frozen=True):
    """The value that the function returned."""

    value: Any


class Failure(msgspec.Struct, frozen=True):
    """The exception that the function raised, or the reason why it could not be run."""

    exception: bytes  # the exception, pickled by itself: its type may not exist at the caller
    type_name: str
    text: str
    traceback: str
    tensors: tuple[Any, ...] | None = None  # those in the exception that are followed


_LONGEST_TEXT = 4000
MOST_ENDS = 2000  # in one Forget or Drop, or in the field of an envelope: the message stays a small one


def shortened(failure: Failure) -> Failure:
    """For one that is too large to be sent: it arrives as a RemoteError, with the ends of its texts."""
    return Failure(b"", failure.type_name, failure.text[:_LONGEST_TEXT], failure.traceback[-_LONGEST_TEXT:])


class Begin(msgspec.Struct, frozen=True, array_like=True):
    """A backward pass begins: these tensors that the receiver has sent will get gradients."""

    pass_id: int
    context: int
    sends: tuple[int, ...]
    timeout: float | None
    retain_graph: bool = False
    create_graph: bool = False
    into_grad: bool = False  # gradients go to `.grad` of their leaves, not to the context
    wanted: tuple[int, ...] | None = None  # the received tensors that gradients are wanted of; None: everything
    modes: Modes | None = None  # of the thread that called backward()


class Gradients(msgspec.Struct, frozen=True):
    """The gradients of the tensors that one message carried, or several; None where there is none.

    The envelope names the messages (`reply_to`, then `autograd.more`), and the pass (`autograd.during`)."""

    gradients: tuple[Any, ...]


class Done(msgspec.Struct, frozen=True, array_like=True):
    """The receiver's pass is done at the sender, or has failed there."""

    pass_id: int
    failure: Failure | None = None


class End(msgspec.Struct, frozen=True, array_like=True):
    """The pass is over for all: its gradients count, unless it was aborted."""

    pass_id: int
    aborted: str = ""  # why


class Release(msgspec.Struct, frozen=True, array_like=True):
    """The context has ended. Answered with a Reply, when every worker behind the receiver knows it too."""

    context: int


class Forget(msgspec.Struct, frozen=True, array_like=True):
    """The Recvs of these tensors of the receiver's have died at the sender: no gradients will come for them."""

    ids: tuple[int, ...]


class Lent(msgspec.Struct, frozen=True, array_like=True):
    """A handle to a value, in a message."""

    rref: int
    owner: int
    loan: int = 0  # by which the sender keeps its own until the owner knows of the receiver's; 0: none needed


class Hold(msgspec.Struct, frozen=True, array_like=True):
    """The sender was lent a handle to a value of the receiver."""

    rref: int
    loan: int


class Drop(msgspec.Struct, frozen=True, array_like=True):
    """The sender has no handle any more to these values of the receiver: (value, credits that go back)."""

    credits: tuple[tuple[int, int], ...]


class Return(msgspec.Struct, frozen=True, array_like=True):
    """A loan of the receiver's is over: the owner, which sends this, knows of the handle that was lent."""

    loan: int
    holder: int  # the worker that has told the owner of it


class Fresh(msgspec.Struct, frozen=True, array_like=True):
    """A place in device memory that the receiver does not know yet. Its sender fills it from here on."""

    device: int  # the sender's number, as in its Offer
    segment: int  # the allocation that the place is in
    size: int  # of the segment, in bytes
    memory: bytes  # CUDA's handle of the segment
    offset: int  # of the place in the segment
    capacity: int  # of the place, in bytes
    event: bytes  # CUDA's handle of the place's event


class Placed(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """A tensor's memory, in a place that its sender has filled."""

    place: int
    nbytes: int
    fresh: Fresh | None = None  # with the first message in the place


class Offer(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The sender could put tensors of a device into device memory that the receiver opens."""

    device: int  # the sender's number
    uuid: str  # of the device
    board: int  # the sender's descriptor of the board
    token: bytes  # what the board begins with
    magic: bytes  # what lies in the place
    placed: Placed


class Answer(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The answer to an Offer."""

    device: int  # as in the Offer
    refusal: str = ""  # why the offer cannot be accepted; empty: it is


class WorkerInfo(msgspec.Struct, frozen=True):
    """A worker's name and id, as torch has it. Accepted wherever a worker's name is."""

    name: str
    id: int


class Hello(msgspec.Struct, frozen=True):
    """The handshake: each worker sends one to the other when they connect."""

    group: str
    id: int
    name: str
    pid: int = 0
    main: str = ""  # which script runs as __main__; functions of the same script go by reference
    to: int = -1  # the worker that the connecting side wants to reach

    @property
    def is_probe(self) -> bool:
        """Whether it only asks if a worker lives."""
        return self.id == PROBE_ID

    @property
    def is_observer(self) -> bool:
        """Whether its sender looks at the group (cli/observer.py), and is no member of it."""
        return self.id < PROBE_ID


# The answer to a Hello that is not accepted: the reason; whether it is that the two workers have a connection already,
# or that the worker that refuses is making one.
Refusal = tuple[str, bool]


class Member(msgspec.Struct, frozen=True):
    """A worker's entry in the store."""

    id: int
    name: str
    addresses: tuple[str, ...]
    host: str  # which machine and user; the same for two workers that can share a unix socket
    rank: int = -1
    has_device_maps: bool = False  # then all of a group of a fixed size check them: see runtime/device_maps.py
