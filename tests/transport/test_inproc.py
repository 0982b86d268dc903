"""What only the in-process transport can get wrong. The contract itself is in conformance.py."""

from __future__ import annotations

import threading

import pytest
from conformance import WAIT, connected

from telegrad.errors import ConnectionClosedError
from telegrad.options import Options
from telegrad.transport.base import Frames


@pytest.mark.parametrize("first_half", [0, 1], ids=["its own end", "the other end"])
def test_a_writer_that_waits_is_not_lost_between_the_two_halves_of_an_abort(first_half):
    """An abort ends one end after the other. A writer that was woken by the first half must not go to sleep again for
    a queue that is never read."""
    with connected("inproc", Options(peer_byte_limit=1)) as ends:
        one = ends[0]
        one.write(Frames(b"header", [b"fills the queue"]))
        waits, ended = threading.Event(), []

        def write() -> None:
            with pytest.raises(ConnectionClosedError, match="first half"):
                one.write(Frames(b"header", []), None, waits.set)
            ended.append(True)

        writer = threading.Thread(target=write)
        writer.start()
        assert waits.wait(WAIT)
        ends[first_half]._end("first half")
        if first_half:
            one._end("second half, first half")
        writer.join(WAIT)
        assert ended


def test_a_message_that_had_to_wait_is_queued_once_there_is_room():
    with connected("inproc", Options(peer_byte_limit=1)) as (one, other):
        one.write(Frames(b"first", [b"fills the queue"]))
        waits = threading.Event()
        writer = threading.Thread(target=one.write, args=(Frames(b"second", [b"waits"]), WAIT, waits.set))
        writer.start()
        assert waits.wait(WAIT)
        assert [frames.header for frames in other.receive()] == [b"first"]
        writer.join(WAIT)
        assert [frames.header for frames in other.receive()] == [b"second"]
        assert other.receive() == []
        assert other.statistics().messages_in == one.statistics().messages_out == 2
