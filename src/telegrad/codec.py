"""Message to frames and back: the envelope as msgpack, the body as a pickle with large memory beside it.

    encode(envelope, body)  -> Frames(header, [skeleton, buffer, ...])
    open(frames)            -> Envelope          cheap, runs no user code: may be done while reading
    decode(frames)          -> body              runs users' constructors: never while reading

Most messages take the plain pickler; only what it cannot do (see by_value.py) is done again with cloudpickle.
"""

from __future__ import annotations

import io
import pickle
import types
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import torch

from .by_value import ByValuePickler, Namespaces, decoding, is_of_main, main_attribute
from .errors import DecodeError, EncodeError, RemoteError, RemoteTraceback
from .messages import Call, Envelope, Failure, Hello, Kind, Reply
from .scripted import reduce_scripted
from .tensors import reduce_tensor
from .transport.base import Frames

_encode_envelope = msgspec.msgpack.Encoder().encode
_decode_envelope = msgspec.msgpack.Decoder(Envelope).decode


Body = Call | Reply | Failure
BODIES: dict[int, type[Body]] = {Kind.CALL: Call, Kind.REPLY: Reply, Kind.FAILURE: Failure}


class _ByValueError(Exception):
    """Something in the message must go by value."""


class Codec:
    """Of one worker."""

    def __init__(self, worker_id: int, main: str) -> None:
        self._namespaces = Namespaces(worker_id)
        self._main = main

    def encode(self, envelope: Envelope, body: Body, peer: Hello) -> Frames:
        """A message as frames.

        Raises:
            EncodeError: something in the body cannot be pickled.
        """
        keep: list[Any] = []
        skeleton, buffers = self._dump(msgspec.structs.astuple(body), peer, keep, in_band=False)
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
        skeleton, *buffers = frames.buffers
        try:
            with decoding(self._namespaces):
                fields = pickle.loads(skeleton, buffers=buffers)
            return BODIES[envelope.kind](*fields)
        except Exception as error:
            raise DecodeError(f"{type(error).__name__}: {error}") from error

    def encode_exception(self, error: BaseException, traceback: str, peer: Hello) -> Failure:
        """An exception as a body that can always be sent."""
        try:
            pickled, _ = self._dump(error, peer, [], in_band=True)
        except EncodeError:
            pickled = b""
        name = f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins.")
        return Failure(pickled, name, str(error), traceback)

    def decode_exception(self, failure: Failure, worker: str) -> BaseException:
        """The exception of its own type where that can be rebuilt, else a RemoteError."""
        error: Any = None
        if failure.exception:
            try:
                with decoding(self._namespaces):
                    error = pickle.loads(failure.exception)
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
                self._dump(value, peer, [], in_band=True)
            except EncodeError:
                return value
        return None

    def _dump(
        self, body: Any, peer: Hello, keep: list[Any], *, in_band: bool
    ) -> tuple[bytes, list[pickle.PickleBuffer]]:
        same_main = peer.main != "" and peer.main == self._main
        file = io.BytesIO()
        buffers: list[pickle.PickleBuffer] = []
        try:
            _Pickler(file, None if in_band else buffers.append, keep, same_main).dump(body)
        except (_ByValueError, pickle.PicklingError, AttributeError, TypeError):
            file = io.BytesIO()
            buffers = []
            try:
                ByValuePickler(
                    file,
                    buffer_callback=None if in_band else buffers.append,
                    namespaces=self._namespaces,
                    reduce=lambda obj: _reduce(obj, keep, same_main, by_value=True),
                ).dump(body)
            except Exception as error:
                raise EncodeError(f"{type(error).__name__}: {error}") from error
        except Exception as error:
            raise EncodeError(f"{type(error).__name__}: {error}") from error
        return file.getvalue(), buffers


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
            if same_main and "<locals>" not in obj.__qualname__ and "<lambda>" not in obj.__qualname__:
                return main_attribute, (obj.__qualname__,)
            if not by_value:
                raise _ByValueError
        return NotImplemented
    if issubclass(kind, torch.Tensor):
        return reduce_tensor(obj, keep)
    if kind is torch.jit.ScriptFunction or issubclass(kind, torch.jit.ScriptModule):
        return reduce_scripted(obj, same_main)
    return NotImplemented
