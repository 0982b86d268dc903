"""Message to frames and back: the envelope as msgpack, the body as a pickle with large memory beside it.

    pack(body)                 -> Packed(b"", [skeleton, definitions?, buffer, ...]), with the tensors that require grad
    encode_envelope(envelope)  -> the header, which Worker.send puts into it: the envelope is fixed there
    decode_envelope(header)    -> Envelope     cheap, runs no user code: may be done while reading
    decode(frames)             -> body         runs users' constructors: never while reading

The skeleton starts with the function's name, in a call whose function has one that the callee can look up (see
by_name.py), or its number, where it was sent by value before (see by_value_cache.py). Behind it come the values (see
values.py). What backward passes tell each other is plain msgpack.

Pickling runs users' code, which may raise anything: SystemExit is the error of that message, and not the end of the
thread that happens to encode or decode it. Only a Ctrl-C on the main thread comes through.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch

from ..errors import (
    DecodeError,
    EncodeError,
    OutOfMemoryError,
    RemoteError,
    RemoteTraceback,
    TransportError,
    text_of,
)
from ..messages import (
    COUNTER_BITS,
    Begin,
    Call,
    Done,
    Drop,
    End,
    Envelope,
    Failure,
    Forget,
    Gradients,
    Hello,
    Hold,
    Kind,
    Placed,
    Release,
    Reply,
    Return,
)
from ..primitives.interrupts import interruptible, is_interrupt
from ..primitives.memory import describe_failure, reclaim
from ..transport.base import Buffer, Connection, Frames
from .by_name import Names
from .devices import NO_MAP, StrictTargets, Targets, UnmappedDeviceError, check_all_here
from .handles import Handle
from .pickling_state import Outgoing
from .severed import IN_EXCEPTION, IN_MODULE
from .torch_objects import takes_tensors_only
from .values import Attach, Values, check_bare, reason_of

Control = Begin | Done | End | Release | Hold | Drop | Return | Forget  # with no tensors in them, and nothing of users'
Body = Call | Reply | Failure | Gradients | Control
BODIES: dict[int, type[Call | Reply | Failure]] = {Kind.CALL: Call, Kind.REPLY: Reply, Kind.FAILURE: Failure}
_CONTROLS = {Kind.BEGIN: Begin, Kind.DONE: Done, Kind.END: End, Kind.RELEASE: Release,
             Kind.HOLD: Hold, Kind.DROP: Drop, Kind.RETURN: Return, Kind.FORGET: Forget}  # fmt: skip

CONTROLS = frozenset(_CONTROLS.values())
encode_control = encode_envelope = msgspec.msgpack.Encoder().encode
decode_envelope = msgspec.msgpack.Decoder(Envelope).decode  # raises msgspec.MsgspecError
_decode_control: dict[int, Callable[[Buffer], Control]] = {
    kind: msgspec.msgpack.Decoder(body).decode for kind, body in _CONTROLS.items()
}

KINDS = frozenset(map(int, Kind))
_REPLY = int(Kind.REPLY)

_HEAD = struct.Struct("<BH")  # what the values are, and the length of the function's name
_FIELDS, _ARGS, _ARGS_AND_KWARGS = 0, 1, 2  # the body's fields; the arguments of a call by name
_OF_MAIN = b"__main__:"
_CARRIES = 0x80  # added to the above: the second buffer has definitions


def not_understood(header: bytes) -> DecodeError:
    """The error of a header that `decode_envelope` does not understand, or whose kind is none of KINDS."""
    try:
        envelope = decode_envelope(header)
    except msgspec.MsgspecError as error:
        return DecodeError(f"a message with an envelope that makes no sense: {error}")
    return DecodeError(
        f"message {envelope.id} is of kind {envelope.kind}, which is none of {min(Kind)} to {max(Kind)}; "
        "do both workers run the same version of telegrad?"
    )


_OUT_OF_MEMORY = f"{OutOfMemoryError.__module__}.{OutOfMemoryError.__qualname__}"


class Packed(Frames, eq=False):
    """A message that is on its way out. It has no header before `encode_envelope`."""

    tracked: Sequence[torch.Tensor] = ()  # those that require grad; empty unless they were asked for
    handles: Sequence[Handle] = ()  # to values of workers
    placed: Sequence[Placed] = ()  # tensors in device memory


class Codec(Values):
    """One worker's codec. Any number of threads encode and decode at once."""

    def __init__(self, worker_id: int, main: str, strict_devices: bool = False, follows: bool = True) -> None:
        super().__init__(worker_id)
        self._strict = strict_devices
        # Tensors outside of contexts, so that what is untracked then is a call of telegrad's own. If not, the worker
        # does as torch does, also in contexts: parameters arrive as leaves.
        self._follows = follows
        self._main = main or None  # None: not known, and so no peer's
        self._names = Names()
        self.unanswered = self.definitions.unanswered  # not empty: tell `on_answer` of answers

    # -- encoding --------------------------------------------------------------------------------------

    def pack(
        self,
        envelope: Envelope,
        body: Body,
        peer: Hello,
        connection: Connection | None = None,
        track: bool = False,
        plain: bool = False,
    ) -> Packed:
        """A body as bytes; with `track`, also the tensors in it that require grad; `plain`: but for those in modules,
        which are copies with leaves of their own. Of the envelope only the kind, the id, the device map and `untracked`
        must be known by now. What is in CONTROLS needs none of this: see encode_control.

        Raises:
            EncodeError: something in the body cannot be pickled, or not tracked, or is on a device that no map names.
        """
        targets: Targets | None = None
        if self._strict and envelope.kind <= _REPLY:  # gradients always go where they came from
            targets = NO_MAP if envelope.device_map is None else StrictTargets(envelope.device_map)
        elif envelope.device_map is not None:
            targets = Targets(envelope.device_map)
        message = Outgoing(peer.id, peer.main == self._main, [] if track else None, targets, connection)
        if plain:
            message.in_modules, message.severed = set(), IN_MODULE
        elif envelope.untracked and self._follows:
            message.severed = IN_MODULE
        elif track and not self._follows:
            message.copies_parameters = type(body) is not Call or not takes_tensors_only(body.function)
        try:
            name, values, shape = b"", None, _FIELDS
            if type(body) is Call and (
                name := self._names.name_of(body.function, same_main=message.same_main and not self.definitions.lacking)
                or self.definitions.name_of(body.function, message)
            ):
                shape = _ARGS_AND_KWARGS if body.kwargs else _ARGS
                values = (body.args, body.kwargs) if body.kwargs else body.args
            elif type(body) is Gradients:
                values = body.gradients
            else:
                values = msgspec.structs.astuple(body)
            pickled, buffers = self.dump(values, message)
            if message.in_modules:
                check_bare(values, message)
            if message.carried:
                answered_as = envelope.id if envelope.kind == Kind.CALL else None
                buffers = [self.definitions.carry(message, answered_as), *buffers]
                shape |= _CARRIES
        except BaseException as error:
            if message.placed and connection is not None and connection.device_lane is not None:
                connection.device_lane.take_back(message.placed)
            if isinstance(error, EncodeError | TransportError):
                raise
            if isinstance(error, UnmappedDeviceError):
                kind = "Response" if envelope.kind == _REPLY else "Request"
                raise EncodeError(error.text(kind, peer.name)) from error
            raise EncodeError(reason_of(error)) from error
        skeleton = b"".join((_HEAD.pack(shape, len(name)), name, pickled))
        packed = Packed(b"", [skeleton, *buffers], message.keep)
        packed.tracked, packed.handles, packed.placed = message.tracked or (), message.handles or (), message.placed
        return packed

    def not_sent(self, envelope: Envelope) -> None:
        """Notes that a message was packed, and not sent."""
        self.unanswered.pop(envelope.id, None)

    def first_unsendable(self, values: Sequence[Any], peer: Hello, *, track: bool) -> Any:
        """The first of the values that cannot be pickled, for an error message; None if all can."""
        for value in values:
            try:
                self.dump((value,), Outgoing(peer.id, peer.main == self._main, [] if track else None))
            except BaseException as error:
                if is_interrupt(error):
                    raise
                return value
        return None

    # -- decoding --------------------------------------------------------------------------------------

    def open_control(self, envelope: Envelope, frames: Frames) -> Control:
        """The body of a message that has nothing of users' in it: may be done while reading.

        Raises:
            OutOfMemoryError: there was no memory for it.
            DecodeError: it is not one.
        """
        try:
            return _decode_control[envelope.kind](frames.buffers[0])
        except (msgspec.MsgspecError, IndexError) as error:
            if frames.missing and envelope.kind == Kind.DONE:  # only one of a failure is large
                text = f"its part has failed, and the report could not be read: {frames.missing}"
                return Done(envelope.reply_to, Failure(b"", _OUT_OF_MEMORY, text, ""))
            if frames.missing:
                raise OutOfMemoryError(frames.missing) from None
            raise DecodeError(f"a message of kind {envelope.kind} that makes no sense: {error}") from error

    def decode(
        self, envelope: Envelope, frames: Frames, attach: Attach | None = None
    ) -> Call | Reply | Failure | Gradients:
        """The body. `attach` gives the tensors that were tracked their history; without it, those that require grad
        are leaves.

        Raises:
            OutOfMemoryError: there was no memory for it, or there is none to rebuild it.
            DecodeError: it cannot be rebuilt here.
        """
        sender = envelope.id >> COUNTER_BITS
        carried = None
        if envelope.device_map is not None:
            check_all_here(envelope.device_map.values())
        try:
            skeleton, *buffers = frames.buffers
            shape, length = _HEAD.unpack_from(skeleton)
            if shape & _CARRIES:
                shape -= _CARRIES
                carried, *buffers = buffers
                self.load_definitions(carried, sender)
            start = _HEAD.size + length
            function = None
            if length:
                name = bytes(skeleton[_HEAD.size : start])
                function = self._resolve(name, sender, frames.deadline) if name[0] else self.definitions.resolve(name)
            with_devices = frames if frames.arrived else None
            values = self.load(memoryview(skeleton)[start:], buffers, sender, attach, (), with_devices, frames.deadline)
            if envelope.kind == Kind.GRADIENTS:
                return Gradients(values)
            if shape == _FIELDS:
                return BODIES[envelope.kind](*values)
            return Call(function, values, None) if shape == _ARGS else Call(function, *values)
        except BaseException as error:
            if frames.missing:
                raise OutOfMemoryError(frames.missing) from None
            if isinstance(error, MemoryError) and not isinstance(error, OutOfMemoryError):
                raise OutOfMemoryError(describe_failure(sum(map(len, frames.buffers)))) from error
            kind = OutOfMemoryError if isinstance(error, OutOfMemoryError | torch.OutOfMemoryError) else DecodeError
            raise kind(reason_of(error)) from error
        finally:
            if carried is not None and sender in self.definitions.lost:
                self.definitions.forget(sender)  # it was lost before its message was decoded

    def _resolve(self, name: bytes, sender: int, deadline: float | None) -> Any:
        try:
            return self._names.resolve(name)
        except AttributeError:
            if not name.startswith(_OF_MAIN):
                raise
            return self.of_main(sender, name.removeprefix(_OF_MAIN).decode(), deadline)

    def on_answer(self, peer: int, envelope: Envelope) -> None:
        """Notes an answer, which may never be decoded: its sender has run the call, unless it is a Failure."""
        self.definitions.on_answered(envelope.reply_to, peer, has_run=envelope.kind == _REPLY)

    def forget(self, worker_id: int, submit: Callable[[Callable[[], None]], None] | None = None) -> None:
        """Forgets what a worker that is gone has sent, and what it was sent. `submit` has another thread run a task."""
        if self.definitions.forget(worker_id) and submit is not None:
            submit(reclaim)

    # -- exceptions ------------------------------------------------------------------------------------

    def encode_exception(
        self, error: BaseException, traceback: str, peer: Hello, track: bool = False, plain: bool = False
    ) -> Failure:
        """An exception as a body. With `track` and `plain` as in `pack`, tensors in it that require grad stand beside
        it; else they are severed, and the body can always be sent."""
        # It is unpickled by itself, and perhaps never, so it carries nothing.
        message = Outgoing(peer.id, peer.main == self._main, [] if track else None, carried=None, handles=None)
        message.severed, message.in_place = IN_EXCEPTION, sys.maxsize
        if plain or not track:
            message.in_modules = set()
        try:
            pickled = self._pickle((error,), message, [], None)
            tensors = tuple(message.apart) if message.apart else None
        except BaseException as failed:
            if is_interrupt(failed):
                raise
            pickled, tensors = b"", None  # it arrives as a RemoteError
        try:
            text = interruptible(str, error)
        except BaseException as failed:
            if is_interrupt(failed):
                raise
            text = text_of(error)
        name = f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins.")
        return Failure(pickled, name, text, traceback, tensors)

    def decode_exception(self, failure: Failure, worker: str) -> BaseException:
        """The exception of its own type where that can be rebuilt, else a RemoteError."""
        error = None
        if failure.exception:
            try:
                (error,) = self.load(memoryview(failure.exception), [], apart=failure.tensors or ())
            except BaseException as failed:
                if is_interrupt(failed):
                    raise
                # Else it is of a type that is not known here, or whose constructor wants other arguments.
        elif failure.type_name == _OUT_OF_MEMORY:  # it was made where nothing may be pickled
            error = OutOfMemoryError(failure.text)
        if not isinstance(error, BaseException):
            error = RemoteError(
                f"{failure.type_name} on worker {worker!r}: {failure.text} (Original exception on remote side was of a "
                "type that cannot be rebuilt here)"
            )
        error.__cause__ = RemoteTraceback(worker, failure.traceback)
        return error
