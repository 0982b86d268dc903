"""A tensor that comes back from a call in a context has its history, or there is an error: never a leaf, whose gradient
would silently stay behind."""

# ruff: noqa: F811 (fixtures are imported)

from __future__ import annotations

import pytest
import torch
from fault_fixtures import workers  # noqa: F401
from fault_programs import PATIENCE, check_nothing_is_left, check_works
from torch import Tensor

from telegrad import autograd, errors, rpc
from telegrad.primitives.current import current_context_id, current_worker


def end_here() -> None:
    """This worker takes the current context for ended, as after a loss that the others did not notice."""
    current_worker().contexts.take_out(current_context_id())


def doubled(x: Tensor) -> Tensor:
    end_here()
    return x * 2


def nested(x: Tensor) -> dict[str, list[Tensor]]:
    end_here()
    return {"found": [x * 2]}


def detached(x: Tensor) -> Tensor:
    end_here()
    return (x * 2).detach()


def handed_on(x: Tensor) -> Tensor:
    end_here()
    return rpc.rpc_sync("c", torch.mul, args=(x, 2)).detach()


def later(x: Tensor) -> torch.futures.Future:
    future: torch.futures.Future = torch.futures.Future()
    future.set_result(doubled(x))
    return future


def ones() -> Tensor:
    return torch.ones(3, requires_grad=True)


@pytest.mark.parametrize("function", [doubled, nested, rpc.functions.async_execution(later)])
def test_a_reply_from_where_the_context_has_ended(workers, function):
    with autograd.context() as context_id:
        with pytest.raises(errors.GradientError, match=f"context {context_id} has 1 tensors that require grad"):
            rpc.rpc_sync("b", function, args=(ones(),))
        with pytest.raises(errors.GradientError, match="the context has ended on this worker"):
            rpc.rpc_async("b", function, args=(ones(),)).wait(PATIENCE)
        assert torch.equal(rpc.rpc_sync("b", detached, args=(ones(),)), torch.full((3,), 2.0))
    check_works()
    check_nothing_is_left()


def test_a_call_from_where_the_context_has_ended(workers):
    with autograd.context():
        with pytest.raises(errors.UnknownContextError, match="detach\\(\\) what they send"):
            rpc.rpc_sync("b", handed_on, args=(ones(),))


@pytest.mark.parametrize("pack", [lambda x: x, lambda x: [x]])
def test_a_reply_that_says_nothing_of_its_tensors(workers, monkeypatch, pack):
    """Also where the callee is at fault: tensors that were set apart, with no word of where they come from."""
    monkeypatch.setattr(workers["b"].attach, "_check_outside", lambda context, tensors: None)
    with autograd.context() as context_id:
        with pytest.raises(errors.GradientError) as caught:
            rpc.rpc_sync("b", doubled if pack(1) == 1 else nested, args=(ones(),))
        assert "the answer of worker 'b' to the call of" in str(caught.value)
        assert f"in autograd context {context_id} has 1 tensors that require grad and no history" in str(caught.value)


def test_outside_of_any_context_too(workers):
    found = rpc.rpc_sync("b", torch.mul, args=(ones(), 2))
    assert found.requires_grad and not found.is_leaf
