"""The errors of calls that could not be sent, and of those whose answers cannot be read."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from ..errors import (
    CallTimeoutError,
    DecodeError,
    EncodeError,
    GradientError,
    OutOfMemoryError,
    PeerLostError,
    TransportError,
    text_of,
)
from ..gradients.attach import NoHistoryError
from ..messages import Call
from ..primitives.memory import with_advice
from ..serialization.codec import Codec
from ..serialization.devices import UnmappedDeviceError
from .pending import PendingCall

if TYPE_CHECKING:
    from ..worker import Worker


def why_not_sent(worker: Worker, codec: Codec, error: BaseException, call: PendingCall, body: Call) -> BaseException:
    """The error that the caller of a call sees, which could not be sent."""
    assert call.connection is not None
    if isinstance(error, EncodeError):
        if isinstance(error.__cause__, UnmappedDeviceError):
            return error  # torch's words, with the worker and the device
        values = [*body.args, *(body.kwargs or {}).values()]
        track = worker.attach.current() is not None
        culprit = codec.first_unsendable(values, call.connection.peer, track=track)
        what = "the function" if culprit is None else f"an argument, a {type(culprit).__name__},"
        return EncodeError(f"{what} of the call of {call.function} on worker {call.peer!r} cannot be sent: {error}")
    if isinstance(error, TransportError):
        worker.on_lost(call.connection, str(error))
        return PeerLostError(f"worker {call.peer!r} is gone, the call of {call.function} was not sent: {error}")
    if isinstance(error, MemoryError):
        return OutOfMemoryError(
            f"the call of {call.function} on worker {call.peer!r} was not sent: no memory to send it ({text_of(error)})"
        )
    if isinstance(error, TimeoutError) and not isinstance(error, CallTimeoutError):
        late = call.timeout_error()()
        late.add_note(str(error))
        return late
    return error


def why_no_answer(call: PendingCall, error: DecodeError) -> Callable[[], BaseException]:
    """Makes the error of a call whose answer cannot be decoded. It does not refer to the call: see Future.fail."""
    of_call = f"worker {call.peer!r} to the call of {call.function}"
    if isinstance(error.__cause__, NoHistoryError):
        return partial(
            GradientError,
            f"the answer of {of_call} in autograd context {call.context} has {error.__cause__} and no history: no "
            "gradient would go back. Has the context ended there?",
        )
    if isinstance(error.__cause__, TimeoutError):  # a tensor on its peer's device was not there in time
        return call.timeout_error()
    if isinstance(error.__cause__, TransportError):
        return partial(PeerLostError, f"worker {call.peer!r} is gone, with its answer to {call.function}: {error}")
    if isinstance(error, OutOfMemoryError):
        why = with_advice(str(error), "have it return less at once, or keep the result there (rpc.remote)")
        return partial(OutOfMemoryError, f"the answer of {of_call} could not be read here: {why}")
    return partial(DecodeError, f"the answer of {of_call} cannot be rebuilt here: {error}")


def not_added(call: PendingCall) -> Callable[[], BaseException]:
    """Makes the error of a call whose answer is here, and which may not go on before gradients are in `.grad`."""
    call.frames = None
    return partial(
        CallTimeoutError,
        f"worker {call.peer!r} has answered the call of {call.function}, but gradients of a backward pass before it "
        "are still being added to `.grad` here: is another thread blocked in a tensor's subclass? RPC ran for more "
        f"than set timeout ({(call.timeout or 0) * 1000:.0f} ms)",
    )
