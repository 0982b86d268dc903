"""docs/wire-format.md tells the truth: its example and its limits are those of the code."""

from __future__ import annotations

import math
import re
from pathlib import Path

import msgspec
import pytest
from raw_peers import connection_over, polling, socket_pair

from telegrad.messages import WIRE_VERSION, Call, Envelope, Hello, Kind, Reply
from telegrad.options import SHARED_MEMORY_FROM, Options
from telegrad.serialization.codec import Codec, decode_envelope, encode_envelope
from telegrad.transport import listening, wire
from telegrad.transport import shared_memory as shm
from telegrad.transport.base import Frames

PAGE = Path(__file__).parents[2] / "docs" / "wire-format.md"
TEXT = PAGE.read_text()
# A row is bytes, two spaces or more, and what they are.
EXAMPLES = [
    b"".join(bytes.fromhex(row.split("   ")[0]) for row in block.strip().splitlines())
    for block in re.findall(r"```hex\n(.*?)```", TEXT, re.DOTALL)
]

A = Hello("demo", 1, "a", 4711, "", 2)
B = Hello("demo", 2, "b", 4712)
CALL_ID, REPLY_ID = 1 << 48 | 1, 2 << 48 | 1


def greeting() -> bytes:
    payload = msgspec.msgpack.encode(A)
    return listening.GREETING.pack(listening.GREETING_MAGIC, WIRE_VERSION, len(payload)) + payload


def call() -> Frames:
    return encoded(1, Envelope(Kind.CALL, CALL_ID, 0, 60.0, 1), Call(math.hypot, (3, 4), None), B)


def reply() -> Frames:
    return encoded(2, Envelope(Kind.REPLY, REPLY_ID, CALL_ID), Reply(5.0), A)


def encoded(worker_id: int, envelope: Envelope, body: Call | Reply, to: Hello) -> Frames:
    codec = Codec(worker_id, "")
    packed = codec.pack(envelope, body, to)
    packed.header = encode_envelope(envelope)
    return packed


def written(frames: Frames) -> bytes:
    ours, theirs = socket_pair("unix")
    with polling() as (_, lease), theirs:
        connection = connection_over(ours, lease)
        connection.write(frames)
        data = theirs.recv(1 << 16)
        connection.dispose()
    return data


def shared_head() -> bytes:
    buffers = [bytes(len(call().buffers[0])), bytes(1 << 20)]
    capacity = shm.capacity_for(sum(shm.aligned(len(b)) for b in buffers))
    data = wire.in_segment(call().header, buffers, 1, capacity, fresh=True)
    return data[: -len(call().header)]


@pytest.mark.parametrize(
    ("example", "make"),
    [
        (0, greeting),
        (1, lambda: written(call())),
        (2, lambda: written(reply())),
        (3, shared_head),
    ],
    ids=["greeting", "call", "reply", "shared"],
)
def test_the_example_is_what_is_sent(example, make):
    expected = make()
    assert EXAMPLES[example] == expected, f"the bytes are now: {expected.hex(' ')}"


def test_the_example_is_what_is_understood():
    reader = wire.FrameReader(1 << 20, shm.SegmentPool(0, shared=False))
    data = EXAMPLES[1] + EXAMPLES[2]
    reader.target[: len(data)] = data
    found: list[Frames] = []
    reader.received(len(data), found)
    asked, answered = found
    there, here = Codec(2, ""), Codec(1, "")
    decoded = there.decode(decode_envelope(asked.header), asked)
    assert (decoded.function, tuple(decoded.args)) == (math.hypot, (3, 4))
    envelope = decode_envelope(answered.header)
    assert (envelope.kind, envelope.id, envelope.reply_to) == (Kind.REPLY, REPLY_ID, CALL_ID)
    assert here.decode(envelope, answered).value == 5.0


def test_the_limits_are_those_of_the_code():
    assert f"This is wire version {WIRE_VERSION}." in TEXT
    assert f"| payload of a greeting | {listening.MAX_GREETING:,} bytes |" in TEXT
    assert f"| header | {wire.MAX_HEADER >> 20} MiB |" in TEXT
    assert f"| buffers of a message | {wire.MAX_BUFFERS:,} |" in TEXT
    assert f"`Options.max_message_bytes` ({Options().max_message_bytes >> 30} GiB)" in TEXT
    assert f"messages of {SHARED_MEMORY_FROM:,} bytes and more" in TEXT
    assert f"more than {shm.MAX_LENT} segments" in TEXT
    assert f"multiple of {shm.ALIGNMENT} bytes" in TEXT
    assert (wire.PREFIX.size, wire.SHARED_PLACE.size, listening.GREETING.size) == (20, 17, 10)
    assert [f"| {n} {name} |" in TEXT for n, name in enumerate(["free", "filled", "lent", "retired"])] == [True] * 4
    assert (shm.FREE, shm.FILLED, shm.LENT, shm.RETIRED) == (0, 1, 2, 3)
