"""Gradients across processes: those of plain autograd. The same programs run by workers in this process, too."""

from __future__ import annotations

from collections.abc import Iterator

import gradient_programs as programs
import pytest
import torch
from gradient_programs import NAMES, PATIENCE, PROGRAMS, Far, Near

import telegrad
from telegrad import autograd

STEPS = 20


@pytest.fixture
def workers(transport: str, server: telegrad.ForkServer) -> Iterator[telegrad.LocalCluster]:
    with telegrad.LocalCluster(NAMES, transport=transport, server=server) as cluster:
        yield cluster
    programs.forget()


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_gradients_are_those_of_plain_autograd(workers, program):
    torch.autograd.backward(program(Near()))
    expected = programs.expected_gradients()
    with autograd.context() as context_id:
        call = Far()
        autograd.backward(context_id, program(call), timeout=PATIENCE)
        found = {
            name: g for w in (*NAMES, "driver") for name, g in call(w, programs.gradients_there, context_id).items()
        }
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient)


def test_several_passes_add_up(workers):
    for scale in (1.0, 2.0):
        torch.autograd.backward([scale * root for root in programs.skips(Near())])
    with autograd.context() as context_id:
        call = Far()
        for scale in (1.0, 2.0):
            autograd.backward(context_id, [scale * root for root in programs.skips(call)], timeout=PATIENCE)
        for worker in ("driver", *NAMES):
            for name, gradient in call(worker, programs.gradients_there, context_id).items():
                torch.testing.assert_close(gradient, programs.take(Near(), name).grad)


# -- training ---------------------------------------------------------------------------------------------


def train_here() -> list[float]:
    losses = []
    for number in range(STEPS):
        loss = programs.loss_of(Near(), number)
        loss.backward()
        for worker in NAMES:
            programs.step_with_grad(Near(), worker)
        losses.append(loss.item())
    return losses


def check_parameters() -> None:
    for worker in NAMES:
        for found, expected in zip(
            Far()(worker, programs.parameters_of, worker), programs.parameters_of(Near(), worker), strict=True
        ):
            torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("into", ["context", "grad"])
def test_training_is_that_of_one_process(workers, into):
    losses = []
    for number in range(STEPS):
        with autograd.context() as context_id:
            loss = programs.loss_of(Far(), number)
            autograd.backward(context_id, [loss], timeout=PATIENCE, into=into)
            for worker in NAMES:
                if into == "context":
                    Far()(worker, programs.step_with_context, worker, context_id)
                else:
                    Far()(worker, programs.step_with_grad, worker)
            losses.append(loss.item())
    assert losses == pytest.approx(train_here())
    assert losses[-1] < losses[0]
    check_parameters()
