"""Message to frames and back: the envelope as msgpack, the body as a pickle with large memory beside it.

    pack(body)              -> Packed            the body as bytes, and the tensors in it that require grad
    seal(envelope, packed)  -> Frames(header, [skeleton, definitions?, buffer, ...])
    open(frames)            -> Envelope          cheap, runs no user code: may be done while reading
    decode(frames)          -> body              runs users' constructors: never while reading

The skeleton starts with the function's name, in a call whose function has one that the callee can look up
(see names.py), or its number, where it was sent by value before (see definitions.py). The values behind it
are pickled in the first of these ways that can:

    flat      each value is plain or a tensor; tensors' metadata lies beside the values
    nested    any picklable values, with tensors wherever they are
    by value  the same, made by cloudpickle, for what the callee cannot import (see by_value.py)

Pickling runs users' code, which may raise anything: SystemExit is the error of that message, and not the end of the
thread that happens to encode or decode it. Only a Ctrl-C on the main thread comes through.

In a message that is tracked (one sent in a context), the tensors that require grad stand apart: they are
rebuilt first, get their history, and then take their places among the values. What backward passes tell
each other is plain msgpack.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import msgspec
import torch

from .._torch import DisableTorchFunctionSubclass
from ..errors import DecodeError, EncodeError, RemoteError, RemoteTraceback, text_of
from ..messages import (
    COUNTER_BITS,
    Begin,
    Call,
    Done,
    Drop,
    End,
    Envelope,
    Failure,
    Gradients,
    Hello,
    Hold,
    Kind,
    Release,
    Reply,
    Return,
    sender_of,
)
from ..options import SHARED_MEMORY_FROM
from ..primitives.interrupts import interruptible, is_interrupt
from ..transport.base import Buffer, Frames
from .by_name import Names
from .by_value import ByValuePickler, Dependencies, Namespaces, decoding, is_by_value, is_definition
from .by_value_cache import Definitions, Outgoing
from .handles import Handle
from .tensors import FLAGS, REQUIRES_GRAD, attached, describe, rebuild, reduce_tensor, reduce_tracked
from .torch_objects import is_named_by_torch, reduce_named_by_torch

_encode_envelope = msgspec.msgpack.Encoder().encode
_decode_envelope = msgspec.msgpack.Decoder(Envelope).decode

Control = Begin | Done | End | Release | Hold | Drop | Return  # with no tensors in them, and nothing of users'
Body = Call | Reply | Failure | Gradients | Control
BODIES: dict[int, type[Call | Reply | Failure]] = {Kind.CALL: Call, Kind.REPLY: Reply, Kind.FAILURE: Failure}
_encode_control = msgspec.msgpack.Encoder().encode
_decode_control: dict[int, Callable[[Buffer], Any]] = {
    kind: msgspec.msgpack.Decoder(body).decode
    for kind, body in (
        (Kind.BEGIN, Begin),
        (Kind.DONE, Done),
        (Kind.END, End),
        (Kind.RELEASE, Release),
        (Kind.HOLD, Hold),
        (Kind.DROP, Drop),
        (Kind.RETURN, Return),
    )
}

# Gives received tensors their history.
Attach = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]

_KINDS = range(min(Kind), max(Kind) + 1)
_REPLY = int(Kind.REPLY)

_HEAD = struct.Struct("<BH")  # what the values are, and the length of the function's name
_FIELDS, _ARGS, _ARGS_AND_KWARGS = 0, 1, 2  # the body's fields; the arguments of a call by name
_CARRIES = 0x80  # added to the above: the second buffer has definitions

_FLAT = 1  # the first byte of flat values; a pickle's is 0x80
_FLAT_BYTE = b"\x01"
_APART = 2  # the first byte where tracked tensors come before the values
_APART_HEAD = struct.Struct("<BIQ")  # that, the buffers of the values, the length of the tensors' pickle
_PLAIN = frozenset((type(None), bool, int, float, complex, str, bytes))


class _ByValueError(Exception):
    """Something in the message must go by value."""


class Packed(NamedTuple):
    """A body as bytes, with no envelope yet."""

    buffers: list[Buffer]
    keep: list[Any]
    tracked: Sequence[torch.Tensor]  # those that require grad; empty unless they were asked for
    handles: Sequence[Handle] = ()  # to values of workers


class Codec:
    """Of one worker. Any number of threads encode and decode at once."""

    def __init__(self, worker_id: int, main: str) -> None:
        self._main = main
        self._names = Names()
        self._namespaces = Namespaces(worker_id)
        self._definitions = Definitions(self._namespaces, self._dump_definition)
        self.unanswered = self._definitions.unanswered  # not empty: tell `on_answer` of answers
        self.handle: Callable[[int, int], Any] = _no_handle  # the worker, and its entry for a handle that came

    def pack(self, envelope: Envelope, body: Body, peer: Hello, *, track: bool = False) -> Packed:
        """A body as bytes; with `track`, also the tensors in it that require grad.

        Raises:
            EncodeError: something in the body cannot be pickled, or not tracked.
        """
        if isinstance(body, Control):
            return Packed([_encode_control(body)], [], ())
        message = Outgoing(peer.id, peer.main != "" and peer.main == self._main, track=track)
        try:
            name, values, shape = b"", None, _FIELDS
            if type(body) is Call and (name := self._name_of(body.function, message)):
                shape = _ARGS_AND_KWARGS if body.kwargs else _ARGS
                values = (body.args, body.kwargs) if body.kwargs else body.args
            elif type(body) is Gradients:
                values = body.gradients
            else:
                values = msgspec.structs.astuple(body)
            pickled, buffers = self._dump(values, message)
            if message.carried:
                answered_as = envelope.id if envelope.kind == Kind.CALL else None
                buffers = [self._definitions.carry(message, answered_as), *buffers]
                shape |= _CARRIES
        except EncodeError:
            raise
        except BaseException as error:
            if is_interrupt(error):
                raise
            raise EncodeError(f"{type(error).__name__}: {text_of(error)}") from error
        skeleton = b"".join((_HEAD.pack(shape, len(name)), name, pickled))
        return Packed([skeleton, *buffers], message.keep, message.tracked or (), message.handles or ())

    def on_answer(self, peer: int, envelope: Envelope) -> None:
        """An answer has come, which may never be decoded: its sender has run the call, unless it is a Failure."""
        self._definitions.on_answered(envelope.reply_to, peer, has_run=envelope.kind == _REPLY)

    def not_sent(self, envelope: Envelope) -> None:
        """The message was packed, and not sent."""
        self._definitions.not_sent(envelope.id)

    def forget(self, worker_id: int) -> None:
        """Forgets what a worker that is gone has sent, and what it was sent."""
        self._definitions.forget(worker_id)

    def seal(self, envelope: Envelope, packed: Packed) -> Frames:
        """A message, ready to be written."""
        return Frames(_encode_envelope(envelope), packed.buffers, packed.keep)

    def _name_of(self, function: Any, message: Outgoing) -> bytes:
        name = self._names.name_of(function, same_main=message.same_main)
        return name or self._definitions.name_of(function, message)

    def open(self, frames: Frames) -> Envelope:
        """The envelope.

        Raises:
            DecodeError: it is not one.
        """
        try:
            envelope = _decode_envelope(frames.header)
        except msgspec.MsgspecError as error:
            raise DecodeError(f"a message with an envelope that makes no sense: {error}") from error
        if envelope.kind not in _KINDS:
            raise DecodeError(
                f"message {envelope.id} is of kind {envelope.kind}, which is none of {_KINDS[0]} to {_KINDS[-1]}; "
                "do both workers run the same version of telegrad?"
            )
        return envelope

    def open_control(self, envelope: Envelope, frames: Frames) -> Control:
        """The body of a message that has nothing of users' in it: may be done while reading.

        Raises:
            DecodeError: it is not one.
        """
        try:
            return _decode_control[envelope.kind](frames.buffers[0])  # type: ignore[no-any-return]
        except (msgspec.MsgspecError, IndexError) as error:
            raise DecodeError(f"a message of kind {envelope.kind} that makes no sense: {error}") from error

    def decode(
        self, envelope: Envelope, frames: Frames, attach: Attach | None = None
    ) -> Call | Reply | Failure | Gradients:
        """The body. `attach` gives the tensors that were tracked their history; without it, those that require
        grad are leaves.

        Raises:
            DecodeError: it cannot be rebuilt here.
        """
        carried = None
        try:
            skeleton, *buffers = frames.buffers
            shape, length = _HEAD.unpack_from(skeleton)
            if shape & _CARRIES:
                shape -= _CARRIES
                carried, *buffers = buffers
                sender = sender_of(envelope.id)
                with decoding(self._namespaces, self._definitions.get, self.handle, sender):
                    interruptible(self._definitions.receive, carried, sender)
            start = _HEAD.size + length
            function = None
            if length:
                name = bytes(skeleton[_HEAD.size : start])
                function = self._names.resolve(name) if name[0] else self._definitions.resolve(name)
            values = self._load(memoryview(skeleton)[start:], buffers, attach, envelope)
            if envelope.kind == Kind.GRADIENTS:
                return Gradients(values)
            if shape == _FIELDS:
                return BODIES[envelope.kind](*values)
            return Call(function, values, None) if shape == _ARGS else Call(function, *values)
        except BaseException as error:
            if is_interrupt(error):
                raise
            raise DecodeError(f"{type(error).__name__}: {text_of(error)}") from error
        finally:
            if carried is not None and sender in self._definitions.lost:
                self._definitions.forget(sender)  # it was lost before its message was decoded

    def encode_exception(self, error: BaseException, traceback: str, peer: Hello) -> Failure:
        """An exception as a body that can always be sent."""
        message = Outgoing(peer.id, peer.main != "" and peer.main == self._main)
        message.carried = message.handles = None  # it is unpickled by itself, and perhaps never
        try:
            pickled, _ = self._dump_nested((error,), message, in_band=True)
        except BaseException as failed:
            if is_interrupt(failed):
                raise
            pickled = b""  # it arrives as a RemoteError
        try:
            text = interruptible(str, error)
        except BaseException as failed:
            if is_interrupt(failed):
                raise
            text = text_of(error)
        name = f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins.")
        return Failure(pickled, name, text, traceback)

    def decode_exception(self, failure: Failure, worker: str) -> BaseException:
        """The exception of its own type where that can be rebuilt, else a RemoteError."""
        error: BaseException | None = None
        if failure.exception:
            try:
                (found,) = self._load(memoryview(failure.exception), [])
                error = found if isinstance(found, BaseException) else None
            except BaseException as failed:
                if is_interrupt(failed):
                    raise
                # Else it is of a type that is not known here, or whose constructor wants other arguments.
        if error is None:
            error = RemoteError(
                f"{failure.type_name} on worker {worker!r}: {failure.text} (Original exception on remote side was of a "
                "type that cannot be rebuilt here)"
            )
        error.__cause__ = RemoteTraceback(worker, failure.traceback)
        return error

    def first_unsendable(self, values: Sequence[Any], peer: Hello, *, track: bool) -> Any:
        """The first of the values that cannot be pickled, for an error message; None if all can."""
        for value in values:
            try:
                self._dump((value,), Outgoing(peer.id, peer.main != "" and peer.main == self._main, track=track))
            except BaseException as error:
                if is_interrupt(error):
                    raise
                return value
        return None

    def _dump(self, values: tuple[Any, ...], message: Outgoing) -> tuple[bytes, Sequence[Buffer]]:
        flat = _flatten(values, message)
        if flat is None:
            return self._dump_nested(values, message, in_band=False)
        buffers: list[pickle.PickleBuffer] = []
        pickled = _FLAT_BYTE + pickle.dumps(flat, 5, buffer_callback=buffers.append)
        return pickled, [buffer.raw() for buffer in buffers] if buffers else ()

    def _dump_nested(self, values: Any, message: Outgoing, *, in_band: bool) -> tuple[bytes, Sequence[Buffer]]:
        buffers: list[Buffer] = []
        on_buffer = None if in_band else _beside(buffers)
        pickled = self._pickle(values, message, buffers, on_buffer)
        if not message.tracked:
            return pickled, buffers
        head = (_APART, len(buffers))
        tracked, message.tracked = message.tracked, None
        with DisableTorchFunctionSubclass():
            plain = [torch.Tensor._make_subclass(torch.Tensor, tensor, False) for tensor in tracked]
        apart = self._pickle(plain, message, buffers, on_buffer)
        message.tracked = tracked
        return b"".join((_APART_HEAD.pack(*head, len(apart)), apart, pickled)), buffers

    def _pickle(
        self, values: Any, message: Outgoing, buffers: list[Buffer], on_buffer: Callable[[Any], Any] | None
    ) -> bytes:
        already = len(buffers)
        file = io.BytesIO()
        try:
            pickler = _Pickler(file, on_buffer, lambda obj: self._reduce(obj, message, by_value=False))
            interruptible(pickler.dump, values)
            return file.getvalue()
        except (_ByValueError, pickle.PicklingError, AttributeError, TypeError):
            pass  # and now with cloudpickle
        del buffers[already:]
        if message.tracked:
            message.tracked.clear()
        if message.handles:
            message.handles.clear()
        file = io.BytesIO()
        by_value = ByValuePickler(
            file,
            buffer_callback=on_buffer,
            namespaces=self._namespaces,
            reduce=lambda obj: self._reduce(obj, message, by_value=True),
        )
        interruptible(by_value.dump, values)
        return file.getvalue()

    def _dump_definition(self, value: Any, made_of: Dependencies) -> bytes:
        """Pickles a definition, with all that it needs."""
        keep: list[Any] = []
        file = io.BytesIO()
        pickler = ByValuePickler(
            file,
            buffer_callback=None,
            namespaces=self._namespaces,
            reduce=lambda obj: _reduce_data(obj, keep, same_main=False),
            dependencies=made_of,
        )
        try:
            interruptible(pickler.dump, value)
        except BaseException as error:
            if is_interrupt(error):
                raise
            raise EncodeError(f"{type(error).__name__}: {text_of(error)}") from error
        return file.getvalue()

    def _reduce(self, obj: Any, message: Outgoing, *, by_value: bool) -> Any:
        """What telegrad has to say about how an object is saved; NotImplemented: nothing."""
        if is_definition(obj):
            if is_by_value(obj):
                reduced = self._definitions.reduce(obj, message)
                if reduced is NotImplemented and not by_value:
                    raise _ByValueError
                return reduced
            return NotImplemented
        if isinstance(obj, Handle):
            if message.handles is None:
                raise EncodeError("an RRef cannot be sent in an exception")
            message.handles.append(obj)
            return obj.rebuild, (obj.entry.id, obj.entry.owner)
        if message.tracked is not None and isinstance(obj, torch.Tensor) and obj.requires_grad:
            return reduce_tracked(obj, message.tracked)
        return _reduce_data(obj, message.keep, same_main=message.same_main)

    def _load(
        self,
        pickled: memoryview,
        buffers: Sequence[Buffer],
        attach: Attach | None = None,
        envelope: Envelope | None = None,
    ) -> Any:
        if pickled[0] == _FLAT:
            values, tensors = pickle.loads(pickled[1:], buffers=buffers)
            if tensors is None:
                return values
            if not torch.is_inference_mode_enabled():
                return _unflatten(values, tensors, attach)
            with torch.inference_mode(False):
                return _unflatten(values, tensors, attach)
        if pickled[0] == _APART:
            _, ahead, length = _APART_HEAD.unpack_from(pickled)
            start = _APART_HEAD.size + length
            tracked = self._load(pickled[_APART_HEAD.size : start], buffers[ahead:], None, envelope)
            with torch.inference_mode(False):
                tracked = _leaves(tracked) if attach is None else attach(tracked)
            with attached(tracked):
                return self._load(pickled[start:], buffers[:ahead], None, envelope)
        # What arrives in inference mode is no inference tensor: it may be kept beyond that.
        no_inference = torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()
        sender = None if envelope is None else envelope.id >> COUNTER_BITS
        with no_inference, decoding(self._namespaces, self._definitions.get, self.handle, sender):
            return interruptible(partial(pickle.loads, pickled, buffers=buffers))


def _no_handle(id: int, owner: int) -> Any:
    raise DecodeError(f"an RRef (to value {id} of worker {owner}) came where none is known")


def _reduce_data(obj: Any, keep: list[Any], *, same_main: bool) -> Any:
    kind = type(obj)
    if issubclass(kind, torch.Tensor):
        return reduce_tensor(obj, keep)
    if is_named_by_torch(obj):
        return reduce_named_by_torch(obj, same_main)
    return NotImplemented


def _beside(buffers: list[Buffer]) -> Callable[[pickle.PickleBuffer], bool]:
    """Puts large memory beside the pickle. Small memory stays in it: there may be any number of small arrays."""

    def on_buffer(buffer: pickle.PickleBuffer) -> bool:
        memory = buffer.raw()
        if memory.nbytes < SHARED_MEMORY_FROM:
            return True
        buffers.append(memory)
        return False

    return on_buffer


class _Pickler(pickle.Pickler):
    """The plain pickler. `reduce` has the first word about every object."""

    def __init__(self, file: io.BytesIO, on_buffer: Callable[[Any], Any] | None, reduce: Callable[[Any], Any]) -> None:
        super().__init__(file, 5, buffer_callback=on_buffer)
        self.reducer_override = reduce  # type: ignore[method-assign]


def _leaves(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.requires_grad_() for tensor in tensors]


def _flatten(values: tuple[Any, ...], message: Outgoing) -> tuple[Any, ...] | None:
    """(values with None for tensors, {position: tensor's description}); None if there is something else.

    A tensor that is there more than once is described once, and then by its first position.
    """
    tensors: dict[int, Any] | None = None
    tracked = []
    for position, value in enumerate(values):
        kind = type(value)
        if kind is torch.Tensor:
            if tensors is None:
                tensors = {}
                seen: dict[int, int] = {}
            elif id(value) in seen:
                tensors[position] = seen[id(value)]
                continue
            description = describe(value, message.keep)
            if description is None:
                return None
            tensors[position] = description
            seen[id(value)] = position
            if value.requires_grad:
                tracked.append(value)
        elif kind not in _PLAIN:
            return None
    if tracked and message.tracked is not None:
        message.tracked = tracked
    if tensors is None:
        return values, None
    return tuple([None if position in tensors else value for position, value in enumerate(values)]), tensors


def _unflatten(values: tuple[Any, ...], tensors: dict[int, Any], attach: Attach | None) -> tuple[Any, ...]:
    found = list(values)
    tracked = []
    for position, description in tensors.items():
        if type(description) is int:
            continue
        if attach is not None and description[FLAGS] & REQUIRES_GRAD:
            tracked.append(position)
            found[position] = rebuild(*description, detached=True)  # type: ignore[misc]
        else:
            found[position] = rebuild(*description)
    if tracked:
        assert attach is not None
        with_history = attach([found[position] for position in tracked])
        for position, tensor in zip(tracked, with_history, strict=True):
            found[position] = tensor
    for position, description in tensors.items():
        if type(description) is int:
            found[position] = found[description]
    return tuple(found)
