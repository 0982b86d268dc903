"""Message to frames and back: the envelope as msgpack, the body as a pickle with large memory beside it.

    encode(envelope, body)  -> Frames(header, [skeleton, buffer, ...])
    open(frames)            -> Envelope          cheap, runs no user code: may be done while reading
    decode(frames)          -> body              runs users' constructors: never while reading

The skeleton starts with the function's name, in a call whose function has one that the callee can look up.
The values behind it are pickled in the first of these ways that can:

    flat      each value is plain or a tensor; tensors' metadata lies beside the values
    nested    any picklable values, with tensors wherever they are
    by value  the same, made by cloudpickle, for what the callee cannot import (see by_value.py)
"""

from __future__ import annotations

import io
import pickle
import struct
import types
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch

from .by_value import ByValuePickler, Namespaces, decoding, is_of_main, main_attribute
from .errors import DecodeError, EncodeError, RemoteError, RemoteTraceback
from .messages import Call, Envelope, Failure, Hello, Kind, Reply
from .names import Names
from .scripted import reduce_scripted
from .tensors import describe, rebuild, reduce_tensor
from .transport.base import Buffer, Frames

_encode_envelope = msgspec.msgpack.Encoder().encode
_decode_envelope = msgspec.msgpack.Decoder(Envelope).decode

Body = Call | Reply | Failure
BODIES: dict[int, type[Body]] = {Kind.CALL: Call, Kind.REPLY: Reply, Kind.FAILURE: Failure}

_HEAD = struct.Struct("<BH")  # what the values are, and the length of the function's name
_FIELDS, _ARGS, _ARGS_AND_KWARGS = 0, 1, 2  # the body's fields; the arguments of a call by name

_FLAT = 1  # the first byte of flat values; a pickle's is 0x80
_FLAT_BYTE = b"\x01"
_PLAIN = frozenset((type(None), bool, int, float, complex, str, bytes))


class _ByValueError(Exception):
    """Something in the message must go by value."""


class Codec:
    """Of one worker."""

    def __init__(self, worker_id: int, main: str) -> None:
        self._namespaces = Namespaces(worker_id)
        self._names = Names()
        self._main = main

    def encode(self, envelope: Envelope, body: Body, peer: Hello) -> Frames:
        """A message as frames.

        Raises:
            EncodeError: something in the body cannot be pickled.
        """
        same_main = peer.main != "" and peer.main == self._main
        name, values, shape = b"", None, _FIELDS
        if type(body) is Call and (name := self._names.name_of(body.function, same_main=same_main)):
            shape = _ARGS_AND_KWARGS if body.kwargs else _ARGS
            values = (body.args, body.kwargs) if body.kwargs else body.args
        else:
            values = msgspec.structs.astuple(body)
        keep: list[Any] = []
        pickled, buffers = self._dump(values, keep, same_main)
        skeleton = b"".join((_HEAD.pack(shape, len(name)), name, pickled))
        return Frames(_encode_envelope(envelope), [skeleton, *[b.raw() for b in buffers]], keep)

    def open(self, frames: Frames) -> Envelope:
        """The envelope.

        Raises:
            DecodeError: it is not one.
        """
        try:
            return _decode_envelope(frames.header)
        except msgspec.MsgspecError as error:
            raise DecodeError(f"a message with an envelope that makes no sense: {error}") from error

    def decode(self, envelope: Envelope, frames: Frames) -> Body:
        """The body.

        Raises:
            DecodeError: it cannot be rebuilt here.
        """
        try:
            skeleton, *buffers = frames.buffers
            shape, length = _HEAD.unpack_from(skeleton)
            start = _HEAD.size + length
            function = self._names.resolve(bytes(skeleton[_HEAD.size : start])) if length else None
            values = self._load(memoryview(skeleton)[start:], buffers)
            if shape == _FIELDS:
                return BODIES[envelope.kind](*values)
            return Call(function, values, None) if shape == _ARGS else Call(function, *values)
        except Exception as error:
            raise DecodeError(f"{type(error).__name__}: {error}") from error

    def encode_exception(self, error: BaseException, traceback: str, peer: Hello) -> Failure:
        """An exception as a body that can always be sent."""
        try:
            pickled = self._dump_in_band(error, peer)
        except EncodeError:
            pickled = b""
        name = f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins.")
        return Failure(pickled, name, str(error), traceback)

    def decode_exception(self, failure: Failure, worker: str) -> BaseException:
        """The exception of its own type where that can be rebuilt, else a RemoteError."""
        error: Any = None
        if failure.exception:
            try:
                (error,) = self._load(memoryview(failure.exception), [])
            except Exception:
                error = None  # a type that is not known here, or whose constructor wants other arguments
        if not isinstance(error, BaseException):
            error = RemoteError(f"{failure.type_name} on worker {worker!r}: {failure.text}")
        error.__cause__ = RemoteTraceback(worker, failure.traceback)
        return error

    def first_unsendable(self, values: Sequence[Any], peer: Hello) -> Any:
        """The first of the values that cannot be pickled, for an error message; None if all can."""
        for value in values:
            try:
                self._dump_in_band(value, peer)
            except EncodeError:
                return value
        return None

    def _dump_in_band(self, value: Any, peer: Hello) -> bytes:
        same_main = peer.main != "" and peer.main == self._main
        pickled, buffers = self._dump((value,), [], same_main)
        return pickled if not buffers else self._dump_nested((value,), [], same_main, in_band=True)[0]

    def _dump(
        self, values: tuple[Any, ...], keep: list[Any], same_main: bool
    ) -> tuple[bytes, Sequence[pickle.PickleBuffer]]:
        flat = _flatten(values, keep)
        if flat is None:
            return self._dump_nested(values, keep, same_main, in_band=False)
        buffers: list[pickle.PickleBuffer] = []
        return _FLAT_BYTE + pickle.dumps(flat, 5, buffer_callback=buffers.append), buffers

    def _dump_nested(
        self, values: tuple[Any, ...], keep: list[Any], same_main: bool, *, in_band: bool
    ) -> tuple[bytes, list[pickle.PickleBuffer]]:
        file = io.BytesIO()
        buffers: list[pickle.PickleBuffer] = []
        try:
            _Pickler(file, None if in_band else buffers.append, keep, same_main).dump(values)
            return file.getvalue(), buffers
        except (_ByValueError, pickle.PicklingError, AttributeError, TypeError):
            pass  # and now with cloudpickle
        except Exception as error:
            raise EncodeError(f"{type(error).__name__}: {error}") from error
        file = io.BytesIO()
        buffers = []
        try:
            ByValuePickler(
                file,
                buffer_callback=None if in_band else buffers.append,
                namespaces=self._namespaces,
                reduce=lambda obj: _reduce(obj, keep, same_main, by_value=True),
            ).dump(values)
            return file.getvalue(), buffers
        except Exception as error:
            raise EncodeError(f"{type(error).__name__}: {error}") from error

    def _load(self, pickled: memoryview, buffers: Sequence[Buffer]) -> Any:
        if pickled[0] == _FLAT:
            return _unflatten(pickle.loads(pickled[1:], buffers=buffers))
        with decoding(self._namespaces):
            return pickle.loads(pickled, buffers=buffers)


def _flatten(values: tuple[Any, ...], keep: list[Any]) -> tuple[Any, ...] | None:
    """(values with None for tensors, {position: tensor's description}); None if there is something else."""
    tensors: dict[int, Any] | None = None
    for position, value in enumerate(values):
        kind = type(value)
        if kind is torch.Tensor:
            description = describe(value, keep)
            if description is None:
                return None
            if tensors is None:
                tensors = {}
            tensors[position] = description
        elif kind not in _PLAIN:
            return None
    if tensors is None:
        return values, None
    return tuple([None if position in tensors else value for position, value in enumerate(values)]), tensors


def _unflatten(flat: tuple[Any, ...]) -> tuple[Any, ...]:
    values, tensors = flat
    if tensors is None:
        return values  # type: ignore[no-any-return]
    values = list(values)
    for position, description in tensors.items():
        values[position] = rebuild(*description)
    return tuple(values)


class _Pickler(pickle.Pickler):
    """The plain pickler, with tensors out of band."""

    def __init__(
        self, file: io.BytesIO, on_buffer: Callable[[Any], Any] | None, keep: list[Any], same_main: bool
    ) -> None:
        super().__init__(file, 5, buffer_callback=on_buffer)
        self._keep = keep
        self._same_main = same_main

    def reducer_override(self, obj: Any) -> Any:
        return _reduce(obj, self._keep, self._same_main, by_value=False)


def _reduce(obj: Any, keep: list[Any], same_main: bool, *, by_value: bool) -> Any:
    """What telegrad has to say about how an object is saved; NotImplemented: nothing."""
    kind = type(obj)
    if kind is types.FunctionType or issubclass(kind, type):
        if is_of_main(obj):
            if same_main and "<" not in obj.__qualname__:
                return main_attribute, (obj.__qualname__,)
            if not by_value:
                raise _ByValueError
        return NotImplemented
    if issubclass(kind, torch.Tensor):
        return reduce_tensor(obj, keep)
    if kind is torch.jit.ScriptFunction or issubclass(kind, torch.jit.ScriptModule):
        return reduce_scripted(obj, same_main)
    return NotImplemented
