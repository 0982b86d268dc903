"""The suite `steps`: what it measures is what one process computes; on real workers, a few steps each."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest

import telegrad
from benchmarks import leaves, messages, optimizer_steps, step_models, steps
from benchmarks.backends import TELEGRAD
from benchmarks.cputime import process_seconds, used_by
from benchmarks.figures import Repeats, Session
from benchmarks.step_models import Build, Model
from benchmarks.trainers import Trainer, check, cpu_of_step, local_trainer, time_part, time_step, trainer

MODELS = {build.__name__: build for _, _, build in steps.MODELS}
FEW = Repeats(count=2, warmup=0)

on_unix = pytest.mark.parametrize("transport", ["unix"])
either_way = pytest.mark.parametrize("plain", [True, False], ids=["plain", "context"])
each_model = pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)


@pytest.fixture
def session(cluster: telegrad.LocalCluster) -> Session:
    return Session(TELEGRAD, cluster.names, FEW, quick=True)


@each_model
def test_models_learn_in_one_process(build: Build):
    made = local_trainer(build)
    losses = [made.step() for _ in range(5)]
    assert losses == sorted(losses, reverse=True)


@on_unix
@either_way
@each_model
def test_models_train_on_workers_as_in_one_process(session: Session, build: Build, plain: bool):
    """`trainer()` compares losses and parameters."""
    made = trainer(session, build, plain=plain)
    assert (made.autograd is None) == plain
    assert made.step() > 0
    assert len(made.parts) == len(steps.PARTS)


def _worse(change: Callable[[Model], None]) -> Trainer:
    made = local_trainer(step_models.transformer)
    change(made.model)
    return made


def test_training_that_differs_is_noticed():
    def other_weight(model: Model) -> None:
        next(iter(model.stages[2].parameters())).data[0] += 0.1

    with pytest.raises(AssertionError, match="trained differently"):
        check(_worse(other_weight), local_trainer(step_models.transformer), TELEGRAD)

    def frozen(model: Model) -> None:
        for parameter in model.stages[1].parameters():
            parameter.requires_grad_(False)

    with pytest.raises(AssertionError, match="is not trained"):
        check(_worse(frozen), _worse(frozen), TELEGRAD)


@on_unix
def test_samples_of_steps_and_of_the_optimizer(session: Session):
    build = step_models.lstm
    assert len(time_step(session, build=build, plain=True)) == FEW.count
    assert len(time_part(session, build=build, plain=True, part=1)) == FEW.count
    assert min(cpu_of_step(session, build=build, plain=True)) > 0
    for plain in (True, False):
        assert min(optimizer_steps.time_optimizer(session, tensors=3, plain=plain)) > 0
    assert min(optimizer_steps.time_local_optimizer(session, tensors=6)) > 0


@on_unix
@either_way
@pytest.mark.parametrize("shared", [True, False])
def test_leaves_get_the_gradients_of_one_process(session: Session, plain: bool, shared: bool):
    for passes in leaves._passes(session, shared, plain).values():
        passes.check()
        assert passes.seconds() > 0


@on_unix
@either_way
@pytest.mark.parametrize("step", [1, 10])
def test_tensors_of_a_message_get_the_gradients_of_one_process(session: Session, plain: bool, step: int):
    for count, message in messages._messages(session, step, plain).items():
        if count < 1000:
            message.check()
            assert message.seconds(part=0) > 0


@on_unix
def test_wrong_gradients_are_noticed(session: Session):
    session.backend.rpc.rpc_sync(session.peer, spoil_leaves, args=(10,))
    with pytest.raises(AssertionError, match="not close"):
        leaves._passes(session, False, plain=True)[10].check()


def spoil_leaves(count: int) -> None:
    leaves._leaves[count] = [leaf.detach().mul(2).requires_grad_() for leaf in leaves.make_leaves(count)]


def test_each_task_has_its_name_and_its_floor():
    suite = steps.SUITE
    tasks = [*suite.figures, *suite.growths, *suite.floors, *suite.sections]
    assert len({task.name for task in tasks}) == len(tasks)
    assert {name for figure in suite.figures for name in figure.floors} == {floor.name for floor in suite.floors}
    assert all(growth.floor is not None for growth in suite.growths)


def test_processor_time_is_counted_from_outside():
    before, mine = process_seconds([os.getpid()]), time.process_time()
    while time.process_time() - mine < 0.02:
        pass
    assert 0.02 <= process_seconds([os.getpid()]) - before < 1

    calls = []
    samples = used_by([os.getpid()], lambda: calls.append(1), Repeats(count=3, warmup=4), batch=5)
    assert len(samples) == 3 and min(samples) > 0
    assert len(calls) == 4 + 3 * 5
