"""Values, functions and exceptions through the codec, and through a cluster where a worker has a part in it."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import operator
import os
import pickle
import sys
import threading
import tracemalloc
import types
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from ends import arrived, encoded
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import telegrad
from telegrad import rpc
from telegrad.errors import DecodeError, EncodeError, RemoteError
from telegrad.messages import Envelope, Kind
from telegrad.serialization.codec import decode_envelope, encode_envelope, not_understood
from telegrad.transport.base import Frames

# -- values ----------------------------------------------------------------------------------------------

plain = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text(st.characters())
    | st.binary()
)
values = st.recursive(
    plain | st.frozensets(st.integers()),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner)
        | st.sets(st.integers() | st.text())
    ),
    max_leaves=10,
)
ROUND_TRIPS = settings(deadline=None, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])


@ROUND_TRIPS
@given(args=st.lists(values), kwargs=st.dictionaries(st.text(min_size=1), values))
def test_values_arrive_as_they_were(link, args, kwargs):
    envelope, frames = link.send(print, *args)
    assert exactly(link.far.codec.decode(envelope, frames).args) == exactly(tuple(args))
    envelope, frames = link.near.encode(link.far, Kind.CALL, telegrad.messages.Call(print, tuple(args), kwargs or None))
    found = link.far.codec.decode(envelope, frames)
    assert exactly(found.args) == exactly(tuple(args))
    assert exactly(found.kwargs or {}) == exactly(kwargs)


@ROUND_TRIPS
@given(shapes=st.lists(st.lists(st.integers(0, 4), max_size=3), max_size=4), nested=st.booleans(), other=values)
def test_values_with_tensors_arrive_as_they_were(link, shapes, nested, other):
    tensors = [torch.rand(shape) for shape in shapes]
    args = [[*tensors], other] if nested else [*tensors, other]
    found = link.carry(*args)
    if nested:
        found = [*found[0], found[1]]
    assert all(map(torch.equal, tensors, found))
    assert exactly(found[-1]) == exactly(other)


def exactly(value: Any) -> Any:
    """With the types: 1 is not True, and 0.0 is not 0."""
    if isinstance(value, dict):
        return {key: exactly(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return type(value), [exactly(inner) for inner in value]
    return type(value), value


class Color(enum.IntEnum):
    RED = 1


class Name(str):
    pass


Point = collections.namedtuple("Point", "x y")


@dataclasses.dataclass
class Record:
    name: str
    points: list[Point]


@pytest.mark.parametrize(
    "value",
    [
        Color.RED,
        Name("n"),
        Point(1, 2),
        torch.Size([1, 2]),
        torch.float32,
        torch.device("cpu"),
        np.float64(0.5),
        np.int8(3),
        True,
        -0.0,
        2**100,
        "\ud800",
        range(3),
        slice(1, 2),
        Ellipsis,
        Record("r", [Point(1, 2)]),
    ],
    ids=repr,
)
def test_types_are_kept(link, value):
    for found in (link.carry(value)[0], link.carry([value])[0][0], link.carry(value, torch.ones(1))[0]):
        assert type(found) is type(value)
        assert found == value


def test_arguments_may_be_any_sequence(cluster):
    for args in ([1, 2], Point(1, 2), torch.Size([1, 2])):
        assert rpc.rpc_sync("a", operator.add, args=args) == 3


def test_loops_and_sharing(link):
    loop: list[Any] = []
    loop.append(loop)
    shared = [1]
    found, a, b = link.carry(loop, shared, shared)
    assert found[0] is found
    assert a is b


@pytest.mark.parametrize("n", [10, 100_000])
def test_numpy_arrays_arrive_writable_and_private(link, n):
    array = np.arange(n)
    for found in (link.carry(array)[0], link.carry([array])[0][0], link.carry(array.reshape(-1, 10).T)[0].T):
        assert found.flags.writeable
        found[...] = -1
        assert array.flat[1] == 1


def test_many_small_arrays_are_one_buffer(link):
    _, frames = link.send(print, [np.arange(n) for n in range(100)])
    assert len(frames.buffers) == 1
    _, frames = link.send(print, [np.zeros(100_000), np.zeros(3), torch.zeros(100_000)])
    assert [len(b) for b in frames.buffers[1:]] == [800_000, 400_000]


class Holey:
    """Exports memory that is not in one piece."""

    def __reduce_ex__(self, protocol):
        return bytes, (pickle.PickleBuffer(memoryview(bytes(10))[::2]),)


def test_memory_in_pieces_is_an_error(link):
    with pytest.raises(EncodeError, match="non-contiguous"):
        link.carry(Holey())


# -- functions -------------------------------------------------------------------------------------------


def add(a: int, b: int = 10) -> int:
    return a + b


class Account:
    opened = 0

    def __init__(self, balance: int = 0) -> None:
        self.balance = balance

    def after(self, deposit: int) -> int:
        return self.balance + deposit

    @classmethod
    def rich(cls, balance: int) -> int:
        return cls(balance).balance * 1000

    @staticmethod
    def twice(amount: int) -> int:
        return 2 * amount

    def __call__(self, x: int) -> int:
        return self.balance * x


@functools.lru_cache
def cached(x: int) -> int:
    return x + 5


def make_adder(n: int) -> Any:
    return lambda x: x + n


OFFSET = 7

FUNCTIONS = {
    "a function": (add, (1,), 11),
    "a builtin": (len, ([1, 2],), 2),
    "a type": (int, ("12",), 12),
    "a class": (lambda: Account, (), None),
    "a bound method": (Account(5).after, (1,), 6),
    "a builtin's method": ([1, 2, 2].count, (2,), 2),
    "a classmethod": (Account.rich, (2,), 2000),
    "a staticmethod": (Account.twice, (2,), 4),
    "a plain function of a class": (Account.after, (Account(1), 2), 3),
    "a callable": (Account(3), (2,), 6),
    "a partial": (functools.partial(add, b=1), (1,), 2),
    "a cached function": (cached, (1,), 6),
    "operator's": (operator.itemgetter(1), ([1, 2],), 2),
    "a lambda": (lambda x: x * 2, (4,), 8),
    "a lambda with globals": (lambda x: add(x, OFFSET), (4,), 11),
    "a closure": (make_adder(3), (1,), 4),
    "a method descriptor": (str.upper, ("x",), "X"),
}


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_functions(cluster, kind):
    function, args, expected = FUNCTIONS[kind]
    result = rpc.rpc_sync("a", function, args=args)
    if expected is None:
        assert result is function()
    else:
        assert result == expected


@pytest.mark.parametrize(
    "function",
    [torch.add, torch.Tensor.add, torch.ones(2).add, torch.ops.aten.add, torch.ops.aten.add.Tensor]
    + [torch.nn.functional.mse_loss, torch.nn.MSELoss(), torch.dot, torch.linalg.vecdot],
    ids=range(9),
)
def test_functions_of_torch(cluster, function):
    args = (torch.arange(2.0), torch.ones(2))
    args = args[1:] if isinstance(getattr(function, "__self__", None), torch.Tensor) else args
    assert torch.equal(rpc.rpc_sync("a", function, args=args), function(*args))


def test_a_function_that_the_callee_does_not_have(server):
    only_here = types.ModuleType("only_here")
    exec("def f(): return 1", vars(only_here))
    sys.modules["only_here"] = only_here
    exec("def defined_later(): return 1", globals())
    try:
        with telegrad.LocalCluster(["a"], server=server) as cluster:
            with pytest.raises(DecodeError, match=r"No module named 'only_here'.*the callee can import"):
                cluster.call("a", only_here.f)
            with pytest.raises(DecodeError, match="defined_later"):
                cluster.call("a", globals()["defined_later"])
            assert cluster.call("a", add, 1) == 11
    finally:
        del sys.modules["only_here"], globals()["defined_later"]


def test_a_name_that_is_bound_anew_is_seen(link, monkeypatch):
    assert link.call(add, 1) == 11
    monkeypatch.setitem(globals(), "add", before := add)
    exec("def add(a): return -a", globals())
    assert link.call(add, 1) == -1
    assert link.call(before, 1) == 11  # which is nowhere to be found, and goes by value


# -- what cannot be sent ---------------------------------------------------------------------------------


@dataclasses.dataclass
class Locked:
    lock: Any = dataclasses.field(default_factory=threading.Lock)


class Refuses:
    def __reduce__(self):
        raise ValueError("not me")


def test_an_argument_that_cannot_be_sent_is_named(cluster):
    for value in (Locked(), Refuses(), [Locked()]):
        kind = type(value).__name__
        for args, kwargs in (((torch.ones(2), value), {}), ((1,), {"b": value})):
            with pytest.raises(EncodeError, match=rf"an argument, a {kind}, of the call of add on worker 'a'"):
                rpc.rpc_sync("a", add, args=args, kwargs=kwargs)
    lock = threading.Lock()
    with pytest.raises(EncodeError, match="the function of the call of .*lambda"):
        rpc.rpc_sync("a", lambda: lock)
    assert rpc.rpc_sync("a", add, args=(1,)) == 11


def give_lock() -> Any:
    return Locked()


def test_a_result_that_cannot_be_sent_is_named(cluster):
    with pytest.raises(EncodeError, match="the result, a Locked, cannot be sent back"):
        rpc.rpc_sync("a", give_lock)
    assert rpc.rpc_sync("a", add, args=(1,)) == 11


def test_finding_the_culprit_copies_nothing(link):
    large = torch.empty(1 << 24)
    tracemalloc.start()
    try:
        assert type(link.near.codec.first_unsendable([large, [large], Locked()], link.far.hello, track=False)) is Locked
        assert link.near.codec.first_unsendable([large], link.far.hello, track=False) is None
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


# -- what cannot be rebuilt ------------------------------------------------------------------------------


def explode(text: str) -> Any:
    raise ValueError(text)


class Explosive:
    """Raises when it is unpickled."""

    def __reduce__(self):
        return explode, ("boom",)


def give_explosive() -> Any:
    return Explosive()


def test_a_message_that_cannot_be_rebuilt(cluster):
    with pytest.raises(DecodeError, match=r"the call cannot be rebuilt there: ValueError: boom"):
        rpc.rpc_sync("a", add, args=(Explosive(),))
    with pytest.raises(DecodeError, match=r"the answer of worker 'a' to the call of give_explosive.*ValueError: boom"):
        rpc.rpc_sync("a", give_explosive)
    with pytest.raises(DecodeError, match="boom"):
        rpc.rpc_async("a", give_explosive).wait()
    assert rpc.rpc_sync("a", add, args=(1,)) == 11


def test_bytes_that_make_no_sense(link):
    codec = link.far.codec
    assert "an envelope that makes no sense" in str(not_understood(b"\xc1"))
    envelope, frames = link.send(add, 1, [2])
    skeleton = frames.buffers[0]
    for end in range(len(skeleton)):
        with pytest.raises(DecodeError):
            codec.decode(envelope, Frames(frames.header, [skeleton[:end]]))
    with pytest.raises(DecodeError):
        codec.decode(envelope, Frames(frames.header, []))


def test_an_envelope_survives(link):
    envelope = Envelope(Kind.CALL, 1 << 62, 3, 1.5, 2, telegrad.messages.Modes(grad=False))
    body = telegrad.messages.Call(add, (1,), None)
    frames = encoded(link.near.codec, envelope, body, link.far.hello)
    assert decode_envelope(frames.header) == envelope
    assert msgspec.msgpack.decode(frames.header)[0] == Kind.CALL


def test_an_envelope_is_fixed_when_it_is_encoded(link):
    """Before that only kind, id, device map and `untracked` are looked at, so a sender fills in the rest after the body
    was packed."""
    codec = link.near.codec
    draft: Any = types.SimpleNamespace(kind=Kind.CALL, id=5, device_map=None, untracked=False)
    packed = codec.pack(draft, telegrad.messages.Call(add, (1,), None), link.far.hello, track=True)
    envelope = Envelope(Kind.CALL, 5, timeout=1.5, creates=7, dropped=((1, 2),))
    packed.header = encode_envelope(envelope)
    frames: Frames = packed
    assert decode_envelope(frames.header) == envelope
    assert link.far.codec.decode(envelope, arrived(frames)).args == (1,)


# -- exceptions ------------------------------------------------------------------------------------------


class OwnError(Exception):
    def __init__(self, text: str, code: int = 0) -> None:
        super().__init__(text)
        self.code = code


class PickyError(Exception):
    """Cannot be rebuilt from its args."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a} and {b}")


class LockedError(Exception):
    def __init__(self) -> None:
        super().__init__("locked", threading.Lock())


class MuteError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")

    def __reduce__(self):
        raise RuntimeError("no pickle")


class LyingError(Exception):
    def __reduce__(self):
        return str, ("not an exception",)


def fail(kind: str) -> None:
    if kind == "own":
        error = OwnError("with a code", 5)
        error.tensor = torch.ones(100_000)
        error.add_note("and a note")
        raise error
    raise {
        "picky": lambda: PickyError(1, 2),
        "locked": LockedError,
        "mute": MuteError,
        "lying": lambda: LyingError("a lie"),
        "group": lambda: ExceptionGroup("several", [ValueError(1), KeyError(2)]),
    }[kind]()


def test_exceptions_keep_their_type(cluster):
    with pytest.raises(OwnError, match="with a code") as caught:
        rpc.rpc_sync("a", fail, args=("own",))
    assert caught.value.code == 5
    assert caught.value.tensor.sum() == 100_000
    assert caught.value.__notes__ == ["and a note"]
    assert isinstance(caught.value.__cause__, telegrad.errors.RemoteTraceback)
    assert "on worker 'a'" in str(caught.value.__cause__)
    assert "in fail" in str(caught.value.__cause__)
    with pytest.raises(ExceptionGroup, match="several"):
        rpc.rpc_sync("a", fail, args=("group",))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("picky", "PickyError.*1 and 2"),
        ("locked", "LockedError.*'locked'"),
        ("mute", "MuteError"),
        ("lying", "a lie"),
    ],
)
def test_exceptions_that_cannot_be_rebuilt(cluster, kind, text):
    with pytest.raises(RemoteError, match=f"{text}") as caught:
        rpc.rpc_sync("a", fail, args=(kind,))
    assert "on worker 'a'" in str(caught.value)
    assert "in fail" in str(caught.value.__cause__)
    assert rpc.rpc_sync("a", add, args=(1,)) == 11


# -- constructors that make calls ------------------------------------------------------------------------


class Asks:
    """Makes a call when it is pickled, and one when it is unpickled."""

    def __init__(self, then: Any = None) -> None:
        self.then = then

    def __getstate__(self):
        return {"then": self.then, "sent_from": rpc.rpc_sync("b", add, args=(torch.ones(1),)).item()}

    def __setstate__(self, state):
        self.__dict__.update(state)
        self.received_by = rpc.get_worker_info().name
        self.told = rpc.rpc_sync("b", make_adder(1), args=(1,))


def look(asks: Asks) -> Any:
    return asks.sent_from, asks.received_by, asks.told, asks.then(1), os.getpid()


def test_pickling_may_make_calls(cluster):
    for _ in range(3):
        sent_from, received_by, told, then, _ = rpc.rpc_sync("a", look, args=(Asks(make_adder(10)),))
        assert (sent_from, received_by, told, then) == (11.0, "a", 2, 11)
