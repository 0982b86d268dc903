"""Who may change the parameters of this worker: one optimizer at a time, and none while a snapshot's forward runs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from weakref import WeakKeyDictionary

from ..errors import CallTimeoutError
from ..primitives import clock, current
from ..primitives.current import current_worker


class Stepping(threading.Condition):
    """Its lock is held by the optimizer that is at work, and for a moment by a forward that begins or ends."""

    def __init__(self) -> None:
        super().__init__(threading.Lock())
        self.forwards = 0  # snapshots' forwards that run

    def begin(self, *, steps: bool) -> None:
        """Waits until no other optimizer of this worker is at work, until release(). One that `steps` waits for
        snapshots' forwards, too.

        Raises:
            CallTimeoutError: the time of the call that is served is over, and nothing was done.
        """
        if not self.acquire(blocking=False):
            self._wait_for_others()
        if steps and self.forwards:
            try:
                _relieve()
                left = _left()
                if not self.wait_for(lambda: not self.forwards, left):
                    raise _late(left, "the forward of a RemoteModule(snapshot=True)")
            except BaseException:
                self.release()
                raise

    def _wait_for_others(self) -> None:
        """Acquires it before the deadline of the call that is served: after that the caller takes it that nothing was
        done."""
        _relieve()
        left = _left()
        if not self.acquire(timeout=-1.0 if left is None else left):
            raise _late(left, "another optimizer's step")


# One for each worker: the optimizers of several trainers have the same parameters.
_stepping: WeakKeyDictionary[object, Stepping] = WeakKeyDictionary()
_making = threading.Lock()


def stepping_of(worker: object) -> Stepping:
    with _making:
        return _stepping.setdefault(worker, Stepping())


@contextlib.contextmanager
def forward_runs() -> Iterator[None]:
    """While it is entered no optimizer of this worker steps. Forwards do not wait for each other: one may call another.

    Raises:
        CallTimeoutError: as above.
    """
    stepping = stepping_of(current_worker())
    stepping.begin(steps=False)
    stepping.forwards += 1
    stepping.release()
    try:
        yield
    finally:
        with stepping:
            stepping.forwards -= 1
            stepping.notify_all()


def _relieve() -> None:
    if current.thread.relieve is not None:
        current.thread.relieve()


def _left() -> float | None:
    serving = current.current_serving()
    deadline = None if serving is None else serving.deadline
    return None if deadline is None else max(0.0, deadline - clock.now())


def _late(left: float | None, what: str) -> CallTimeoutError:
    return CallTimeoutError(
        f"timed out after {left or 0.0:.1f} s waiting for {what} on worker {current_worker().name!r}; raise the call's "
        "timeout"
    )
