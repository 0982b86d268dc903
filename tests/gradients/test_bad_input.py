"""Wrong use of telegrad.autograd: a clear error, in torch's words where it has some; and the context still works."""

from __future__ import annotations

import re
import threading
import time
from typing import Any

import pytest
import torch
from named_leaves import assert_same, expected, gradients, grads, here, leaf, there

from telegrad import autograd, errors, rpc
from telegrad.gradients.backward_pass import State
from telegrad.messages import Gradients
from telegrad.primitives.current import current_worker

pytestmark = pytest.mark.usefixtures("module_cluster")


def weighted(x: torch.Tensor, name: str = "a.w") -> torch.Tensor:
    return x * leaf(name)


def forward(call) -> torch.Tensor:
    #      driver: x ───────▶ a: x * a.w ───────▶ b: * b.w ───────▶ driver: sum
    return call("b", weighted, call("a", weighted, leaf("driver.x")), "b.w").sum()


NAMES = ["driver.x", "a.w", "b.w"]


def assert_works(context_id: int) -> None:
    """That a context is as usable as if nothing had happened."""
    autograd.backward(context_id, [forward(there)])
    assert_same(gradients(context_id, NAMES), expected(forward(here), NAMES))


# -- roots -------------------------------------------------------------------------------------------------

# "does not have a valid gradient function." is said of a root that requires grad and has no history. torch makes none.


def bad_roots() -> dict[str, tuple[list[torch.Tensor], str]]:
    scalar = there("a", weighted, leaf("driver.x")).sum()
    return {
        "none": ([], "No tensors provided for gradient computation."),
        "without grad": ([torch.ones(())], "requires_grad not set on root"),
        "second without grad": ([scalar, torch.ones(())], "requires_grad not set on root"),
        "not scalar": (
            [there("a", weighted, leaf("driver.x"))],
            "is not a scalar, all roots need to be scalar",
        ),
        # Both at once: it is said in this order.
        "without grad and not scalar": ([torch.ones(3)], "requires_grad not set on root"),
    }


@pytest.mark.parametrize("which", ["none", "without grad", "second without grad", "not scalar"])
@pytest.mark.parametrize("function", ["backward", "grad"])
def test_roots_that_are_not_what_is_needed(which, function):
    with autograd.context() as context_id:
        roots, text = bad_roots()[which]
        with pytest.raises(errors.GradientError, match=re.escape(text)):
            if function == "backward":
                autograd.backward(context_id, roots)
            else:
                autograd.grad(context_id, roots, [leaf("driver.x")])
        assert autograd.debug_info()["passes"] == 0
        assert_works(context_id)


def test_the_order_of_the_checks():
    with autograd.context() as context_id:
        roots, text = bad_roots()["without grad and not scalar"]
        with pytest.raises(errors.GradientError, match=text):
            autograd.backward(context_id, roots)


def test_a_root_that_is_no_tensor():
    with autograd.context() as context_id:
        with pytest.raises(TypeError, match="roots must be tensors; number 1 is a float"):
            autograd.backward(context_id, [forward(there), 1.0])
        with pytest.raises(TypeError, match="inputs must be tensors"):
            autograd.grad(context_id, [forward(there)], [None])
        assert_works(context_id)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ([torch.ones(2)], r"shape \(2,\), the root has \(3,\)"),
        ([torch.ones(3), torch.ones(3)], "2 gradients were given for 1 roots"),
    ],
)
def test_gradients_of_roots_that_do_not_fit(given, text):
    with autograd.context() as context_id:
        y = there("a", weighted, leaf("driver.x"))
        with pytest.raises(errors.GradientError, match=text):
            autograd.backward(context_id, [y], grad_tensors=given)
        assert_works(context_id)


def test_a_gradient_of_a_root_with_another_dtype():
    """As torch: what has no meaning is refused, and before anybody is asked to begin."""
    with autograd.context() as context_id:
        y = there("a", weighted, leaf("driver.x"))
        complex_ones = torch.ones(3, dtype=torch.complex128)
        with pytest.raises(RuntimeError, match="complex|dtype"):
            torch.autograd.backward([weighted(leaf("driver.x"))], [complex_ones], inputs=[leaf("driver.x")])
        with pytest.raises(RuntimeError, match="complex|dtype"):
            autograd.backward(context_id, [y], grad_tensors=[complex_ones])
        assert_works(context_id)


# -- contexts ----------------------------------------------------------------------------------------------


def calls_with(context_id: int) -> list:
    x = leaf("driver.x")
    return [
        lambda: autograd.backward(context_id, [x.sum()]),
        lambda: autograd.grad(context_id, x.sum(), x),
        lambda: autograd.get_gradients(context_id),
        lambda: autograd.update_gradient(context_id, x, lambda gradient: gradient),
        lambda: autograd._retrieve_context(context_id),
        lambda: autograd._release_context(context_id),
    ]


@pytest.mark.parametrize("kind", ["unknown", "released", "of nobody"])
def test_a_context_that_is_not_there(kind):
    with autograd.context() as released:
        pass
    context_id = {"unknown": released + 1_000_000, "released": released, "of nobody": 12345}[kind]
    with autograd.context() as working:
        for call in calls_with(context_id):
            with pytest.raises(
                errors.UnknownContextError, match=f"Could not find autograd context with id: {context_id}"
            ):
                call()
        assert not autograd._is_valid_context(context_id)
        assert_works(working)


def gradients_of(context_id: int) -> int:
    return len(autograd.get_gradients(context_id))


def test_a_context_that_another_worker_does_not_know():
    with autograd.context() as context_id:
        there("a", weighted, leaf("driver.x"))
    with pytest.raises(errors.UnknownContextError, match="Could not find autograd context"):
        there("b", gradients_of, context_id)


def test_a_received_tensor_whose_context_is_gone():
    with autograd.context() as gone:
        h = there("a", weighted, leaf("driver.x"))
    with autograd.context() as context_id:
        # It can be used in any way but this:
        y = h * 2
        with pytest.raises(errors.UnknownContextError, match=rf"worker 'a'.*context {gone}, which has ended"):
            autograd.backward(context_id, [y.sum()])
        with pytest.raises(errors.UnknownContextError, match=f"context {gone}, which has ended"):
            autograd.grad(context_id, y.sum(), leaf("driver.x"))
        # A message that depends on it brings no context back either.
        z = there("b", weighted, y, "b.w")
        assert not autograd._is_valid_context(gone)
        with pytest.raises(errors.UnknownContextError, match="which has ended"):
            autograd.backward(context_id, [z.sum()])
        # detach() is what the error says to do.
        autograd.backward(context_id, [there("b", weighted, y.detach(), "b.w").sum()])
        found = gradients(context_id, ["b.w"])
        assert_same(found, expected((y.detach() * leaf("b.w")).sum(), ["b.w"]))
        assert not there("b", is_known_here, gone)


def is_known_here(context_id: int) -> bool:
    return autograd._is_valid_context(context_id)


_kept: dict[str, torch.Tensor] = {}


def keep(x: torch.Tensor) -> None:
    _kept["h"] = x * leaf("a.w")


def use_kept() -> torch.Tensor:
    return _kept["h"] * 2


def use_kept_detached() -> torch.Tensor:
    return _kept.pop("h").detach() * leaf("a.w")


def test_a_worker_that_kept_something_of_a_context_that_is_gone():
    #      gone:  driver: x ──▶ a: h = x * a.w  (kept)
    #      later:               a: h * 2 ──▶ driver: sum
    with autograd.context(wait=True):
        there("a", keep, leaf("driver.x"))
    with autograd.context() as context_id:
        y = there("a", use_kept)
        with pytest.raises(errors.UnknownContextError, match=r"which has ended.*detach\(\)"):
            autograd.backward(context_id, [y.sum()])
        autograd.backward(context_id, [there("a", use_kept_detached).sum()])
        found = gradients(context_id, ["a.w"])
    kept = (leaf("driver.x") * leaf("a.w")).detach()
    assert_same(found, expected((kept * leaf("a.w")).sum(), ["a.w"]))


# -- graphs ------------------------------------------------------------------------------------------------


def test_backward_twice_without_retain_graph():
    with autograd.context() as context_id:
        h = there("a", weighted, leaf("driver.x"))
        loss = (h * h).sum()
        autograd.backward(context_id, [loss])
        first = gradients(context_id, ["driver.x", "a.w"])
        with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
            autograd.backward(context_id, [loss])
        # What the first pass found is there, and nothing of the second.
        assert_same(gradients(context_id, ["driver.x", "a.w"]), first)


def test_backward_twice_where_only_another_workers_graph_is_gone():
    with autograd.context() as context_id:
        h = there("a", torch.sin, leaf("driver.x"))
        autograd.backward(context_id, [h.sum()])
        with pytest.raises(
            errors.BackwardError, match=r"Error on Node \d+: Trying to backward through.*worker 'a'"
        ) as caught:
            autograd.backward(context_id, [h.sum()])
        assert caught.value.worker == "a"
        assert caught.value.worker_id == rpc.get_worker_info("a").id
        assert isinstance(caught.value.__cause__, RuntimeError)
        assert_same(gradients(context_id, ["driver.x"]), expected(leaf("driver.x").sin().sum(), ["driver.x"]))
        with autograd.context() as another:
            assert_works(another)


def test_a_plain_backward_through_something_received():
    with autograd.context() as context_id:
        h = there("a", weighted, leaf("driver.x"))
        with pytest.raises(errors.GradientError, match=r"telegrad.autograd.backward\(context_id, \[loss\]\)"):
            h.sum().backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="appears to not have been used"):
            torch.autograd.grad(h.sum(), leaf("driver.x"), retain_graph=True)
        assert leaf("driver.x").grad is None
        assert_works(context_id)


def test_a_plain_grad_with_respect_to_something_received():
    """torch does not go beyond it."""
    with autograd.context() as context_id:
        h = there("a", weighted, leaf("driver.x"))
        (found,) = torch.autograd.grad((h * h).sum(), h)
        torch.testing.assert_close(found, 2 * h.detach())
        assert_works(context_id)


def test_a_plain_backward_on_another_worker():
    with autograd.context() as context_id:
        with pytest.raises(errors.GradientError, match="received from another worker"):
            there("a", plain_backward, leaf("driver.x"))
        assert_works(context_id)


def plain_backward(x: torch.Tensor) -> None:
    (x * 2).sum().backward()


def test_a_tensor_received_before_the_context_has_its_history():
    h = there("a", weighted, leaf("driver.x"))
    with autograd.context() as context_id:
        autograd.backward(context_id, [(h * 2).sum()])
        names = ["driver.x", "a.w"]
        assert_same(gradients(context_id, names), expected((weighted(leaf("driver.x")) * 2).sum(), names))


# -- backward inside of a running pass ---------------------------------------------------------------------


def test_backward_of_the_same_graph_inside_of_a_hook_of_something_received():
    """The pass that runs and the one inside are apart. Both end, and nothing hangs."""
    with autograd.context() as context_id:
        h = there("a", weighted, leaf("driver.x"))
        inner = there("b", weighted, leaf("driver.y"), "b.w").sum()

        def run_another(gradient: torch.Tensor) -> None:
            autograd.backward(context_id, [inner])

        h.register_hook(run_another)
        autograd.backward(context_id, [h.sum()])
        found = gradients(context_id, ["driver.x", "driver.y", "a.w", "b.w"])
    local = weighted(leaf("driver.x")).sum() + weighted(leaf("driver.y"), "b.w").sum()
    assert_same(found, expected(local, ["driver.x", "driver.y", "a.w", "b.w"]))


def with_backward_in_hook(x: torch.Tensor, context_id: int) -> torch.Tensor:
    y = x * leaf("a.w")
    other = there("b", weighted, leaf("a.v"), "b.w").sum()
    y.register_hook(lambda gradient: autograd.backward(context_id, [other]))
    return y * 1


def test_backward_inside_of_a_hook_on_another_worker():
    with autograd.context() as context_id:
        h = there("a", with_backward_in_hook, leaf("driver.x"), context_id)
        autograd.backward(context_id, [h.sum()])
        found = gradients(context_id, ["driver.x", "a.w", "a.v", "b.w"])
    local = weighted(leaf("driver.x")).sum() + weighted(leaf("a.v"), "b.w").sum()
    assert_same(found, expected(local, ["driver.x", "a.w", "a.v", "b.w"]))


def test_a_plain_backward_inside_of_a_hook():
    """It belongs to no pass: where it comes to something received it is an error, which fails the pass."""
    with autograd.context() as context_id:
        h = there("a", weighted, leaf("driver.x"))
        other = there("a", weighted, leaf("driver.y")).sum()
        h.register_hook(lambda gradient: other.backward())
        with pytest.raises(errors.BackwardError, match="received from another worker"):
            autograd.backward(context_id, [h.sum()])
        assert gradients(context_id, ["driver.x", "driver.y", "a.w"]) == dict.fromkeys(["driver.x", "driver.y", "a.w"])
        assert_works(context_id)


# -- grad() ------------------------------------------------------------------------------------------------


def test_grad_of_an_unused_input():
    unused = torch.ones(3, requires_grad=True)
    text = "One of the differentiated Tensors appears to not have been used in the graph. Set allow_unused=True if"
    with autograd.context() as context_id:
        loss = forward(there)
        with pytest.raises(errors.GradientError, match=text):
            autograd.grad(context_id, loss, [leaf("driver.x"), unused], retain_graph=True)
        found = autograd.grad(context_id, loss, [leaf("driver.x"), unused], allow_unused=True)
        torch.testing.assert_close(found[0], torch.autograd.grad(forward(here), leaf("driver.x"))[0])
        assert found[1] is None
        assert_works(context_id)


def test_grad_of_an_input_that_only_an_unused_message_leads_to():
    with autograd.context() as context_id:
        there("a", weighted, leaf("driver.y"))
        loss = forward(there)
        with pytest.raises(errors.GradientError, match="appears to not have been used in the graph"):
            autograd.grad(context_id, loss, leaf("driver.y"), retain_graph=True)
        assert autograd.grad(context_id, loss, leaf("driver.y"), allow_unused=True) == (None,)


def test_grad_of_an_input_that_does_not_require_grad():
    with autograd.context() as context_id:
        with pytest.raises(errors.GradientError, match="One of the differentiated Tensors does not require grad"):
            autograd.grad(context_id, forward(there), torch.ones(3))
        assert_works(context_id)


def test_grad_with_no_inputs():
    with autograd.context() as context_id:
        with pytest.raises(ValueError, match="`inputs` argument to `grad\\(\\)` cannot be empty"):
            autograd.grad(context_id, forward(there), [])
        assert_works(context_id)


# -- failures in the pass ----------------------------------------------------------------------------------


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("no gradient from me")


def failing(x: torch.Tensor) -> torch.Tensor:
    return Fails.apply(x * leaf("a.w"))


def test_an_error_in_a_pass_names_the_worker_and_keeps_its_type_and_traceback():
    with autograd.context() as context_id:
        h = there("b", weighted, there("a", failing, leaf("driver.x")), "b.w")
        node = rpc.get_worker_info("a").id
        text = rf"Error on Node {node}: no gradient from me \(worker 'a', in a backward pass\)"
        with pytest.raises(errors.BackwardError, match=text) as caught:
            autograd.backward(context_id, [h.sum()])
        assert isinstance(caught.value, RuntimeError)
        cause = caught.value.__cause__
        assert isinstance(cause, ValueError) and str(cause) == "no gradient from me"
        assert "in backward" in str(cause.__cause__) and "on worker 'a'" in str(cause.__cause__)
        # After a failed pass no worker shows partial sums.
        assert gradients(context_id, NAMES) == dict.fromkeys(NAMES)
        assert_works(context_id)


def test_after_an_error_grad_is_as_it_was():
    with autograd.context() as context_id:
        x = leaf("driver.x")
        loss = (there("a", failing, x) * there("b", weighted, x, "b.w")).sum()
        with pytest.raises(errors.BackwardError, match="no gradient from me"):
            autograd.backward(context_id, [loss], into="grad")
        assert grads(NAMES) == dict.fromkeys(NAMES)


def test_an_error_at_the_root():
    with autograd.context() as context_id:
        h = there("a", weighted, leaf("driver.x"))
        node = rpc.get_worker_info().id
        with pytest.raises(errors.BackwardError, match=f"Error on Node {node}: no gradient.*'driver'") as caught:
            autograd.backward(context_id, [Fails.apply(h).sum()])
        assert isinstance(caught.value.__cause__, ValueError)
        assert_works(context_id)


class WrongShape(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return torch.ones(7, dtype=torch.float64)


def of_wrong_shape(x: torch.Tensor) -> torch.Tensor:
    return WrongShape.apply(x)


def test_a_function_that_returns_a_gradient_of_the_wrong_shape():
    with pytest.raises(RuntimeError, match="returned an invalid gradient"):
        torch.autograd.grad(of_wrong_shape(leaf("driver.x")).sum(), leaf("driver.x"))
    with autograd.context() as context_id:
        h = there("a", of_wrong_shape, leaf("driver.x"))
        with pytest.raises(errors.BackwardError, match="returned an invalid gradient.*worker 'a'"):
            autograd.backward(context_id, [h.sum()])
        assert_works(context_id)


# -- messages that no worker would send --------------------------------------------------------------------


def too_few(gradients: tuple) -> tuple:
    return ()


def too_many(gradients: tuple) -> tuple:
    return (*gradients, *gradients)


def of_another_shape(gradients: tuple) -> tuple:
    return tuple(torch.ones(2, dtype=torch.float64) for _ in gradients)


def of_another_dtype(gradients: tuple) -> tuple:
    return tuple(gradient.float() for gradient in gradients)


ALTERATIONS = {f.__name__: f for f in (too_few, too_many, of_another_shape, of_another_dtype)}


def alter_gradients(name: str) -> None:
    """From now on, this worker sends other gradients than it should."""
    engine = current_worker().engine
    post = engine.host.post

    def altered(to: int, envelope: Any, body: Any, *rest: Any) -> None:
        if isinstance(body, Gradients):
            body = Gradients(ALTERATIONS[name](body.gradients))
        post(to, envelope, body, *rest)

    engine.host.post = altered


def stop_altering() -> None:
    current_worker().post = current_worker().calls.post


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("too_few", "0 gradients came for message"),
        ("too_many", "2 gradients came for message"),
        ("of_another_shape", r"has shape \(2,\) and dtype torch.float64; the tensor has shape \(3,\)"),
        ("of_another_dtype", "dtype torch.float32; the tensor has .* dtype torch.float64"),
    ],
)
def test_gradients_that_do_not_fit_are_refused_by_the_receiver(name, text):
    #      driver: x ───────▶ a: x * a.w (sends back something else) ───────▶ driver: sum
    with autograd.context() as context_id:
        loss = there("a", weighted, leaf("driver.x")).sum()
        there("a", alter_gradients, name)
        try:
            with pytest.raises(errors.BackwardError, match=text) as caught:
                autograd.backward(context_id, [loss])
        finally:
            there("a", stop_altering)
        assert caught.value.worker == "driver"
        assert gradients(context_id, NAMES) == dict.fromkeys(NAMES)
        assert_works(context_id)


def send_no_gradients() -> None:
    """From now on, this worker fails to send gradients: after it has told the root that its part is done."""
    engine = current_worker().engine
    post = engine.host.post

    def failing(to, envelope, body, *rest) -> None:
        if not isinstance(body, Gradients):
            return post(to, envelope, body, *rest)
        deadline = time.monotonic() + 1
        part = engine.parts.passes.get(envelope.autograd.during)
        while part.state is not State.REPORTED and time.monotonic() < deadline:
            threading.Event().wait(0.001)
        raise errors.EncodeError("made up")

    engine.host.post = failing


def send_gradients_again() -> None:
    current_worker().post = current_worker().calls.post


def tripled(x: torch.Tensor) -> torch.Tensor:
    return x * 3


def by_way_of_b(x: torch.Tensor) -> torch.Tensor:
    return there("b", tripled, x * 2) * 1


def test_large_gradients_that_cannot_be_sent():
    #      driver: x ──▶ a: x * 2 ──▶ b: * 3 ──▶ a ──▶ driver: sum
    x = torch.ones(20_000, dtype=torch.float64, requires_grad=True)
    with autograd.context() as context_id:
        loss = there("a", by_way_of_b, x).sum()
        there("b", send_no_gradients)
        try:
            with pytest.raises(errors.BackwardError, match="made up.*worker 'b'"):
                autograd.backward(context_id, [loss], timeout=5.0)
        finally:
            there("b", send_gradients_again)


def test_options_that_are_no_booleans():
    """A worker that got them as they are would end the connection."""
    for options in ({"retain_graph": 1}, {"create_graph": 1}):
        x = torch.ones(3, requires_grad=True)
        with autograd.context() as context_id:
            y = there("a", torch.sin, x).sum()
            autograd.backward(context_id, [y], **options)
            autograd.backward(context_id, [there("a", torch.sin, x).sum()])
        with autograd.context() as context_id:
            autograd.grad(context_id, there("a", torch.sin, x).sum(), x, **options)
    assert there("a", abs, -1) == 1
