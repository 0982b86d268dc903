"""Workers come and go, in plain mode: the seam, lost peers, messages that are never decoded, other settings."""

# ruff: noqa: F811 (fixtures are imported)

from __future__ import annotations

import gc
import logging
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from fault_fixtures import workers  # noqa: F401
from fault_programs import PATIENCE
from lease_check import is_reading

import telegrad
from telegrad import _torch, autograd, errors, rpc
from telegrad.events import logger
from telegrad.gradients.plain import Plain
from telegrad.gradients.rooted_pass import looking_time
from telegrad.gradients.seam import PlainEngine
from telegrad.optim.owner import settle
from telegrad.primitives import clock, current
from telegrad.primitives.current import current_worker
from telegrad.runtime.threads import Threads


def ones() -> torch.Tensor:
    return torch.ones(3, requires_grad=True)


def echo(value: object) -> object:
    return value


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def wait_until_nothing_is_left(workers: dict[str, Any]) -> None:
    deadline = time.monotonic() + PATIENCE
    while left := {w.name: w.engine.statistics() for w in workers.values() if any(w.engine.statistics().values())}:
        assert time.monotonic() < deadline, left
        time.sleep(0.005)


def test_the_seam_comes_and_goes_with_workers():
    before = _torch.Variable._execution_engine
    with telegrad.LocalCluster(["b"], transport="inproc"):
        assert isinstance(_torch.Variable._execution_engine, PlainEngine)
        with telegrad.LocalCluster(["c"], transport="inproc", driver="other"):
            pass
        assert isinstance(_torch.Variable._execution_engine, PlainEngine)
    assert _torch.Variable._execution_engine is before


def test_the_seam_below_another():
    before = _torch.Variable._execution_engine

    class Above(_torch.ImperativeEngine):
        def run_backward(self, *args: Any, **kwargs: Any) -> Any:
            return below.run_backward(*args, **kwargs)

    with telegrad.LocalCluster(["b"], transport="inproc"):
        below = _torch.Variable._execution_engine
        _torch.Variable._execution_engine = above = Above()
        x = ones()
        rpc.rpc_sync("b", torch.mul, args=(x, 3.0)).sum().backward()
        assert torch.equal(x.grad, torch.full((3,), 3.0))  # type: ignore[arg-type]
    assert _torch.Variable._execution_engine is above
    ones().sum().backward()
    with telegrad.LocalCluster(["b"], transport="inproc"):
        x = ones()
        rpc.rpc_sync("b", torch.mul, args=(x, 3.0)).sum().backward()
        assert torch.equal(x.grad, torch.full((3,), 3.0))  # type: ignore[arg-type]
    _torch.Variable._execution_engine = below
    with telegrad.LocalCluster(["b"], transport="inproc"):
        pass
    assert _torch.Variable._execution_engine is before


def test_with_plain_mode_off():
    with telegrad.LocalCluster(["b"], transport="inproc", options=telegrad.Options(plain=False)):
        assert not isinstance(_torch.Variable._execution_engine, PlainEngine)
        found = rpc.rpc_sync("b", torch.mul, args=(ones(), 2))
        assert found.is_leaf and found.requires_grad


def test_a_callee_answers_as_its_caller_expects(workers):
    """Whatever its own setting is."""
    calls = workers["driver"].calls
    plain, calls._plain = calls._plain, None
    try:
        assert rpc.rpc_sync("b", torch.mul, args=(ones(), 2)).is_leaf
    finally:
        calls._plain = plain
    workers["b"].calls._plain = None
    x = ones()
    rpc.rpc_sync("b", torch.mul, args=(x, 2)).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 2.0))  # type: ignore[arg-type]


def test_a_lost_worker(workers):
    x = ones()
    from_b, from_c = (rpc.rpc_sync(name, torch.mul, args=(x, 2)) for name in "bc")
    workers["b"].close(graceful=False)
    deadline = time.monotonic() + PATIENCE
    while any(sent.to == workers["b"].id for sent in list(workers["driver"].contexts.plain.sends.values())):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    with pytest.raises(errors.GradientError, match="has sent to worker 'b'. That worker is gone"):
        (from_b * from_c).sum().backward()
    from_c.sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 2.0))  # type: ignore[arg-type]
    del from_b, from_c
    gc.collect()  # pytest keeps the error in a circle, and that has the two
    wait_until_nothing_is_left({name: workers[name] for name in ("driver", "c")})


class Undecodable:
    def __reduce__(self) -> Any:
        return raises, ()


def raises() -> None:
    raise ValueError("not here")


def test_a_message_that_is_never_decoded(workers):
    with pytest.raises(errors.DecodeError):
        rpc.rpc_sync("b", print, args=([ones()], Undecodable()))
    workers["b"]._server._closed = True
    future = rpc.rpc_async("b", torch.neg, args=(ones(),), timeout=0.2)
    with pytest.raises(errors.CallTimeoutError):
        future.wait()
    workers["b"]._server._closed = False
    wait_until_nothing_is_left(workers)


def test_what_is_forgotten_is_freed_by_the_thread_that_handles_the_message(monkeypatch):
    """No other thread is woken for it: it would hold up this one, since it needs the interpreter lock."""
    handed_on: list[Any] = []
    freed: list[int] = []
    submit, free = Threads.submit, Plain._free

    def submitted(self: Threads, task: Any) -> None:
        handed_on.append(getattr(task, "func", task))
        submit(self, task)

    def frees(self: Plain, dead: Any) -> None:
        freed.append(self.worker_id)
        assert not is_reading()
        free(self, dead)

    monkeypatch.setattr(Threads, "submit", submitted)
    monkeypatch.setattr(Plain, "_free", frees)
    with telegrad.LocalCluster(["b"], transport="inproc") as cluster:
        workers = {worker.name: worker for worker in cluster._in_process}
        for _ in range(20):
            x = ones()
            rpc.rpc_sync("b", torch.mul, args=(x, 2)).sum().backward()
            assert torch.equal(x.grad, torch.full((3,), 2.0))  # type: ignore[arg-type]
        assert {worker.id for worker in workers.values()} <= set(freed)
        assert not [what for what in handed_on if getattr(what, "__name__", "") == "frees"]
        wait_until_nothing_is_left(workers)


def test_a_worker_that_forgets_what_it_was_not_sent(workers, caplog):
    """It is not believed."""
    x = ones()
    found = rpc.rpc_sync("b", torch.mul, args=(x, 2))
    (id, *_) = workers["b"].contexts.plain.sends
    assert workers["b"].contexts.plain.on_forgotten(workers["c"].id, [id, 17]) is None
    wait_until(lambda: "has forgotten 1 tensors that it was not sent" in caplog.text)
    found.sum().backward()
    assert x.grad is not None


def test_a_pass_in_which_nothing_moves():
    options = telegrad.Options(backward_timeout=0.2)
    with telegrad.LocalCluster(["b", "c"], transport="inproc", options=options) as cluster:
        engine = next(worker for worker in cluster._in_process if worker.name == "b").engine
        on_message, engine.on_message = engine.on_message, lambda *args: None  # what is sent there is lost
        loss = rpc.rpc_sync("c", torch.mul, args=(rpc.rpc_sync("b", torch.mul, args=(ones(), 2)), 2)).sum()
        with pytest.raises(errors.BackwardError, match=r"nothing has moved .* for 0.2 s .* workers \['b'"):
            loss.backward()
        engine.on_message = on_message


@pytest.mark.parametrize("patience", [0.4, 3.0, 60.0])
def test_asking_whether_something_moves_is_part_of_the_time_limit(patience):
    assert patience / 20 < looking_time(patience) <= patience / 2


def test_others_are_asked_before_the_time_limit_is_over(monkeypatch):
    """A frozen worker answers nothing: to ask it must not double the time until the pass fails."""
    options = telegrad.Options(backward_timeout=2.0)
    with telegrad.LocalCluster(["b"], transport="inproc", options=options) as cluster:
        (b,) = (worker for worker in cluster._in_process if worker.name == "b")
        engine = current_worker().engine
        monkeypatch.setattr(b.engine, "on_message", lambda *args: None)  # what is sent there is lost
        asked: list[float] = []
        patience = engine.backward_timeout - looking_time(engine.backward_timeout)
        waited: set[float | None] = set()  # until the others were asked

        def ask(*args: Any) -> Any:
            asked.append(args[-1])
            waited.update(local.patience for local in engine.parts.all())
            return {}, {}

        monkeypatch.setattr(engine.host, "ask", ask)
        loss = rpc.rpc_sync("b", torch.mul, args=(ones(), 2)).sum()
        with pytest.raises(errors.BackwardError, match="nothing has moved"):
            loss.backward()
        assert waited == {patience}
        first, again = asked  # and not for the error once more
        assert patience + first <= 2.0
        assert again <= 0.75 * first  # after a pause of a quarter, by the same deadline
        monkeypatch.undo()


def long_way(x: torch.Tensor) -> torch.Tensor:
    """Has a history that no message carries to its end."""
    for _ in range(40):
        x = rpc.rpc_sync("c", torch.mul, args=(x, 2))
    return x


@pytest.mark.parametrize("function", [torch.autograd.backward, torch.autograd.grad])
@pytest.mark.parametrize(("left", "most"), [(None, 2.0), (1.0, 1.0), (100.0, 2.0), (0.0, 0.0)])
def test_asking_what_a_tensor_depends_on_is_part_of_each_time_limit(monkeypatch, function, left, most):
    """`left` is what is left of the time of the call in which the pass begins; None: it begins in none."""
    options = telegrad.Options(backward_timeout=2.0)
    with telegrad.LocalCluster(["b", "c"], transport="inproc", options=options):
        x = ones()
        loss = rpc.rpc_sync("b", long_way, args=(x,)).sum()
        asked: list[float] = []
        host = current_worker().engine.host
        monkeypatch.setattr(host, "ask", lambda *args: asked.append(args[-1]) or ({}, {}))  # nobody answers
        serving = None if left is None else current.Serving("b", 1, clock.now() + left, 1)
        token = current.serving.set(serving)
        try:
            with pytest.raises(errors.GradientError, match="does not answer"):
                function(loss, **({"inputs": x} if function is torch.autograd.grad else {}))
        finally:
            current.serving.reset(token)
            monkeypatch.undo()
        assert bool(asked) == (most > 0) and all(seconds <= most for seconds in asked)


def fill(to: str) -> None:
    """Calls a worker that reads nothing, until the connection takes nothing more either."""
    with pytest.raises(errors.CallTimeoutError):
        while True:
            rpc.rpc_async(to, echo, args=(b"x" * 2000,), timeout=0.3)


@pytest.mark.parametrize("transport", ["unix", "tcp"])
def test_a_worker_that_takes_nothing_holds_no_pass_up(server, transport):
    options = telegrad.Options(backward_timeout=1.0)
    with telegrad.LocalCluster(["a"], transport=transport, server=server, options=options) as cluster:
        loss = rpc.rpc_sync("a", torch.mul, args=(ones(), 2)).sum()
        os.kill(cluster.pids["a"], signal.SIGSTOP)
        try:
            fill("a")
            with ThreadPoolExecutor(1) as pool:
                found = pool.submit(loss.backward)
                try:
                    with pytest.raises(errors.BackwardError, match="nothing has moved in the backward pass"):
                        found.result(PATIENCE)
                finally:
                    os.kill(cluster.pids["a"], signal.SIGCONT)
        finally:
            os.kill(cluster.pids["a"], signal.SIGCONT)
        rpc.rpc_sync("a", torch.mul, args=(ones(), 2)).sum().backward()


def test_a_message_on_its_way_between_two_that_wait_is_progress(monkeypatch):
    """The root asks when one worker is done, and what it has sent to the next one has not been read yet."""
    options = telegrad.Options(backward_timeout=2.0)
    with telegrad.LocalCluster(["b", "c"], transport="inproc", options=options) as cluster:
        x = ones()
        loss = rpc.rpc_sync("c", torch.mul, args=(rpc.rpc_sync("b", torch.mul, args=(x, 2)), 2)).sum()
        (b,) = (worker for worker in cluster._in_process if worker.name == "b")
        engine, host = b.engine, current_worker().engine.host
        on_message, ask, held = engine.on_message, host.ask, []

        def hold(*message: Any) -> None:
            held.append(message)

        def ask_and_let_go(*args: Any) -> Any:
            answers = ask(*args)
            while held:
                if (task := on_message(*held.pop(0))) is not None:
                    host.submit(task)
            engine.on_message = on_message
            return answers

        monkeypatch.setattr(host, "ask", ask_and_let_go)
        engine.on_message = hold
        loss.backward()
        assert torch.equal(x.grad, torch.full((3,), 4.0))  # type: ignore[arg-type]
        monkeypatch.undo()


LIMIT = 1.0  # seconds; on a busy machine a thread that could run may have to wait for a part of one


@pytest.mark.parametrize("chain", [False, True])
def test_a_pass_in_which_something_moves(chain, caplog):
    """The time limit does not count while a worker computes, here or elsewhere."""
    options = telegrad.Options(backward_timeout=LIMIT)
    with telegrad.LocalCluster(["b", "c"], transport="inproc", options=options):
        x = ones()
        y = late(x)
        found = rpc.rpc_sync("b", late, args=(x,))
        if chain:
            found = rpc.rpc_sync("c", late, args=(found,))
        (found * y).sum().backward()
        assert torch.equal(x.grad, torch.full((3,), 16.0 if chain else 8.0))
    assert ("which compute" in caplog.text) == chain


def late(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y.register_hook(lambda gradient: time.sleep(1.5 * LIMIT))
    return y


@pytest.mark.parametrize("zeroes", [False, True])
def test_gradients_of_different_roots_that_meet(server, zeroes):
    # In processes: while a backward() runs in the process of the leaf, nobody looks at its `.grad`.
    with telegrad.LocalCluster(["b", "c"], server=server):
        rpc.rpc_sync("c", listen)
        for name in ("driver", "b", "driver", "b"):
            rpc.rpc_sync(name, trains)
            rpc.rpc_sync("c", settle)
            if zeroes:
                rpc.rpc_sync("c", zero)
        said = [text for text in rpc.rpc_sync("c", heard) if "are added up in one `.grad`" in text]
    assert len(said) == (0 if zeroes else 1)
    assert all("begun on workers 'driver' and 'b'" in text for text in said)


_weight = torch.ones(3, requires_grad=True)
_said: list[str] = []


def listen() -> None:
    handler = logging.Handler()
    handler.emit = lambda record: _said.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)


def heard() -> list[str]:
    return _said


def weighted(x: torch.Tensor) -> torch.Tensor:
    return x * _weight


def trains() -> None:
    rpc.rpc_sync("c", weighted, args=(torch.ones(3),)).sum().backward()


def zero() -> None:
    _weight.grad = None


def test_nothing_is_kept_of_what_is_over(workers):
    for _ in range(50):
        x = ones()
        loss = rpc.rpc_sync("c", torch.mul, args=(rpc.rpc_sync("b", torch.mul, args=(x, 2)), 3)).sum()
        loss.backward()
    del loss
    wait_until_nothing_is_left(workers)
    assert not autograd.debug_info()["sends"]
