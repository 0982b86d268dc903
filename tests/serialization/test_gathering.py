"""Messages of many tensors: those that are alike are described together, and those in nested values stand apart."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from ends import Link, arrived
from test_tensors import KINDS, SMALL, Tagged, assert_same
from torch import nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from telegrad.errors import EncodeError
from telegrad.messages import Call, Envelope, Gradients, Kind

pytestmark = pytest.mark.filterwarnings(
    "ignore:Sparse CSR tensor support",
    "ignore:torch.quantize_per_tensor",
    "ignore:The PyTorch API of nested",
    "ignore:ComplexHalf support",
    "ignore:`torch.jit.script` is deprecated",  # torch's forward mode uses it
)

MANY = 20


def tracked(link: Link, *args: Any) -> tuple[Any, list[torch.Tensor], list[torch.Tensor]]:
    """The arguments of a tracked call as they arrive, the tensors that were tracked, and what history is given to."""
    envelope, given = Envelope(Kind.CALL, 1 << 48), []
    packed = link.near.codec.pack(envelope, Call(print, args, None), link.far.hello, track=True)

    def attach(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        assert not any(tensor.requires_grad for tensor in tensors)
        given.extend(tensors)
        return [tensor.requires_grad_() * 1 for tensor in tensors]

    call = link.far.codec.decode(envelope, arrived(packed), attach)
    return call.args, list(packed.tracked), given


@pytest.mark.parametrize("kind", KINDS)
def test_many_of_every_kind(link, kind):
    sent = [KINDS[kind](SMALL) for _ in range(MANY)]
    (alone,) = link.carry(sent[0])
    for found in (link.carry(*sent), link.carry(sent)[0], [*link.carry({"x": sent})[0]["x"]]):
        for tensor, one in zip(found, sent, strict=True):
            assert_same(tensor, one)
            assert tensor.layout is not torch.strided or tensor.stride() == alone.stride()
        if kind in ("contiguous", "transposed", "scalar", "row", "expanded"):
            with torch.no_grad():
                found[1].fill_(-1)
            assert_same(found[0], sent[0])
            assert_same(found[2], sent[2])


@pytest.mark.parametrize("kind", ["leaf", "non-leaf", "transposed leaf", "leaf with conj", "sparse COO leaf"])
def test_many_that_are_tracked(link, kind):
    sent = [KINDS[kind](SMALL).detach().requires_grad_() for _ in range(MANY)]
    sent[7] = nn.Parameter(torch.ones(3))
    plain = [torch.full((3,), float(number)) for number in range(MANY)]
    pairs = list(zip(sent, plain, strict=True))
    (found, again), noted, given = tracked(link, pairs, sent[3])
    assert [id(tensor) for tensor in noted] == [id(tensor) for tensor in sent]
    assert again is found[3][0]
    for (tensor, other), one, same, at in zip(found, sent, plain, given, strict=True):
        assert tensor.grad_fn is not None
        assert_same(at.detach(), one.detach())
        assert torch.equal(other, same)
        assert not other.requires_grad
    found_flat, noted, given = tracked(link, *sent[:7], *plain)
    assert len(noted) == len(given) == 7
    assert torch.equal(found_flat[-1], plain[-1])


def test_histories_are_given_in_the_order_of_the_values(link):
    """Also where few are tracked, and the description of those that are alike comes first."""
    sent = [torch.full((2 + (number == 1),), float(number)).requires_grad_(number < 5) for number in range(12)]
    for args in (sent, [sent], [[sent[3], *sent[:3], *sent]]):
        _, noted, given = tracked(link, *args)
        assert [tensor[0].item() for tensor in given] == [tensor[0].item() for tensor in noted]
        assert len(noted) == 5


def test_what_differs_is_not_taken_for_alike(link):
    same, wide = torch.arange(6.0).reshape(2, 3), torch.rand(2, 1, 3, 3)
    sent: list[Any] = []
    for _ in range(6):
        sent += [same.clone(), same.reshape(3, 2).t(), same.double(), same.reshape(3, 2).clone(), torch.empty(0)]
        sent += [same.clone().requires_grad_(), torch.ones(()).expand(2, 3), torch.empty(2, 3, device="meta"), None, 7]
        sent += [
            wide.clone(),
            wide.to(memory_format=torch.channels_last),
            wide.clone().as_strided(wide.shape, (9, 5, 3, 1)),
        ]
    alone = [link.carry(value)[0] for value in sent]
    for found in (link.carry(*sent), link.carry(sent)[0]):
        for value, tensor, one in zip(found, sent, alone, strict=True):
            if isinstance(tensor, torch.Tensor):
                assert_same(value, tensor)
                assert value.stride() == one.stride()
            else:
                assert value == tensor


def test_each_has_memory_of_its_own(link):
    for found in (link.carry(*torch.ones(MANY, 100).unbind()), link.carry(list(torch.ones(MANY, 2, 50).unbind()))[0]):
        assert {tensor.untyped_storage().nbytes() for tensor in found} == {400}
        assert len({tensor.untyped_storage().data_ptr() for tensor in found}) == MANY
        assert all(tensor._base is None and tensor.data_ptr() % 16 == 0 for tensor in found)


def test_sharing_and_loops_around_many(link):
    tensors = [torch.full((2,), float(number)) for number in range(MANY)]
    shared = [tensors[1], tensors]
    shared.append(shared)
    found, again, one = link.carry(tensors, shared, tensors[2])
    assert again[1] is found
    assert again[0] is found[1]
    assert again[2] is again
    assert one is found[2]
    assert list(map(torch.equal, found, tensors)) == [True] * MANY
    flat = link.carry(*tensors, *tensors[5:])
    assert all(a is b for a, b in zip(flat[5:MANY], flat[MANY:], strict=True))


def test_classes_and_attributes_among_many(link):
    tagged = torch.ones(2).as_subclass(Tagged).requires_grad_()
    tagged.inner = torch.full((2,), 5.0, requires_grad=True)
    sent = [torch.full((2,), float(number), requires_grad=True) for number in range(MANY)]
    sent[3:5] = [tagged, nn.Parameter(torch.zeros(2))]
    (found, inner), noted, _ = tracked(link, sent, tagged.inner)
    assert noted[3] is tagged
    assert noted[4] is tagged.inner
    assert type(found[3]) is Tagged
    assert found[3].inner is inner
    assert isinstance(found[4], nn.Parameter)
    for tensor, one in zip(found, sent, strict=True):
        assert torch.equal(tensor.as_subclass(torch.Tensor), one.as_subclass(torch.Tensor))


class Scaled:
    """Makes tensors while it is pickled."""

    def __reduce__(self) -> Any:
        return list, ([torch.full((3,), float(number)) for number in range(MANY)],)


def test_tensors_that_live_only_while_they_are_pickled(link):
    found = link.carry([Scaled(), lambda: None, Scaled()])[0]  # the lambda has it pickled twice
    for tensors in (found[0], found[2]):
        assert [tensor[0].item() for tensor in tensors] == list(range(MANY))


def test_many_small_tensors_are_one_buffer(link):
    sent = list(torch.rand(1000, 64).unbind())
    for args, nbytes in ((sent, 256_000), ([sent], 253_440)):  # the first ten of nested ones are in the pickle
        _, frames = link.send(print, *args)
        assert [len(buffer) for buffer in frames.buffers[1:]] == [nbytes]
        found = link.carry(*args)
        assert torch.equal(torch.stack([*(found if len(found) > 1 else found[0])]), torch.stack(sent))
    _, frames = link.send(print, [*sent[:20], torch.ones(1 << 16), *sent[20:40]])
    assert [len(buffer) for buffer in frames.buffers[1:]] == [1 << 18]


class Refuses(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert "stack" not in str(function)
        return function(*args, **kwargs or {})


@pytest.mark.parametrize(
    "mode",
    [
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.device("meta"),
        torch.inference_mode,
        torch.no_grad,
        Refuses,
    ],
    ids=["autocast", "default device", "inference", "no grad", "dispatch"],
)
def test_modes_of_the_sender_and_the_receiver(link, mode: Callable[[], Any]):
    for dtype in (torch.float16, torch.float32, torch.int64):
        sent = [torch.full((2, 2), number).to(dtype) for number in range(MANY)]
        with mode():
            found = [*link.carry(*sent), *link.carry(sent)[0]]
        for tensor, one in zip(found, [*sent, *sent], strict=True):
            assert not tensor.is_inference()
            assert_same(tensor, one)
        weight = torch.ones((2, 2), requires_grad=True)
        assert dtype is not torch.float32 or found[0].mul_(weight).grad_fn is not None


def test_what_cannot_be_sent_among_many(link):
    plain = [torch.ones(3) for _ in range(MANY)]

    def send(x: torch.Tensor) -> torch.Tensor:
        link.carry([*plain, x])
        return x

    with pytest.raises(EncodeError, match="vmap"):
        torch.vmap(send)(torch.ones(2, 3))
    freed = torch.ones(3)
    freed.untyped_storage().resize_(0)
    for args in ([*plain, freed], [[*plain, freed]]):
        with pytest.raises(EncodeError, match=r"a tensor of shape \(3,\) has no memory"):
            link.carry(*args)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones(3, requires_grad=True), torch.ones(3))
        for args in ([*plain, dual], [[*plain, dual]], [[torch.ones(3, device="meta", requires_grad=True), dual]]):
            with pytest.raises(EncodeError, match="forward-mode tangent"):
                tracked(link, *args)


def test_nested_tensors_among_many(link):
    parts = torch.nested.nested_tensor([torch.ones(2), torch.zeros(3)])
    found = link.carry(*[torch.ones(3) for _ in range(MANY)], parts)
    assert [part.tolist() for part in found[-1].unbind()] == [[1, 1], [0, 0, 0]]


# -- what a tensor more costs ----------------------------------------------------------------------------


def per_tensor(count: Callable[[int], int]) -> float:
    return (count(2100) - count(100)) / 2000


@pytest.mark.parametrize("nested", [False, True])
def test_python_calls_for_a_tensor(link, nested):
    def calls(number: int) -> int:
        tensors = [torch.ones(64, requires_grad=True) for _ in range(number)]
        found = 0

        def count(frame: FrameType, event: str, arg: Any) -> None:
            nonlocal found
            found += event == "call"

        sys.setprofile(count)
        try:
            tracked(link, *([tensors] if nested else tensors))
        finally:
            sys.setprofile(None)
        return found

    # The pickler asks about each; two belong to `attach`.
    assert per_tensor(calls) <= 2 + nested


@pytest.mark.parametrize(
    "body",
    [lambda tensors: Gradients(tuple(tensors)), lambda tensors: Call(print, (tensors,), None)],
    ids=["flat", "nested"],
)
def test_objects_for_a_tensor(link, body):
    """Those that the garbage collector looks at, while a message is packed: what makes it run."""

    def objects(number: int) -> int:
        message = body([torch.ones(64) for _ in range(number)])
        envelope = Envelope(Kind.GRADIENTS if isinstance(message, Gradients) else Kind.CALL, 1 << 48)
        most = 0

        def watch(frame: FrameType, event: str, arg: Any) -> None:
            nonlocal most
            most = max(most, gc.get_count()[0])

        gc.collect()
        gc.disable()
        before = gc.get_count()[0]
        sys.setprofile(watch)
        try:
            link.near.codec.pack(envelope, message, link.far.hello)
        finally:
            sys.setprofile(None)
            gc.enable()
        return most - before

    assert per_tensor(objects) < 0.1
