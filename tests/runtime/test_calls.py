"""What a call means, on every transport."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import pytest
import torch

import telegrad
from telegrad import errors, rpc
from telegrad.events import logger
from telegrad.primitives import current

PATIENCE = 30.0  # no wait in a test is longer


# -- functions that run on workers ------------------------------------------------------------------------


def add_one_in_place(x: torch.Tensor) -> torch.Tensor:
    return x.add_(1)


def ping_pong(depth: int, here: str, there: str) -> int:
    return 0 if depth == 0 else 1 + rpc.rpc_sync(there, ping_pong, args=(depth - 1, there, here))


def call_back(to: str, number: int) -> int:
    return rpc.rpc_sync(to, abs, args=(-number,))


def time_left() -> float | None:
    serving = current.serving.get()
    return None if serving is None or serving.deadline is None else serving.deadline - time.monotonic()


def time_left_there(to: str, timeout: float) -> float | None:
    return rpc.rpc_sync(to, time_left, timeout=timeout)


class Gate:
    """A door on a worker: calls wait at it until another call opens it."""

    event = threading.Event()
    waiting = threading.Semaphore(0)


def wait_at_gate() -> bool:
    Gate.waiting.release()
    return Gate.event.wait(PATIENCE)


def open_gate(after: int) -> None:
    for _ in range(after):
        assert Gate.waiting.acquire(timeout=PATIENCE)
    Gate.event.set()


def close_gate() -> None:
    Gate.event.clear()


def fail(text: str) -> None:
    raise KeyError(text)


def fail_locally() -> None:
    raise SystemExit(3)


@rpc.functions.async_execution
def pending_until_released(number: int) -> torch.futures.Future:
    future: torch.futures.Future = torch.futures.Future()
    Waiting.futures.append((future, number))
    return future


@rpc.functions.async_execution
def not_a_future() -> int:
    return 1


@rpc.functions.async_execution
def fails_later() -> torch.futures.Future:
    future: torch.futures.Future = torch.futures.Future()
    future.set_exception(KeyError("later"))
    return future


class Waiting:
    futures: ClassVar[list] = []


def waiting() -> int:
    return len(Waiting.futures)


def release_all() -> int:
    threads = threading.active_count()
    for future, number in Waiting.futures:
        future.set_result(number)
    Waiting.futures.clear()
    return threads


class Account:
    def __init__(self, balance: int) -> None:
        self.balance = balance

    def deposit(self, amount: int) -> int:
        self.balance += amount
        return self.balance


# -- nesting and threads ----------------------------------------------------------------------------------


def test_recursion_200_calls_deep_between_two_workers(cluster):
    assert rpc.rpc_sync("a", ping_pong, args=(200, "a", "b")) == 200


def test_300_concurrent_calls_that_each_call_back(cluster):
    futures = [rpc.rpc_async("a", call_back, args=("driver", n)) for n in range(300)]
    assert torch.futures.wait_all(futures) == list(range(300))


def test_functions_that_block_do_not_stop_others(cluster):
    futures = [rpc.rpc_async("a", wait_at_gate) for _ in range(20)]
    rpc.rpc_sync("a", open_gate, args=(20,))
    assert all(torch.futures.wait_all(futures))
    rpc.rpc_sync("a", close_gate)


def test_async_execution_frees_the_thread(cluster):
    assert rpc.rpc_sync("a", waiting) == 0  # "a" has imported this module now; until then, calls would wait
    futures = [rpc.rpc_async("a", pending_until_released, args=(n,)) for n in range(200)]
    deadline = time.monotonic() + PATIENCE
    while rpc.rpc_sync("a", waiting) < 200:
        assert time.monotonic() < deadline
    threads = rpc.rpc_sync("a", release_all)
    assert torch.futures.wait_all(futures) == list(range(200))
    assert threads < 60


def test_async_execution_must_return_a_future(cluster):
    with pytest.raises(RuntimeError, match=r"must return a torch\.futures\.Future"):
        rpc.rpc_sync("a", not_a_future)
    with pytest.raises(KeyError, match="later"):
        rpc.rpc_sync("a", fails_later)


def test_many_threads_call_at_once(cluster):
    results: dict[int, list[int]] = {}

    def work(number: int) -> None:
        results[number] = [rpc.rpc_sync("a" if n % 2 else "b", abs, args=(-n,)) for n in range(50)]

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert results == {n: list(range(50)) for n in range(8)}


# -- what is called, and with what ------------------------------------------------------------------------


def test_a_call_to_oneself_gets_copies(cluster):
    x = torch.zeros(3)
    assert rpc.rpc_sync("driver", add_one_in_place, args=(x,)).tolist() == [1, 1, 1]
    assert x.tolist() == [0, 0, 0]
    info = rpc.get_worker_info()
    assert rpc.rpc_sync(info, rpc.get_worker_info).name == "driver"


def test_arguments_and_results_are_private(cluster):
    for size in (3, 100_000):
        x = torch.zeros(size)
        y = rpc.rpc_sync("a", add_one_in_place, args=(x,))
        assert not x.any()
        y.add_(5)
        assert bool((rpc.rpc_sync("a", add_one_in_place, args=(x,)) == 1).all())
        assert bool((y == 6).all())


def test_bound_methods_travel_with_their_object(cluster):
    account = Account(10)
    assert rpc.rpc_sync("a", account.deposit, args=(5,)) == 15
    assert account.balance == 10


def test_workers_are_named_by_name_id_and_info(cluster):
    info = rpc.get_worker_info("b")
    for to in ("b", info.id, info):
        assert rpc.rpc_sync(to, rpc.get_worker_info) == info


# -- deadlines --------------------------------------------------------------------------------------------


def wait_for_a_call(worker: telegrad.Worker) -> None:
    worker.call("a", wait_at_gate, timeout=30.0)


def wait_in_torch(worker: telegrad.Worker) -> None:
    """In C++, where telegrad does not see it."""
    torch.futures.wait_all([worker.call_async("a", wait_at_gate, timeout=30.0)])


@pytest.mark.parametrize("wait", [wait_for_a_call, wait_in_torch])
def test_a_timeout_names_worker_and_function(cluster, jumping_clock, wait):
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(wait, cluster.worker)
        while not cluster.worker.statistics().calls_pending:
            assert not waiting.done()
        jumping_clock.jump(30.0)
        with pytest.raises(errors.CallTimeoutError, match=r"worker 'a'.*wait_at_gate.*set timeout \(30000 ms\)"):
            waiting.result(PATIENCE)
    rpc.rpc_sync("a", open_gate, args=(1,))
    rpc.rpc_sync("a", close_gate)


def test_deadlines_shrink_through_nested_calls(cluster):
    outer = rpc.rpc_sync("a", time_left_there, args=("b", 50.0), timeout=20.0)
    assert 10 < outer <= 20
    assert rpc.rpc_sync("a", time_left_there, args=("b", 5.0), timeout=20.0) <= 5
    assert rpc.rpc_sync("a", time_left_there, args=("b", 0.0), timeout=20.0) <= 20
    assert rpc.rpc_sync("a", time_left, timeout=0) is None
    assert 50 < rpc.rpc_sync("a", time_left) <= 60


def test_wait_with_a_timeout_leaves_the_call_running(cluster):
    future = rpc.rpc_async("a", wait_at_gate)
    with pytest.raises(errors.CallTimeoutError, match=r"within 0\.05 s"):
        future.wait(timeout=0.05)
    rpc.rpc_sync("a", open_gate, args=(1,))
    assert future.wait(timeout=PATIENCE) is True
    rpc.rpc_sync("a", close_gate)


PASSED: list[None] = []  # list.append is atomic


def pass_the_gate() -> None:
    assert wait_at_gate()
    PASSED.append(None)


def passed() -> int:
    return len(PASSED)


def test_execution_is_at_most_once(cluster, jumping_clock):
    """A call whose caller has given up runs to its end, and is never sent again."""
    before = rpc.rpc_sync("b", passed)
    futures = [rpc.rpc_async("b", pass_the_gate, timeout=30.0) for _ in range(10)]
    rpc.rpc_sync("b", await_waiting, args=(10,))
    jumping_clock.jump(30.0)
    for future in futures:
        with pytest.raises(errors.CallTimeoutError):
            future.wait(PATIENCE)
    rpc.rpc_sync("b", open_gate, args=(0,))
    deadline = time.monotonic() + PATIENCE
    while rpc.rpc_sync("b", served_now) > 1:  # this call
        assert time.monotonic() < deadline
    rpc.rpc_sync("b", close_gate)
    assert rpc.rpc_sync("b", passed) - before == 10


def served_now() -> int:
    return current.current_worker().statistics().calls_being_served


class UnspeakableError(SystemExit):
    def __str__(self) -> str:
        raise ValueError("no text")


def exit_without_a_word() -> None:
    raise UnspeakableError


def test_an_exception_whose_text_cannot_be_had(cluster):
    with pytest.raises(errors.RemoteError, match="UnspeakableError"):
        rpc.rpc_sync("a", exit_without_a_word)
    with pytest.raises(errors.RemoteError, match="UnspeakableError"):
        rpc.rpc_async("a", exit_without_a_word).wait(PATIENCE)


# -- futures ----------------------------------------------------------------------------------------------


def test_futures_complete_though_nobody_waits(cluster):
    done = threading.Event()
    rpc.rpc_async("a", abs, args=(-3,)).then(lambda future: done.set())
    assert done.wait(PATIENCE)
    collected = torch.futures.collect_all([rpc.rpc_async("a", abs, args=(-n,)) for n in range(5)])
    assert [f.wait() for f in collected.wait()] == list(range(5))


def test_a_callback_may_call_and_wait(cluster):
    future = rpc.rpc_async("a", abs, args=(-3,))
    assert future.then(lambda f: rpc.rpc_sync("a", abs, args=(f.wait() - 10,))).wait() == 7


def test_callbacks_of_others_do_not_hold_up_a_waiting_caller(cluster):
    release = threading.Event()
    blocked = rpc.rpc_async("a", wait_at_gate).then(lambda f: release.wait(PATIENCE))
    rpc.rpc_sync("a", open_gate, args=(1,))
    assert [rpc.rpc_sync("a", abs, args=(-n,)) for n in range(20)] == list(range(20))
    release.set()
    assert blocked.wait() is True
    rpc.rpc_sync("a", close_gate)


def test_futures_can_be_awaited(cluster):
    async def main() -> list[int]:
        futures = [rpc.rpc_async("a", abs, args=(-n,)) for n in range(20)]
        return [await future for future in futures]

    assert asyncio.run(main()) == list(range(20))

    async def failing() -> None:
        await rpc.rpc_async("a", fail, args=("boom",))

    with pytest.raises(KeyError, match="boom"):
        asyncio.run(failing())


def test_a_failure_that_nobody_waits_for_is_logged(cluster):
    seen: list[str] = []
    logged = threading.Event()

    class Watch(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(record.getMessage())
            logged.set()

    watch = Watch(logging.WARNING)
    logging.getLogger("telegrad").addHandler(watch)
    try:
        rpc.rpc_async("a", fail, args=("lost",))
        assert logged.wait(PATIENCE)
    finally:
        logging.getLogger("telegrad").removeHandler(watch)
    (message,) = seen
    assert "the call of fail on worker 'a' failed, and no one waited for it: KeyError('lost')" in message


def test_failures_that_were_waited_for_are_not_logged(cluster, caplog):
    for wait in (lambda f: f.wait(), lambda f: torch.futures.wait_all([f]), lambda f: f.value()):
        future = rpc.rpc_async("a", fail, args=("seen",))
        done = threading.Event()
        while not future.done():
            done.wait(0.001)
        with pytest.raises(KeyError, match="seen"):
            wait(future)
        del future
    rpc.rpc_sync("a", abs, args=(1,))
    assert "no one waited" not in caplog.text


# -- failures ---------------------------------------------------------------------------------------------


def test_remote_exceptions_keep_type_and_traceback(cluster):
    with pytest.raises(KeyError) as caught:
        rpc.rpc_sync("a", fail, args=("boom",))
    cause = caught.value.__cause__
    assert isinstance(cause, errors.RemoteTraceback)
    assert cause.worker == "a"
    assert "in fail" in cause.text
    assert "raise KeyError(text)" in cause.text


def test_system_exit_in_a_function_is_a_failure_of_the_call(cluster):
    with pytest.raises(errors.RemoteError, match="SystemExit"):
        rpc.rpc_sync("a", fail_locally)
    with pytest.raises(errors.RemoteError, match="SystemExit"):
        rpc.rpc_async("a", fail_locally).wait()
    assert rpc.rpc_sync("a", abs, args=(-1,)) == 1


def test_unknown_workers_are_named_with_the_known_ones(cluster):
    with pytest.raises(errors.UnknownWorkerError, match=r"worker 'nobody' .*known: \['a', 'b', 'driver'\]"):
        rpc.rpc_sync("nobody", abs, args=(1,))
    with pytest.raises(errors.UnknownWorkerError, match="999"):
        rpc.rpc_async(999, abs, args=(1,))
    with pytest.raises(errors.UnknownWorkerError, match="expected"):
        rpc.rpc_sync(1.5, abs, args=(1,))


def test_an_argument_that_cannot_be_pickled_is_named(cluster):
    with pytest.raises(errors.EncodeError, match=r"an argument, a lock, of the call of abs on worker 'a'"):
        rpc.rpc_sync("a", abs, args=(threading.Lock(),))
    with pytest.raises(errors.EncodeError, match="the result, a lock, cannot be sent back"):
        rpc.rpc_sync("a", threading.Lock)
    assert rpc.rpc_sync("a", abs, args=(-1,)) == 1


def test_a_message_over_the_limit_is_refused_and_the_next_one_works(transport, server):
    options = telegrad.Options(max_message_bytes=1 << 20)
    with telegrad.LocalCluster(["a"], transport=transport, server=server, options=options):
        with pytest.raises(errors.TooLargeError, match=r"over the limit of 1048576.*max_message_bytes"):
            rpc.rpc_sync("a", torch.clone, args=(torch.zeros(1 << 20),))
        with pytest.raises(errors.TooLargeError, match="over the limit"):
            rpc.rpc_sync("a", torch.zeros, args=(1 << 20,))
        assert rpc.rpc_sync("a", abs, args=(-1,)) == 1


# -- what can be seen -------------------------------------------------------------------------------------


def test_ids_never_repeat_and_carry_the_worker(cluster):
    seen: list[telegrad.worker.Event] = []
    unsubscribe = cluster.worker.events.subscribe(seen.append)
    for _ in range(5):
        rpc.rpc_sync("a", abs, args=(-1,))
    unsubscribe()
    rpc.rpc_sync("a", abs, args=(-1,))
    sent = [e for e in seen if e.stage == "send" and e.phase == "complete"]
    ids = [e.message_id for e in sent]
    assert len(ids) == 5 == len(set(ids))
    assert all(id >> 48 == cluster.worker.id for id in ids)
    assert all(e.kind == "call" and e.peer == "a" and e.nbytes > 0 for e in sent)
    answers = [e for e in seen if e.stage == "receive" and e.phase == "complete"]
    assert [e.kind for e in answers] == ["reply"] * 5
    assert all(e.message_id >> 48 == rpc.get_worker_info("a").id for e in answers)


class WithoutRepr(RuntimeError):
    def __repr__(self) -> str:
        raise ValueError("it has none")


@pytest.mark.parametrize("kind", [RuntimeError, WithoutRepr])
def test_a_failing_subscriber_breaks_nothing(cluster, monkeypatch, kind):
    said, texts = threading.Event(), []

    def broken(event: object) -> None:
        raise kind("broken subscriber")

    def note(record: logging.LogRecord) -> bool:
        texts.append(record.getMessage())
        said.set()
        return False

    monkeypatch.setattr(logger, "filters", [*logger.filters, note])
    unsubscribe = cluster.worker.events.subscribe(broken)
    assert rpc.rpc_sync("a", abs, args=(-1,)) == 1
    unsubscribe()
    assert said.wait(PATIENCE)
    assert "an event subscriber failed" in texts[0]
    assert "broken subscriber" in texts[0]


def test_statistics(cluster):
    before = cluster.worker.statistics()
    for _ in range(3):
        rpc.rpc_sync("a", torch.clone, args=(torch.zeros(1000),))
    after = cluster.worker.statistics()
    assert (after.name, after.id) == ("driver", cluster.worker.id)
    assert after.calls_pending == 0
    assert after.calls_served == before.calls_served
    (traffic,) = [c for name, c in after.connections.items() if name.startswith("a")]
    assert traffic.messages_out == traffic.messages_in == 3
    assert traffic.bytes_out > 12_000 < traffic.bytes_in
    with pytest.raises(AttributeError):
        after.calls_served = 5  # type: ignore[misc]


# -- back-pressure ----------------------------------------------------------------------------------------


def test_a_slow_receiver_slows_its_sender(transport, server):
    options = telegrad.Options(peer_byte_limit=4 << 20)
    with telegrad.LocalCluster(["a"], transport=transport, server=server, options=options) as cluster:
        payload = torch.zeros(256 << 10, dtype=torch.uint8)
        sent = []

        def flood() -> None:
            token = current.worker_var.set(cluster.worker)
            for _ in range(40):
                sent.append(rpc.rpc_async("a", wait_at_gate_with, args=(payload,)))
            current.worker_var.reset(token)

        flooding = threading.Thread(target=flood)
        flooding.start()
        # 16 fit under the limit; the sender stops there until the receiver lets some through
        rpc.rpc_sync("a", await_waiting, args=(15,))
        assert cluster.worker.statistics().bytes_in_flight["a"] <= 4 << 20
        assert len(sent) <= 16
        rpc.rpc_sync("a", open_gate, args=(0,))
        flooding.join(PATIENCE)
        assert len(torch.futures.wait_all(sent)) == 40
        rpc.rpc_sync("a", close_gate)


def wait_at_gate_with(payload: torch.Tensor) -> bool:
    return wait_at_gate()


def await_waiting(count: int) -> None:
    for _ in range(count):
        assert Gate.waiting.acquire(timeout=PATIENCE)


def test_the_limit_does_not_block_nested_calls(transport, server):
    """driver -> a -> driver -> a ...: each depth has its own allowance, so a full window cannot deadlock."""
    options = telegrad.Options(peer_byte_limit=4096)
    with telegrad.LocalCluster(["a"], transport=transport, server=server, options=options):
        futures = [rpc.rpc_async("a", ping_pong, args=(4, "a", "driver"), timeout=PATIENCE) for _ in range(20)]
        assert torch.futures.wait_all(futures) == [4] * 20
