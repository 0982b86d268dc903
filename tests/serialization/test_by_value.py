"""Functions that the callee cannot import: what travels, what stays, and what is sent only once.

The "script" is a module that is registered with cloudpickle to go by value, as `__main__` does. Its classes are
the same objects at both ends here, since both are in one process; processes/test_main_functions.py has real ones.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import sys
import textwrap
import threading
import types
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import cloudpickle
import pytest
import torch
from ends import End, Link

import telegrad
from telegrad import rpc
from telegrad.errors import DecodeError, EncodeError
from telegrad.primitives.memory import reclaim
from telegrad.serialization import by_value_cache

TEXT = """
    import functools, threading, torch

    SCALE = 2
    calls = 0
    weights = torch.zeros(3)

    def scale(x):
        return helper(x) * SCALE

    def helper(x):
        return x + 1

    def count():
        global calls
        calls += 1
        return calls

    def add(x):
        global weights
        weights = weights + x
        return weights

    def factorial(n):
        return 1 if n < 2 else n * factorial(n - 1)

    def tally():
        tally.n += 1
        return tally.n

    tally.n = 0

    def decorate(function):
        @functools.wraps(function)
        def wrapper(*args):
            return [function(*args), SCALE]

        return wrapper

    @decorate
    def decorated(x):
        return helper(x)

    @functools.cache
    def fresh(x):
        return [x]

    class Point:
        kind = "point"

        def __init__(self, x):
            self.x = x

        def plus(self, y):
            return helper(self.x + y)

        @staticmethod
        def origin():
            return 0

        class Inner:
            pass

    def make(x):
        return Point(x)
"""


@contextlib.contextmanager
def module(name: str, text: str, *, by_value: bool = True) -> Iterator[Any]:
    made = types.ModuleType(name)
    exec(textwrap.dedent(text), vars(made))
    sys.modules[name] = made
    if by_value:
        cloudpickle.register_pickle_by_value(made)
    try:
        yield made
    finally:
        if by_value:
            cloudpickle.unregister_pickle_by_value(made)
        del sys.modules[name]


@pytest.fixture
def script() -> Iterator[Any]:
    with module("a_script", TEXT) as made:
        yield made


def redefine(script: Any, text: str) -> None:
    exec(textwrap.dedent(text), vars(script))


def carries(link: Link, function: Any, *args: Any) -> bool:
    """Whether a call would carry a definition; it is not sent."""
    _, frames = link.send(function, *args)
    return len(frames.buffers) > 1


# -- what travels ----------------------------------------------------------------------------------------


def test_functions_run_with_their_globals(link, script):
    assert link.call(script.scale, 3) == 8
    assert link.call(script.factorial, 5) == 120
    assert link.call(script.decorated, 1) == [2, 2]
    assert link.call(script.fresh, 1) == [1]
    assert link.call(functools.partial(script.scale, 3)) == 8
    assert link.call(lambda x: script.helper(x), 1) == 2
    assert link.call(script.Point(1).plus, 2) == 4
    assert link.call(script.Point.origin) == 0
    assert link.call(map, script.helper, [1]).__next__() == 2


def test_globals_persist_at_the_callee(link, script):
    assert [link.call(script.count) for _ in range(3)] == [1, 2, 3]
    assert script.calls == 0
    link.call(script.add, torch.ones(3))
    assert link.call(script.add, torch.ones(3)).tolist() == [2.0, 2.0, 2.0]
    assert script.weights.tolist() == [0.0, 0.0, 0.0]
    assert [link.call(script.tally) for _ in range(3)] == [1, 2, 3]


def test_globals_travel_again_when_they_are_bound_anew(link, script):
    assert link.call(script.scale, 1) == 4
    link.call(script.count)
    script.SCALE = 10
    assert link.call(script.scale, 1) == 20
    redefine(script, "def helper(x): return x + 100")  # which scale() calls
    assert link.call(script.scale, 1) == 1010
    redefine(script, "def scale(x): return 'new'")
    assert link.call(script.scale, 1) == "new"
    assert link.call(script.count) == 2  # its own global was not touched
    script.calls = 50
    assert link.call(script.count) == 51


def test_a_global_that_is_bound_later(link, script):
    redefine(script, "def late(): return LATE")
    with pytest.raises(NameError):
        link.call(script.late)
    script.LATE = 1
    assert link.call(script.late) == 1


def test_lambdas_share_the_namespace_of_their_module(link, script):
    redefine(script, "def count_with_lambda(): return lambda: count()")
    assert link.call(script.count) == 1
    assert link.call(script.count_with_lambda()) == 2
    assert link.call(script.count) == 3


def test_decorators_of_other_modules_keep_their_globals_apart(link, script):
    text = """
        SCALE = "of the decorator"

        def decorate(function):
            def wrapper():
                return SCALE, function()
            wrapper.__module__, wrapper.__qualname__ = function.__module__, function.__qualname__
            return wrapper
    """
    with module("a_decorator", text, by_value=False) as decorator:
        script.decorate = decorator.decorate
        redefine(script, "@decorate\ndef show(): return SCALE")
        for _ in range(2):
            assert link.call(script.show) == ("of the decorator", 2)
            assert link.call(script.scale, 1) == 4


def test_globals_that_are_no_modules(link):
    variables: dict[str, Any] = {"x": 1}
    exec("def f(): return g() + x\ndef g(): return 1", variables)
    assert link.call(variables["f"]) == 2
    variables["x"] = 5
    assert link.call(variables["f"]) == 6
    assert link.call(link.call(lambda: variables["f"])) == 6


# -- what is sent once -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["scale", "Point", "decorated", "fresh"])
def test_a_definition_is_sent_until_it_was_answered(link, script, name):
    function = getattr(script, name)
    assert carries(link, function, 1)
    assert carries(link, function, 1)
    before = link.nbytes
    link.call(function, 1)
    assert not carries(link, function, 1)
    assert link.nbytes < before / 4
    assert link.nbytes < 100


def test_a_failure_is_no_proof_that_it_arrived(link, script):
    envelope, _ = link.send(script.scale, 1)
    failure = link.far.codec.encode_exception(ValueError(), "", link.near.hello)
    answer, frames = link.far.encode(link.near, telegrad.messages.Kind.FAILURE, failure, reply_to=envelope.id)
    link.near.codec.decode(answer, frames)
    assert carries(link, script.scale, 1)


@pytest.mark.parametrize(
    "change",
    [
        lambda script: setattr(script, "SCALE", 3),
        lambda script: setattr(script, "weights", torch.ones(3)),
        lambda script: redefine(script, "def helper(x): return x"),
        lambda script: redefine(script, "class Point: pass"),
        lambda script: setattr(script.Point, "kind", "other"),
        lambda script: setattr(script.Point, "more", 1),
        lambda script: delattr(script, "SCALE"),
        lambda script: setattr(script, "len", lambda x: 0),
    ],
)
def test_whatever_it_refers_to_makes_it_new(link, script, change):
    redefine(script, "def everything(): return scale, add, make, len([1])")
    link.call(script.everything)
    assert not carries(link, script.everything)
    change(script)
    assert carries(link, script.everything)
    link.call(script.everything)
    assert not carries(link, script.everything)


def test_what_it_does_not_refer_to_does_not(link, script):
    link.call(script.count)
    script.SCALE = 100
    script.unrelated = 1
    assert not carries(link, script.count)


def test_arguments_of_its_classes_refer_to_it(link, script):
    assert link.call(getattr, script.Point(5), "x") == 5
    assert not carries(link, getattr, script.Point(5), "x")
    assert not carries(link, script.Point(1).plus, 2)
    assert not carries(link, script.Point.origin)
    (inner,) = link.carry(script.Point.Inner)
    assert inner is script.Point.Inner


def test_to_each_callee(script):
    near = End(1)
    links = [Link(near, End(n)) for n in (2, 3)]
    for link in links:
        assert carries(link, script.count)
        assert link.call(script.count) == 1
        assert not carries(link, script.count)


def test_large_definitions_are_not_kept(link, script):
    script.weights = torch.zeros(1 << 20)
    assert link.call(script.add, 1).sum() == 1 << 20
    assert not carries(link, script.add, 1)
    other = Link(link.near, End(3))
    assert other.call(script.add, 2).sum() == 2 << 20
    assert not carries(other, script.add, 1)


# -- order -----------------------------------------------------------------------------------------------


def run(link: Link, message: Any) -> Any:
    call = link.far.codec.decode(*message)
    return call.function(*call.args)


def test_messages_may_be_decoded_in_any_order(link, script):
    messages = [link.send(script.scale, 1)]
    redefine(script, "def scale(x): return 'two'")
    messages.append(link.send(script.scale, 1))
    redefine(script, "def scale(x): return 'three'")
    messages.append(link.send(script.scale, 1))
    assert [run(link, m) for m in reversed(messages)] == ["three", "two", 4]
    # The newest binding stays, whatever came last.
    redefine(script, "def call(): return scale(1)")
    assert link.call(script.call) == "three"


def test_a_call_that_waited_runs_what_was_meant(link, script):
    link.call(script.scale, 1)
    waiting = link.send(script.scale, 1)  # by its number
    for n in range(5):
        redefine(script, f"def scale(x): return {n}")
        link.call(script.scale, 1)
    assert run(link, waiting) == 4
    for n in range(5):
        redefine(script, f"def scale(x): return {n}")
        link.call(script.scale, 1)
    with pytest.raises(DecodeError, match="defined anew 8 times before this call"):
        run(link, waiting)


def test_two_functions_that_take_turns_at_a_name(link, script):
    functions = [script.scale]
    for n in range(12):
        redefine(script, f"def scale(x): return {n}")
        functions.append(script.scale)
    for _ in range(2):
        for n, function in enumerate(functions[1:]):
            script.scale = function
            assert link.call(function, 1) == n
            assert link.call(function, 1) == n


def test_a_function_that_is_not_at_its_name_any_more(link, script):
    before = script.scale
    assert link.call(before, 1) == 4
    del script.scale
    assert link.call(before, 1) == 4
    redefine(script, "def scale(x): return 'new'")
    assert link.call(before, 1) == 4
    assert link.call(script.scale, 1) == "new"


# -- passing on ------------------------------------------------------------------------------------------


def test_functions_passed_on_share_one_namespace(script):
    # 1 --> 2 --> 4,  1 --> 3 --> 4: all in the one namespace that 4 has of the script of 1
    home, second, third, last = (End(n) for n in (1, 2, 3, 4))
    received = {}
    for end in (second, third):
        (received[end.id],) = Link(home, end).carry(script.count)
    assert Link(second, last).call(received[2]) == 1
    assert Link(third, last).call(received[3]) == 2
    assert Link(home, last).call(script.count) == 3
    assert Link(second, last).call(received[2]) == 4
    assert not carries(Link(second, last), received[2])
    assert received[2]() == 1  # and each has its own


def test_what_is_bound_on_the_way_does_not_travel(script):
    redefine(script, "def start(): global state; state = []\ndef push(x): state.append(x); return state")
    home, second, last = End(1), End(2), End(3)
    start, push = Link(home, second).carry(script.start, script.push)
    start()
    assert push("at 2") == ["at 2"]
    Link(home, last).call(script.start)
    assert Link(second, last).call(push, "at 3") == ["at 3"]
    assert push("at 2") == ["at 2", "at 2"]


def test_back_home_it_is_itself(link, script):
    for function in (script.scale, script.decorated, script.fresh, script.Point, script.Point.origin):
        assert link.call(lambda f: f, function) is function
        assert link.call(lambda f: [f], function)[0] is function
    (scale,) = link.carry(script.scale)
    back = Link(link.far, link.near)
    assert scale is not script.scale
    assert back.carry([scale])[0][0] is script.scale
    assert not carries(back, scale, 1)
    script.SCALE = 100
    assert back.call(scale, 1) == 200  # in its own module, with its own globals


def test_a_closure_that_comes_home_lives_in_its_module(link, script):
    redefine(script, "def maker(): return lambda: count()")
    (maker,) = link.carry(script.maker)
    at_home = Link(link.far, link.near).carry(maker())[0]
    assert at_home() == 1
    assert script.calls == 1
    assert at_home.__globals__ is vars(script)


def test_calls_to_oneself_are_at_home(script):
    end = End(1)
    oneself = Link(end, end)
    assert oneself.call(script.count) == 1
    assert script.calls == 1
    assert oneself.carry(script.scale) == (script.scale,)


def test_the_same_function_is_one_object(link, script):
    a, b = link.carry(script.scale, [script.scale])
    assert a is b[0]
    assert link.carry(script.scale)[0] is a
    redefine(script, "def use(): return scale")
    assert link.carry(script.use)[0]() is a


# -- what goes wrong -------------------------------------------------------------------------------------


def test_a_global_that_cannot_be_sent_is_named(link, script):
    script.lock = threading.Lock()
    redefine(script, "def inner(): return lock\ndef outer(): return inner(), SCALE")
    with pytest.raises(EncodeError, match="its global 'lock', a lock: TypeError"):
        link.call(script.outer)
    with pytest.raises(EncodeError, match="its global 'lock', a lock: TypeError"):
        link.carry([script.outer])
    del script.lock
    script.lock = 1
    assert link.call(script.outer) == (1, 2)


def test_nothing_is_kept_of_local_classes(link, script):
    redefine(script, "def local():\n    class Local:\n        def me(self): return __class__\n    return Local")
    cls = script.local()
    assert link.carry(cls)[0] is cls
    alive = weakref.ref(cls)
    del cls
    gc.collect()
    assert alive() is None


def test_pickling_a_global_may_make_calls(link, script):
    class Asks:
        def __reduce__(self):
            return int, (link.call(script.helper, 1),)

    script.SCALE = Asks()
    assert link.call(script.scale, 1) == 4


def test_many_threads(script):
    home, ends = End(1), [End(n) for n in (2, 3)]
    redefine(script, "def versioned(): return VERSION, helper(0)\nVERSION = 0")
    links = [Link(home, end) for end in ends]
    stop = threading.Event()
    seen: dict[int, int] = {}

    def work(number: int) -> None:
        link = links[number % 2]
        last = 0
        for _ in range(150):
            version, one = link.call(script.versioned)
            assert one == 1
            assert isinstance(link.carry(script.Point(1))[0], script.Point)
            last = max(last, version)
        seen[number] = last

    def rebind() -> None:
        for version in itertools.count(1):
            script.VERSION = version
            if stop.wait(0.001):
                return

    rebinder = threading.Thread(target=rebind)
    rebinder.start()
    try:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(8)))
    finally:
        stop.set()
        rebinder.join()
    assert min(seen.values()) > 0
    for link in links:
        assert link.call(script.versioned) == (script.VERSION, 1)


# -- over a cluster --------------------------------------------------------------------------------------


def train(step: Any, rounds: int) -> list[int]:
    return [rpc.rpc_sync("b", step) for _ in range(rounds)]


def test_a_parameter_server(cluster, script, transport):
    futures = [rpc.rpc_async("a", train, args=(script.count, 5)) for _ in range(3)]
    results = [rpc.rpc_sync("b", script.count) for _ in range(5)]
    for found in torch.futures.wait_all(futures):
        results += found
    assert sorted(results) == list(range(1, 21))
    assert script.calls == 0


# -- workers that are gone -------------------------------------------------------------------------------


def tables(end: End) -> dict[str, int]:
    """How much a codec keeps of definitions, sent and received."""
    definitions = end.codec.definitions
    namespaces = definitions._namespaces
    return {
        "received": len(definitions._received),
        "versions": len(definitions._versions),
        "current": sum(d.origin != end.id for d in definitions._current.values()),
        "known to others": sum(len(d.known_to) for d in definitions._current.values()),
        "unanswered": len(definitions.unanswered),
        "namespaces": len(namespaces._kept),
        "alive": len(namespaces._received),
    }


NOTHING = dict.fromkeys(("received", "versions", "current", "known to others", "unanswered", "namespaces", "alive"), 0)


def test_what_a_gone_worker_has_sent_is_forgotten(link, script):
    script.weights = torch.zeros(5)
    link.call(script.add, 1)
    link.call(lambda: script.SCALE)
    assert tables(link.far)["received"]
    received = next(f for f in link.far.codec.definitions._received.values() if f.__name__ == "add")
    weights = weakref.ref(received.__globals__["weights"])
    del received
    link.far.codec.forget(link.near.id)
    gc.collect()
    assert weights() is None
    assert tables(link.far) == NOTHING


@pytest.mark.parametrize("clients", [1, 3])
def test_large_definitions_that_are_forgotten_are_freed(link, script, clients):
    """Their functions and namespaces refer to each other, and nobody calls the collector."""
    submitted: list[Any] = []
    script.weights = torch.zeros((20 << 20) // 4 // clients)
    for number in range(clients):
        client = End(3 + number)
        Link(client, link.far).call(script.add, 1)
        received = next(f for f in link.far.codec.definitions._received.values() if f.__name__ == "add")
        weights = weakref.ref(received.__globals__["weights"])
        del received
        assert not submitted
        link.far.codec.forget(client.id, submitted.append)
    (task,) = submitted
    task()
    assert weights() is None
    link.call(script.scale, 1)
    link.far.codec.forget(link.near.id, submitted.append)
    assert submitted == [task]  # that was little


def test_what_was_sent_to_a_gone_worker_is_forgotten(link, script):
    link.call(script.scale, 1)
    redefine(script, "def other(): return 1")
    link.send(script.other)  # never answered
    assert tables(link.near)["known to others"] == tables(link.near)["unanswered"] == 1
    link.near.codec.forget(link.far.id)
    assert tables(link.near) == NOTHING


def test_a_function_of_a_gone_worker_can_be_used_and_passed_on(script):
    home, second, third = End(1), End(2), End(3)
    (count,) = Link(home, second).carry(script.count)
    on = Link(second, third)
    assert on.call(count) == 1
    second.codec.forget(home.id)
    third.codec.forget(home.id)
    gc.collect()
    assert count() == 1
    assert [on.call(count), on.call(count)] == [2, 3]  # in the namespace that it was in before
    assert on.call(lambda f: f(), count) == 4
    third.codec.forget(second.id)
    second.codec.forget(third.id)
    del count
    gc.collect()
    assert tables(second) == tables(third) == NOTHING


def test_a_message_of_a_worker_that_was_lost_meanwhile(link, script):
    """It is run all the same, and leaves nothing behind."""
    envelope, frames = link.send(script.scale, script.Point(1).x)
    link.far.codec.forget(link.near.id)
    call = link.far.codec.decode(envelope, frames)
    assert call.function(*call.args) == 4
    del call
    gc.collect()
    assert tables(link.far) == NOTHING


def test_a_number_of_a_gone_worker_is_an_error_that_says_so(link, script):
    link.call(script.scale, 1)
    envelope, frames = link.send(script.scale, 1)
    link.far.codec.forget(link.near.id)
    with pytest.raises(DecodeError, match="forgotten when the connection with worker 1 was lost"):
        link.far.codec.decode(envelope, frames)


def test_an_answer_of_another_worker_proves_nothing(link, script):
    envelope, _ = link.send(script.scale, 1)
    liar = telegrad.messages.Envelope(telegrad.messages.Kind.REPLY, 1, envelope.id)
    link.near.codec.on_answer(99, liar)
    assert carries(link, script.scale, 1)


class Unloadable:
    """Can be sent, and not be rebuilt."""

    def __reduce__(self) -> Any:
        return fail_to_load, ()


def fail_to_load() -> None:
    raise ValueError("this cannot be rebuilt")


@pytest.fixture
def pair() -> Iterator[telegrad.LocalCluster]:
    """The driver and a worker "a", in this process."""
    with telegrad.LocalCluster(["a"], transport="inproc") as cluster:
        yield cluster


def bytes_out(cluster: telegrad.LocalCluster) -> int:
    return sum(found.bytes_out for found in cluster.worker.statistics().connections.values())


def test_a_created_value_proves_that_the_definition_arrived(pair, script):
    script.weights = torch.zeros(100_000)
    assert rpc.remote("a", script.add, args=(1,)).to_here().sum() == 100_000
    before = bytes_out(pair)
    for n in (2, 3):
        assert rpc.remote("a", script.add, args=(1,)).to_here().sum() == n * 100_000
    assert bytes_out(pair) - before < 10_000
    assert not pair.worker._codec.unanswered


def test_a_creation_that_cannot_be_decoded_proves_nothing(pair, script):
    rref = rpc.remote("a", script.make, args=(Unloadable(),))
    with pytest.raises(DecodeError, match="cannot be rebuilt"):
        rref.to_here()
    rref._get_future().wait()
    assert not pair.worker._codec.unanswered
    assert rpc.rpc_sync("a", script.make, args=(3,)).x == 3


def test_a_creation_that_fails_says_why_where_the_value_is_used(pair, script):
    redefine(script, "def broken(): raise KeyError('broken')")
    rref = rpc.remote("a", script.broken)
    for _ in range(2):
        with pytest.raises(KeyError, match="broken"):
            rref.to_here()
    rref._get_future().wait()


def test_a_call_that_is_not_sent_leaves_nothing_unanswered(pair, script, monkeypatch):
    connection = pair.worker._peers.reach("a", 5.0)[1]

    def write(*args: object) -> int:
        raise telegrad.errors.TooLargeError("too large")

    with monkeypatch.context() as patch:
        patch.setattr(connection, "write", write)
        with pytest.raises(telegrad.errors.TooLargeError):
            rpc.rpc_sync("a", script.count)
    assert not pair.worker._codec.unanswered
    assert rpc.rpc_sync("a", script.count) == 1


def test_a_worker_forgets_a_peer_with_its_connection(pair, script, monkeypatch):
    assert rpc.rpc_sync("a", script.count) == 1
    (a,) = [worker for worker in pair._in_process if worker.name == "a"]
    definitions, namespaces = a._codec.definitions, a._codec.namespaces
    assert definitions._received
    (connection,) = a._peers.connections()
    submitted: list[Any] = []
    monkeypatch.setattr(by_value_cache, "_MUCH", 1)
    monkeypatch.setattr(a._threads, "submit", submitted.append)
    a.on_lost(connection, "the test says so")
    monkeypatch.undo()
    assert reclaim in submitted
    gc.collect()
    assert not definitions._received
    assert not namespaces._received
