"""Messages with tensors in device memory, as their sender sees them: what is copied when, and what becomes of places
whose message was not written."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch.distributed import HashStore

from telegrad.errors import HandedOverError
from telegrad.messages import Answer, Call, Envelope, Kind, Offer, Placed
from telegrad.options import Options
from telegrad.rendezvous.group import Group
from telegrad.transport.base import Connection
from telegrad.worker import Worker

PATIENCE = 20.0
PLACED = (Placed(100, 8), Placed(101, 16))


class Lane:
    """Takes the place of a DeviceLane, and writes down what is asked of it."""

    def __init__(self, done: list[str]) -> None:
        self.done = done

    def to_say(self) -> tuple[Offer | Answer, ...]:
        return (Answer(0),)

    def after_write(self, placed: tuple[Placed, ...], said: tuple[Offer | Answer, ...], *, written: bool) -> None:
        assert (placed, said) == (PLACED, (Answer(0),))
        self.done.append("filled" if written else "taken back")

    def tick(self) -> None:
        pass

    def close(self) -> None:
        pass


@contextmanager
def connected_worker() -> Iterator[tuple[Worker, Connection]]:
    store = HashStore()
    options = Options(connect_timeout=PATIENCE, transports=("unix",))
    started = [Worker.start(name, Group(store, None, PATIENCE), options) for name in ("here", "there")]
    try:
        assert started[0].call("there", abs, (-1,)) == 1
        yield started[0], started[0]._peers.connections()[0]
    finally:
        for one in started:
            one.close(graceful=False)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (None, ["written", "filled"]),
        (HandedOverError, ["written", "filled"]),
        (TimeoutError, ["written", "taken back"]),
        (KeyboardInterrupt, ["written", "taken back"]),
    ],
)
def test_a_message_is_filled_once_it_is_written(error: type[BaseException] | None, expected: list[str]) -> None:
    done: list[str] = []

    def write(*args: Any) -> int:
        done.append("written")
        if error is not None:
            raise error
        return 10

    with connected_worker() as (worker, connection), pytest.MonkeyPatch.context() as patch:
        pack = worker._codec.pack

        def pack_with_places(*args: Any) -> Any:
            packed = pack(*args)
            packed.placed = list(PLACED)
            return packed

        patch.setattr(worker._codec, "pack", pack_with_places)
        patch.setattr(connection, "write", write)
        patch.setattr(connection, "device_lane", Lane(done))
        envelope = Envelope(Kind.CALL, worker.new_message_id())
        with contextlib.nullcontext() if error is None else pytest.raises(error):
            worker.send(connection, envelope, Call(abs, (-1,), None), PATIENCE)
    assert done == expected
