"""Tests that fail today. pytest does not collect this file by itself; run it by its name."""

from __future__ import annotations

import torch
from test_leaves import Gives, capture_backward

# -- leaves: every gradient is copied, since an argument of the call in which references are counted is one more ----


def test_a_gradient_that_nobody_else_holds_is_kept_without_a_copy():
    addresses = []

    def make(gradient):
        made = torch.full((1000,), 3.0)
        addresses.append(made.data_ptr())
        return made

    weight = torch.ones(1000, requires_grad=True)
    table = capture_backward(Gives.apply(weight, make).sum(), [weight])
    assert table.get(weight).data_ptr() == addresses[0]
    # As in torch.
    Gives.apply(weight, make).sum().backward()
    assert weight.grad.data_ptr() == addresses[1]


def test_a_gradient_that_torch_has_made_is_kept_without_a_copy():
    addresses = []
    weight = torch.ones(1000, requires_grad=True)
    weight.register_hook(lambda gradient: addresses.append(gradient.data_ptr()))
    table = capture_backward((weight * weight).sum(), [weight])
    assert table.get(weight).data_ptr() == addresses[0]
