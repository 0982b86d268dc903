"""RRef: a handle to a value on its owner, on every transport."""

from __future__ import annotations

import asyncio
import copy
import gc
import pickle
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import telegrad
from telegrad import autograd, errors, rpc
from telegrad.primitives.current import current_worker
from telegrad.rpc import RRef

PATIENCE = 30.0


@pytest.fixture(scope="module", params=["inproc", "unix", "tcp"])
def cluster(request: pytest.FixtureRequest, server: telegrad.ForkServer) -> Iterator[telegrad.LocalCluster]:
    options = telegrad.Options(rpc_timeout=PATIENCE)
    with telegrad.LocalCluster(["a", "b", "c"], transport=request.param, server=server, options=options) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def no_leaks(cluster: telegrad.LocalCluster) -> Iterator[None]:
    """After every test no worker keeps or refers to anything."""
    yield
    wait_for_counts({"owned": 0, "held": 0, "on_loan": 0})


def counts() -> dict[str, int]:
    gc.collect()  # an exception and its frames refer to each other
    return current_worker().references.statistics()


def wait_for_counts(wanted: dict[str, int], *workers: str) -> None:
    event = threading.Event()
    for _ in range(int(PATIENCE / 0.01)):
        found = {name: rpc.rpc_sync(name, counts) for name in workers or ("driver", "a", "b", "c")}
        if all(found[name][what] == n for name in found for what, n in wanted.items()):
            return
        event.wait(0.01)
    raise AssertionError(f"left behind: {found}")


class Counter:
    def __init__(self, start: int = 0) -> None:
        self.count = start

    def add(self, n: int = 1) -> int:
        self.count += n
        return self.count

    def fail(self) -> None:
        raise KeyError("no such thing")

    @rpc.functions.async_execution
    def add_later(self, n: int) -> torch.futures.Future[int]:
        future: torch.futures.Future[int] = torch.futures.Future()
        threading.Thread(target=lambda: future.set_result(self.add(n))).start()
        return future


def fail(text: str) -> None:
    raise ValueError(text)


# -- the value ---------------------------------------------------------------------------------------------


def test_a_value_stays_on_its_owner():
    rref = rpc.remote("a", torch.add, args=(torch.ones(2), 3))
    assert not rref.is_owner()
    assert rref.owner() == rpc.get_worker_info("a")
    assert rref.owner_name() == "a"
    torch.testing.assert_close(rref.to_here(), torch.full((2,), 4.0))
    torch.testing.assert_close(rref.to_here(timeout=PATIENCE), torch.full((2,), 4.0))
    assert rref.confirmed_by_owner()
    assert bool(rref)
    with pytest.raises(TypeError, match="not iterable"):
        iter(rref)
    with pytest.raises(AttributeError):
        rref.no_such_attribute  # noqa: B018


def test_a_value_of_ones_own():
    value = [1, 2]
    rref = RRef(value)
    assert rref.is_owner()
    assert rref.confirmed_by_owner()
    assert rref.owner_name() == "driver"
    assert rref.to_here() is value
    assert rref.local_value() is value
    assert "OwnerRRef" in str(rref)


def test_remote_on_oneself():
    rref = rpc.remote("driver", Counter, args=(3,))
    assert rref.is_owner()
    assert rref.to_here().count == 3
    assert rref.rpc_sync().add() == 4


def test_local_value_elsewhere_is_an_error():
    rref = rpc.remote("a", Counter)
    with pytest.raises(RuntimeError, match=r"can't call localValue\(\) on user .*driver.*Call it on owner .*'a'|a"):
        rref.local_value()


def test_it_can_be_awaited():
    async def fetch() -> tuple[int, int]:
        rref = rpc.remote("a", int, args=("7",))
        return await rref, await rref.to_here_async()

    assert asyncio.run(fetch()) == (7, 7)


def slow(release: RRef[Any]) -> int:
    release.rpc_sync().wait(PATIENCE)
    return 5


def slow_there(release: RRef[Any]) -> int:
    """The same, with no call: that would end with the time of the creation, and the creation with it."""
    release.local_value().wait(PATIENCE)
    return 5


def test_whoever_asks_early_waits():
    release = RRef(threading.Event())
    rref = rpc.remote("a", slow, args=(release,))
    future = rref.to_here_async()
    assert not future.done()
    with pytest.raises(errors.CallTimeoutError):
        rref.to_here(timeout=0.05)
    release.local_value().set()
    assert future.wait() == 5
    assert rref._get_future().wait() is None


def test_an_error_shows_on_use():
    rref = rpc.remote("a", fail, args=("this fails",))
    for _ in range(2):
        with pytest.raises(ValueError, match="this fails") as caught:
            rref.to_here()
        cause = str(caught.value.__cause__)
        assert "on worker 'a'" in cause
        assert "in fail" in cause
    with pytest.raises(ValueError, match="this fails"):
        rref.rpc_sync().anything()
    assert rref.confirmed_by_owner()


def test_an_error_of_ones_own_value():
    rref = rpc.remote("driver", fail, args=("this fails",))
    with pytest.raises(ValueError, match="this fails"):
        rref.local_value()


def test_what_cannot_be_sent_raises_at_once():
    with pytest.raises(errors.EncodeError):
        rpc.remote("a", len, args=(threading.Lock(),))
    with pytest.raises(errors.UnknownWorkerError):
        rpc.remote("nobody", len)


def test_a_creation_that_times_out():
    release = rpc.remote("a", threading.Event)
    rref = rpc.remote("a", slow_there, args=(release,), timeout=0.05)
    with pytest.raises(errors.CallTimeoutError):
        rref._get_future().wait()
    with pytest.raises(errors.CallTimeoutError, match="RRef creation via rpc.remote\\(\\) timed out"):
        rref.to_here()
    release.rpc_sync().set()


# -- methods -----------------------------------------------------------------------------------------------


def test_methods_of_the_value():
    rref = rpc.remote("a", Counter, args=(10,))
    assert rref.rpc_sync().add(5) == 15
    assert rref.rpc_async().add(n=1).wait() == 16
    assert rref.remote().add(4).to_here() == 20
    assert rref.rpc_sync(timeout=PATIENCE).add_later(2) == 22
    assert rref.remote().add_later(2).to_here() == 24
    with pytest.raises(KeyError, match="no such thing"):
        rref.rpc_sync().fail()
    with pytest.raises(AttributeError):
        rref.rpc_sync().no_such_method()
    assert rref._get_type() is Counter
    assert rref._get_type(blocking=False).wait() is Counter


# -- handles that travel -----------------------------------------------------------------------------------


@dataclass
class Holder:
    inside: list[Any]


_kept: list[Any] = []


def owner_of(x: Any) -> str:
    rref = x.inside[0]["it"] if isinstance(x, Holder) else x
    return f"{rref.owner_name()}:{rref.is_owner()}:{rref.to_here()}"


def keep(rref: Any) -> None:
    _kept.append(rref)


def take_back() -> Any:
    return _kept.pop()


def read_kept() -> Any:
    return _kept[-1].to_here()


def forget() -> None:
    _kept.clear()


@pytest.mark.parametrize("to", ["driver", "a", "b"])
def test_it_goes_wherever_arguments_go(to):
    rref = rpc.remote("a", int, args=("7",))
    assert rpc.rpc_sync(to, owner_of, args=(rref,)) == f"a:{to == 'a'}:7"
    assert rpc.rpc_sync(to, owner_of, args=(Holder([{"it": rref}]),)) == f"a:{to == 'a'}:7"


def pass_on(rref: Any, to: str) -> str:
    return rpc.rpc_sync(to, owner_of, args=(rref,))


def test_it_is_passed_on_by_those_who_got_it():
    rref = rpc.remote("a", int, args=("7",))
    assert rpc.rpc_sync("b", pass_on, args=(rref, "c")) == "a:False:7"
    assert rpc.rpc_sync("b", pass_on, args=(rref, "a")) == "a:True:7"
    assert rpc.rpc_sync("b", pass_on, args=(RRef(8), "c")) == "driver:False:8"


@pytest.mark.parametrize("owner", ["driver", "a", "b", "c"])
def test_the_value_lives_while_any_handle_lives(owner):
    rref = rpc.remote(owner, Counter, args=(1,)) if owner != "driver" else RRef(Counter(1))
    seven = rref.remote().add(6)
    assert seven.to_here() == 7  # before it is added to again
    rpc.rpc_sync("b", keep, args=(seven,))
    rpc.rpc_sync("b", keep, args=(rref,))
    del rref, seven
    back = rpc.rpc_sync("b", take_back)
    assert back.rpc_sync().add(1) == 8
    assert rpc.rpc_sync("b", read_kept) == 7
    wait_for_counts({"owned": 2}, owner)
    del back
    wait_for_counts({"owned": 1}, owner)
    assert rpc.rpc_sync("b", read_kept) == 7
    rpc.rpc_sync("b", forget)


def send_and_forget(rref: Any, to: str) -> None:
    rpc.rpc_async(to, keep, args=(rref,)).wait()


def test_a_handle_that_is_lent_and_let_go_at_once():
    """b lends it to c and lets its own go, before the owner has heard of c's."""
    for _ in range(20):
        rref = rpc.remote("a", int, args=("7",))
        rpc.rpc_sync("b", send_and_forget, args=(rref, "c"))
        del rref
        assert rpc.rpc_sync("c", read_kept) == 7
        rpc.rpc_sync("c", forget)


def test_a_handle_made_before_its_value():
    """b hears of the value, and asks for it, while the owner may not have been told to create it."""
    for n in range(20):
        rref = rpc.remote("a", int, args=(str(n),))
        assert rpc.rpc_sync("b", owner_of, args=(rref,)) == f"a:False:{n}"


def make_there(to: str) -> Any:
    return rpc.remote(to, int, args=("9",))


def test_a_handle_as_a_result():
    assert rpc.rpc_sync("b", make_there, args=("a",)).to_here() == 9
    assert rpc.rpc_sync("b", make_there, args=("b",)).to_here() == 9
    mine = rpc.rpc_sync("b", make_there, args=("driver",))
    assert mine.is_owner()
    assert mine.local_value() == 9
    nested = rpc.remote("b", make_there, args=("a",))
    assert nested.to_here().to_here() == 9


def test_a_value_that_refers_to_another_one():
    inner = rpc.remote("a", int, args=("3",))
    outer = rpc.remote("b", Holder, args=([inner],))
    del inner
    assert outer.to_here().inside[0].to_here() == 3


def test_it_is_pickled_in_messages_only():
    rref = RRef(1)
    for save in (pickle.dumps, copy.deepcopy):
        with pytest.raises(RuntimeError, match="Can not pickle rref in python pickler"):
            save(rref)
    assert copy.copy(rref) is rref


def fail_with(rref: Any) -> None:
    raise ValueError(rref)


def test_a_handle_in_an_exception_is_left_there():
    with pytest.raises(errors.RemoteError):
        rpc.rpc_sync("a", fail_with, args=(RRef(1),))


def test_many_handles_from_many_threads():
    shared = rpc.remote("a", Counter)
    problems: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(20):
                mine = rpc.remote("b", int, args=("1",))
                assert rpc.rpc_sync("c", owner_of, args=(mine,)) == "b:False:1"
                shared.rpc_sync().add(mine.to_here())
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems
    assert shared.rpc_sync().add(0) == 120


# -- gradients ---------------------------------------------------------------------------------------------


def test_gradients_flow_through_a_fetched_value():
    #   driver             a                    b
    #   x ──remote──▶ x * 2 ──to_here──▶ (· * w)
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    with autograd.context() as context_id:
        doubled = rpc.remote("a", torch.mul, args=(x, 2))
        cubed = rpc.remote("b", cube, args=(doubled,))
        autograd.backward(context_id, [cubed.to_here().sum() + doubled.to_here().sum()])
        found = autograd.get_gradients(context_id)[x]
        del doubled, cubed
    torch.testing.assert_close(found, 3 * (2 * x.detach()) ** 2 * 2 + 2)


def cube(rref: Any) -> torch.Tensor:
    return rref.to_here() ** 3


def test_backward_from_a_handle():
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    with autograd.context() as context_id:
        loss = rpc.remote("a", dot, args=(x,))
        loss.backward(context_id)
        torch.testing.assert_close(autograd.get_gradients(context_id)[x], 2 * x.detach())
        del loss
    own = RRef((x * x).sum())
    own.backward()
    torch.testing.assert_close(x.grad, 2 * x.detach())
    with pytest.raises(RuntimeError, match=r"RRef should contain a tensor for .backward\(\)"):
        RRef("no tensor").backward()
    with pytest.raises(RuntimeError, match="Could not find autograd context with id: 100"):
        own.backward(100)


def dot(x: torch.Tensor) -> torch.Tensor:
    return (x * x).sum()
