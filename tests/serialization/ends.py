"""Codecs that talk to each other without a transport."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from telegrad.messages import COUNTER_BITS, Call, Envelope, Hello, Kind, Reply
from telegrad.serialization.codec import Codec, encode_envelope
from telegrad.transport.base import Frames


@dataclass
class End:
    """A worker's codec, and what others know of the worker."""

    id: int
    main: str = ""
    codec: Codec = field(init=False)

    def __post_init__(self) -> None:
        self.codec = Codec(self.id, self.main)
        self.hello = Hello("group", self.id, f"worker {self.id}", main=self.main)

    def encode(self, to: End, kind: Kind, body: Any, *, id: int = 0, reply_to: int = 0) -> tuple[Envelope, Frames]:
        envelope = Envelope(kind, (self.id << COUNTER_BITS) + id, reply_to)
        return envelope, arrived(encoded(self.codec, envelope, body, to.hello))


def encoded(codec: Codec, envelope: Envelope, body: Any, to: Hello) -> Frames:
    packed = codec.pack(envelope, body, to)
    packed.header = encode_envelope(envelope)
    return packed


def arrived(frames: Frames) -> Frames:
    """Frames as a transport delivers them: in memory of the receiver's own."""
    return Frames(frames.header, [bytearray(buffer) for buffer in frames.buffers])


class Link:
    """Calls from one end to another."""

    _ids = itertools.count(1)

    def __init__(self, near: End, far: End) -> None:
        self.near, self.far = near, far
        self.nbytes = 0  # of the last message

    def send(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Envelope, Frames]:
        envelope, frames = self.near.encode(
            self.far, Kind.CALL, Call(function, args, kwargs or None), id=next(self._ids)
        )
        self.nbytes = sum(map(len, frames.buffers))
        return envelope, frames

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs the function at the far end and returns the result, as a worker does."""
        envelope, frames = self.send(function, *args, **kwargs)
        call = self.far.codec.decode(envelope, frames)
        result = call.function(*call.args, **(call.kwargs or {}))
        return self.answer(envelope, result)

    def answer(self, call: Envelope, result: Any) -> Any:
        envelope, frames = self.far.encode(self.near, Kind.REPLY, Reply(result), reply_to=call.id)
        self.near.codec.on_answer(self.far.id, envelope)
        return self.near.codec.decode(envelope, frames).value

    def carry(self, *values: Any, **more: Any) -> Any:
        """The values as they arrive, as arguments of a call."""
        envelope, frames = self.send(print, *values, **more)
        call = self.far.codec.decode(envelope, frames)
        return call.args if call.kwargs is None else (*call.args, *call.kwargs.values())
