"""Every kind of tensor through the codec: flat and nested, small and beside the pickle."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from telegrad import rpc

SMALL, LARGE = 6, 256  # the larger has over 64 KiB in every dtype that is one byte or more

pytestmark = pytest.mark.filterwarnings(
    "ignore:Sparse CSR tensor support",
    "ignore:torch.quantize_per_tensor",
    "ignore:The PyTorch API of nested",
    "ignore:ComplexHalf support",
)


def numbers(n: int) -> torch.Tensor:
    return torch.arange(float(n * n)).reshape(n, n)


def conj(n: int) -> torch.Tensor:
    return torch.complex(numbers(n), numbers(n) + 1).conj()


def non_leaf(n: int) -> torch.Tensor:
    return numbers(n).requires_grad_() * 2


KINDS: dict[str, Callable[[int], torch.Tensor]] = {
    "contiguous": numbers,
    "transposed": lambda n: numbers(n).t(),
    "permuted": lambda n: torch.arange(float(2 * n * n)).reshape(2, n, n).permute(2, 0, 1),
    "strided": lambda n: numbers(2 * n)[::2, ::2],
    "view": lambda n: numbers(2 * n)[n:],
    "row": lambda n: numbers(n)[1],
    "column": lambda n: numbers(n)[:, 1],
    "expanded": lambda n: torch.arange(float(n)).reshape(n, 1).expand(n, n),
    "channels_last": lambda n: torch.rand(2, 3, n, n).contiguous(memory_format=torch.channels_last),
    "scalar": lambda n: torch.tensor(float(n)),
    "scalar of a view": lambda n: numbers(n)[2, 3],
    "zero-size": lambda n: torch.empty(n, 0, 3),
    "zero-size vector": lambda n: torch.empty(0),
    "one element": lambda n: torch.tensor([[[float(n)]]]),
    "complex": lambda n: torch.complex(numbers(n), numbers(n)),
    "conj": conj,
    "conj, transposed": lambda n: conj(n).t(),
    "neg": lambda n: conj(n).imag,
    "conj and neg": lambda n: torch._neg_view(conj(n)),
    "bool": lambda n: numbers(n) % 2 == 0,
    "leaf": lambda n: numbers(n).requires_grad_(),
    "non-leaf": non_leaf,
    "transposed leaf": lambda n: numbers(n).t().requires_grad_(),
    "leaf with conj": lambda n: conj(n).detach().requires_grad_(),
    "sparse COO": lambda n: torch.eye(n).to_sparse(),
    "sparse COO, not coalesced": lambda n: torch.sparse_coo_tensor(
        [[0, 0], [1, 1]], [1.0, 2.0], (n, n), check_invariants=True
    ),
    "hybrid COO": lambda n: torch.eye(n).to_sparse(1),
    "sparse COO leaf": lambda n: torch.eye(n).to_sparse().requires_grad_(),
    "sparse CSR": lambda n: torch.eye(n).to_sparse_csr(),
    "sparse CSC": lambda n: torch.eye(n).to_sparse_csc(),
    "sparse BSR": lambda n: torch.eye(n).to_sparse_bsr((2, 2)),
    "sparse BSC": lambda n: torch.eye(n).to_sparse_bsc((2, 2)),
    "empty sparse": lambda n: torch.zeros(n, n).to_sparse(),
    "meta": lambda n: torch.empty(n, n, device="meta").t(),
    "quantized": lambda n: torch.quantize_per_tensor(numbers(n), 0.5, 3, torch.qint8),
    "quantized by channel": lambda n: torch.quantize_per_channel(
        numbers(n), torch.arange(1.0, n + 1), torch.arange(n), 0, torch.quint8
    ),
}
for dtype in (
    torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8,
    torch.uint16, torch.uint32, torch.uint64, torch.complex32, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu,
):  # fmt: skip
    KINDS[str(dtype)] = lambda n, dtype=dtype: numbers(n).to(dtype)


def assert_same(found: Any, sent: torch.Tensor) -> None:
    assert type(found) is type(sent)
    for attribute in ("dtype", "shape", "layout", "device", "requires_grad"):
        assert getattr(found, attribute) == getattr(sent, attribute), attribute
    if sent.is_meta:
        assert found.stride() == sent.stride()
        return
    if sent.layout is not torch.strided:
        assert sent.layout is not torch.sparse_coo or found.is_coalesced() == sent.is_coalesced()
        assert torch.equal(found.to_dense(), sent.to_dense())
        return
    assert (found.is_conj(), found.is_neg()) == (sent.is_conj(), sent.is_neg())
    if sent.is_quantized:
        assert torch.equal(found, sent)
        found, sent = found.int_repr(), sent.int_repr()
    assert same_bytes(found, sent)


def same_bytes(found: torch.Tensor, sent: torch.Tensor) -> bool:
    """Whatever can be done with the dtype; NaN is the same as NaN."""
    found, sent = found.detach().resolve_conj().resolve_neg(), sent.detach().resolve_conj().resolve_neg()
    return torch.equal(
        found.contiguous().reshape(-1).view(torch.uint8), sent.contiguous().reshape(-1).view(torch.uint8)
    )


@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind(link, kind, size):
    tensor = KINDS[kind](size)
    (flat,) = link.carry(tensor)
    (nested,) = link.carry({"inside": [tensor]})
    assert_same(flat, tensor)
    assert_same(nested["inside"][0], tensor)


def test_what_is_expanded_is_sent_once(link):
    row = torch.arange(4.0)
    for tensor in (row.expand(100_000, 4), torch.ones(()).expand(300_000), row[::2].expand(50_000, 2)):
        _, frames = link.send(print, tensor)
        assert len(frames.buffers) == 1
        assert len(frames.buffers[0]) < 400
        (arrived,) = link.carry(tensor)
        assert torch.equal(arrived, tensor)
        assert arrived.stride()[0] == 0


def test_what_is_expanded_and_small_is_sent_packed(link):
    """To take it apart would cost more than its bytes do. Gradients of sums are like this."""
    row = torch.arange(4.0)
    for tensor in (row.expand(3, 4), torch.ones(()).expand(300), row[::2].expand(5, 2), torch.ones(1, 0).expand(3, 0)):
        (arrived,) = link.carry(tensor)
        assert torch.equal(arrived, tensor)
        assert arrived.is_contiguous()
        arrived.add_(1)  # each element is there, and its own
        assert torch.equal(arrived, tensor + 1)


@pytest.mark.parametrize("kind", ["contiguous", "transposed", "strided", "channels_last", "conj", "bool"])
def test_large_memory_goes_beside_the_pickle(link, kind):
    tensor = KINDS[kind](LARGE)
    for values in ((tensor,), ([tensor],)):
        _, frames = link.send(print, *values)
        assert [len(frames.buffers[0]) < 400, len(frames.buffers[1])] == [True, tensor.nbytes]


def test_dense_memory_keeps_its_order(link):
    for tensor in (numbers(SMALL).t(), KINDS["channels_last"](SMALL), KINDS["permuted"](SMALL)):
        (found,) = link.carry(tensor)
        assert found.stride() == tensor.stride()


# -- what arrives belongs to the receiver ----------------------------------------------------------------


@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["small", "large"])
def test_received_tensors_are_private_and_writable(link, size):
    tensor = numbers(size)
    (found,) = link.carry(tensor)
    before = tensor.clone()
    found.fill_(-1)
    assert torch.equal(tensor, before)
    (found,) = link.carry(tensor)
    tensor.fill_(-1)
    assert torch.equal(found, before)


def double(x: torch.Tensor) -> torch.Tensor:
    x.mul_(2)
    return x


SEEN: list[torch.Tensor] = []


def keep(x: torch.Tensor) -> torch.Tensor:
    SEEN.append(x)
    return x


def kept() -> torch.Tensor:
    return SEEN.pop()


@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["small", "large"])
def test_privacy_in_both_directions(cluster, size):
    x = numbers(size)
    original = x.clone()
    assert torch.equal(rpc.rpc_sync("a", double, args=(x,)), original * 2)
    assert torch.equal(x, original)
    echo = rpc.rpc_sync("a", keep, args=(x,))
    x.zero_()
    echo.zero_()
    assert torch.equal(rpc.rpc_sync("a", kept), original)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("kind", ["contiguous", "transposed", "row", "neg", "scalar"])
def test_what_is_received_without_grad_can_be_used_with_it(link, kind, mode):
    # torch forbids to change a view that was made in no_grad, and to save an inference tensor.
    with mode():
        (found,) = link.carry(KINDS[kind](SMALL))
        (nested,) = link.carry([KINDS[kind](SMALL)])
    weight = torch.ones_like(found, requires_grad=True)
    for tensor in (found, nested[0]):
        assert not tensor.is_inference()
        (tensor.clone() * weight).sum().backward()
        assert tensor.mul_(weight).grad_fn is not None


def test_the_same_tensor_arrives_as_one(link):
    x, y = numbers(SMALL), numbers(LARGE)
    a, b, c, d = link.carry(x, y, x, y)
    assert a is c
    assert b is d
    a, b = link.carry([x], {"x": x})
    assert a[0] is b["x"]
    a, b = link.carry(x, y=x)
    assert a is b
    a, b = link.carry(x, x.clone())
    assert a is not b
    assert not torch._C._is_alias_of(a, b)


def test_tensors_do_not_follow_the_default_device(link):
    with torch.device("meta"):
        for tensor in link.carry(torch.zeros(2, device="cpu"), torch.empty(0, device="cpu")):
            assert tensor.device.type == "cpu"


def test_a_tensor_that_cannot_be_read_is_an_error(link):
    from telegrad.errors import EncodeError

    def send(x: torch.Tensor) -> torch.Tensor:
        link.carry(x)
        return x

    with pytest.raises(EncodeError):
        torch.vmap(send)(torch.ones(3))


# -- tensors with more to them ---------------------------------------------------------------------------


class Tagged(torch.Tensor):
    """A subclass with attributes."""


class Slotted(torch.Tensor):
    __slots__ = ("unit",)


class Wary(torch.Tensor):
    """A subclass that wants to know of everything that is done to it."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if getattr(function, "__name__", "") in ("detach", "__get__"):
            raise AssertionError("taken apart without care")
        return super().__torch_function__(function, types, args, kwargs or {})


class OwnWay(torch.Tensor):
    """A subclass with its own idea of how it is pickled."""

    def __reduce_ex__(self, protocol):
        return rebuild_own_way, (self.sum().item(),)


def rebuild_own_way(total):
    return torch.full((1,), total).as_subclass(OwnWay)


class Gain(nn.Parameter):
    """A subclass of Parameter."""


class Pair(torch.Tensor):
    """A wrapper of two tensors that has no memory of its own."""

    @staticmethod
    def __new__(cls, a, b):
        return torch.Tensor._make_wrapper_subclass(cls, a.shape, dtype=a.dtype)

    def __init__(self, a, b):
        self.a, self.b = a, b

    def __tensor_flatten__(self):
        return ["a", "b"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, shape, stride):
        return Pair(inner["a"], inner["b"])

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        if function is torch.ops.aten.detach.default:
            return Pair(args[0].a.detach(), args[0].b.detach())
        raise NotImplementedError(function)


@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["small", "large"])
def test_parameters(link, size):
    parameter = nn.Parameter(numbers(size))
    parameter.tag = "a tag"
    frozen = nn.Parameter(torch.arange(size), requires_grad=False)
    found, still_frozen, inner = link.carry(parameter, frozen, [parameter])
    assert_same(found, parameter)
    assert_same(still_frozen, frozen)
    assert found.tag == "a tag"
    assert inner[0] is found
    with torch.no_grad():
        found.add_(1)
    assert torch.equal(parameter, numbers(size))


@pytest.mark.parametrize("kind", [Tagged, Slotted, Wary, Gain])
@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["small", "large"])
def test_subclasses(link, kind, size):
    tensor = torch.Tensor._make_subclass(kind, numbers(size).t(), True)
    tensor.unit = "m"
    (found,) = link.carry(tensor)
    assert type(found) is kind
    assert found.unit == "m"
    with torch._C.DisableTorchFunctionSubclass():
        assert found.requires_grad
        assert torch.equal(found.as_subclass(torch.Tensor), numbers(size).t())


def test_a_subclass_may_have_its_own_way(link):
    (found,) = link.carry(torch.ones(4).as_subclass(OwnWay))
    assert type(found) is OwnWay
    assert found.tolist() == [4.0]


def test_uninitialized_parameters(link):
    (found,) = link.carry(nn.LazyLinear(3))
    assert isinstance(found.weight, nn.UninitializedParameter)


@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("requires_grad", [True, False])
def test_wrapper_subclasses(link, size, requires_grad):
    pair = Pair(numbers(size), numbers(size).t()).requires_grad_(requires_grad)
    (found,) = link.carry(pair)
    assert type(found) is Pair
    assert torch.equal(found.a, pair.a)
    assert torch.equal(found.b, pair.b)
    assert found.requires_grad == requires_grad


def test_nested_tensors(link):
    parts = [torch.ones(2), torch.zeros(3)]
    for layout in (torch.jagged, torch.strided):
        (found,) = link.carry(torch.nested.nested_tensor(parts, layout=layout))
        assert found.layout is layout
        assert [p.tolist() for p in found.unbind()] == [p.tolist() for p in parts]


def test_attributes_of_plain_tensors(link):
    buffer = nn.Buffer(numbers(SMALL))
    sparse = torch.eye(3).to_sparse()
    sparse.tag = 1
    sparse_parameter = nn.Parameter(sparse)
    found, inner, found_sparse, found_parameter = link.carry(buffer, [buffer], sparse, sparse_parameter)
    assert isinstance(found, nn.Buffer)
    assert inner[0] is found
    assert found_sparse.tag == 1
    assert_same(found_parameter, sparse_parameter)


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    more: dict[str, torch.Tensor]


@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["small", "large"])
def test_tensors_inside_of_things(link, size):
    model = nn.Sequential(nn.Linear(size, size), nn.BatchNorm1d(size))
    batch = Batch(numbers(size), {"weight": model[0].weight})
    found_model, found_batch = link.carry(model, batch)
    assert isinstance(found_batch, Batch)
    assert torch.equal(found_batch.x, batch.x)
    assert found_batch.more["weight"] is found_model[0].weight
    for (name, value), (found_name, found_value) in zip(
        model.state_dict().items(), found_model.state_dict().items(), strict=True
    ):
        assert name == found_name
        assert torch.equal(value, found_value)
    x = torch.rand(4, size)
    assert torch.equal(copy.deepcopy(model)(x), found_model(x))


@pytest.mark.parametrize("kind", ["contiguous", "transposed", "conj", "sparse COO", "sparse CSR", "leaf"])
@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["small", "large"])
def test_kinds_over_a_cluster(cluster, kind, size):
    tensor = KINDS[kind](size)
    for found in (cluster.call("a", keep, tensor), cluster.call("a", list, [tensor])[0]):
        assert_same(found, tensor)
