"""The worker, as gradients and references see it: messages out and in, waiting, and the names of other workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Protocol

from torch import Tensor

from ..errors import HandedOverError, TelegradError
from ..events import Events, logger
from ..messages import Done, End, Envelope, Failure, Forget, Kind, Release
from ..primitives.waiter import Waiter
from .context import Context

Task = Callable[[], Any]


class Host(Protocol):
    """All that gradients and references need of their worker."""

    events: Events

    def post(self, to: int, envelope: Envelope, body: Any, timeout: float | None, context: Context | None) -> None:
        """Sends a one-way message to the worker of that id. Raises PeerLostError."""

    def wait(self, waiter: Waiter, peer: int, deadline: float | None, turn: Any) -> None:
        """Waits for something that most likely comes from that worker; in a turn, if this thread has one."""

    def begin_turn(self) -> Any:
        """Has this thread read what arrives while it works on a pass; `end()` ends it. None: another thread reads."""

    def ask(
        self, workers: Iterable[int], function: Callable[..., Any], args: Sequence[Any], seconds: float
    ) -> tuple[dict[int, Any], dict[int, Exception]]:
        """Calls a function on each of them: (answers, errors). Takes `seconds` at most."""

    def after_reading(self, task: Task) -> None:
        """Has this thread, which reads, run a task when all that it has read together is opened."""

    def later(self, seconds: float, task: Task) -> Task:
        """A function that has a task run so long after it was called. It takes no lock: finalisers call it."""

    def goes_by_lane(self, to: int, tensor: Tensor) -> bool:
        """Whether a tensor on a device goes to that worker by device memory, so that sending it takes no time."""

    def submit(self, task: Callable[[], Any]) -> None: ...
    def new_message_id(self) -> int: ...
    def name_of(self, worker_id: int) -> str: ...
    def encode_error(self, error: BaseException, to: int) -> Failure: ...
    def decode_error(self, failure: Failure, worker: str) -> BaseException: ...
    def decode(self, envelope: Envelope, frames: Any) -> Any: ...
    def open_control(self, envelope: Envelope, frames: Any) -> Any: ...


def tell(host: Host, worker: int, kind: Kind, body: Done | End | Release | Forget, timeout: float | None = 1.0) -> None:
    """Sends a one-way message. A lost peer is ignored; after a write timeout the send goes on in the background."""
    try:
        host.post(worker, Envelope(kind, host.new_message_id()), body, timeout, None)
    except HandedOverError:
        pass  # the rest of it follows
    except TimeoutError:
        host.submit(partial(tell, host, worker, kind, body, None))
    except TelegradError as error:
        logger.debug("worker %d was not told %s: %s", worker, body, str(error))
