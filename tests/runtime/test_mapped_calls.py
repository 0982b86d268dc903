"""Calls, answers and gradients by device maps, without a GPU: torch's lazy device, which computes on the CPU, is a
device like any other for all that is tested here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch._lazy.ts_backend
from torch import nn

import telegrad
from telegrad import Options, autograd, errors, optim, rpc
from telegrad.gradients import devices as streams
from telegrad.messages import Kind
from telegrad.nn import RemoteModule
from telegrad.runtime import device_maps
from telegrad.serialization import devices, values

torch._lazy.ts_backend.init()
LAZY = "lazy:0"
DEVICES = ("cpu", LAZY)


@pytest.fixture(autouse=True)
def lazy_is_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_found", {LAZY})
    monkeypatch.setattr(device_maps, "_exist", lambda names, count: True)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: NoStream(device))
    monkeypatch.setattr(streams, "mark_used", lambda tensor: None)


class NoStream:
    """The lazy device has no streams: it computes when it is asked for a value."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def record_event(self) -> NoStream:
        return self

    def wait_event(self, event: object) -> None:
        pass

    def synchronize(self) -> None:
        pass


@contextmanager
def cluster(
    device_map: dict[str, str] | None, names: Sequence[str] = ("a",), **options: Any
) -> Iterator[telegrad.LocalCluster]:
    """Only the driver's calls to "a" have a map."""
    maps = {} if device_map is None else {"a": device_map}
    chosen = Options(device_maps=maps, rpc_timeout=20, **options)
    with telegrad.LocalCluster(names, transport="inproc", options=chosen) as found:
        yield found


def where(*values: Any) -> list[str]:
    return [str(value.device) for value in values]


def double(tensor: torch.Tensor, to: str) -> torch.Tensor:
    return tensor.to(to) * 2


@pytest.mark.parametrize(
    "device_map", [None, {}, {"cpu": LAZY}, {LAZY: "cpu"}, {"cpu": LAZY, LAZY: "cpu"}, {LAZY: LAZY}, {"cpu": "cpu"}]
)
def test_arguments_go_by_the_map_and_results_by_its_reverse(device_map: dict[str, str] | None) -> None:
    there = {device: (device_map or {}).get(device, device) for device in DEVICES}
    back = {device: device for device in DEVICES} | {target: here for here, target in (device_map or {}).items()}
    with cluster(device_map):
        for device in DEVICES:
            tensor = torch.arange(3.0).to(device)
            assert rpc.rpc_sync("a", where, args=(tensor,)) == [there[device]]
            for result in DEVICES:
                for found in (
                    rpc.rpc_sync("a", double, args=(tensor, result)),
                    rpc.rpc_async("a", double, args=(tensor, result)).wait(),
                    rpc.remote("a", double, args=(tensor, result)).to_here(),
                ):
                    assert str(found.device) == back[result]
                    assert found.cpu().tolist() == [0, 2, 4]


class Sub(torch.Tensor):
    pass


def kinds(device: str) -> list[Any]:
    large = torch.ones(40_000, device=device)
    return [
        torch.ones(2, device=device),
        large,
        large.view(200, 200).t(),
        nn.Parameter(torch.ones(2, device=device)),
        torch.ones(2, device=device).requires_grad_(),
        torch.ones(2).as_subclass(Sub) if device == "cpu" else torch.ones(0, device=device),
        torch.ones(2, dtype=torch.complex64, device=device).conj() if device == "cpu" else torch.ones(2, device=device),
    ]


@pytest.mark.parametrize("device_map", [{"cpu": LAZY}, {LAZY: "cpu"}])
def test_tensors_of_all_kinds_go_by_the_map(device_map: dict[str, str]) -> None:
    ((here, there),) = device_map.items()
    with cluster(device_map):
        for value in kinds(here):
            assert rpc.rpc_sync("a", where, args=(value,)) == [there]  # flat
            assert rpc.rpc_sync("a", nested, args=({"x": [value]},)) == there
            with autograd.context():
                assert rpc.rpc_sync("a", where, args=(value,)) == [there]
                assert rpc.rpc_sync("a", nested, args=({"x": [value]},)) == there


def nested(value: Any) -> str:
    return str(value["x"][0].device)


def test_parts_of_a_sparse_tensor_go_by_the_map(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lazy device has no sparse tensors: what its parts were told is looked at."""
    told: list[str | None] = []
    describe = values.reduce_tensor.__globals__["describe"]

    def watch(*args: Any) -> Any:
        description = describe(*args)
        if description is not None:
            told.append(description[-1])
        return description

    monkeypatch.setitem(values.reduce_tensor.__globals__, "describe", watch)
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.ones(2), (3,), check_invariants=True)
    with cluster({"cpu": LAZY}), pytest.raises(Exception, match="lazy|Lazy|Could not run"):
        rpc.rpc_sync("a", where, args=(sparse,))
    assert told[:2] == [LAZY, LAZY]


# -- without a map -------------------------------------------------------------------------------------------


def test_a_tensor_goes_to_the_cpu_where_the_peer_has_no_such_device(monkeypatch: pytest.MonkeyPatch) -> None:
    with cluster(None):
        monkeypatch.setattr(devices, "_found", set())
        tensor = torch.ones(2, device=LAZY)
        assert rpc.rpc_sync("a", where, args=(tensor,)) == ["cpu"]
        with autograd.context() as context_id:
            tensor.requires_grad_()
            autograd.backward(context_id, [rpc.rpc_sync("a", double, args=(tensor, "cpu")).sum()])
            gradient = autograd.get_gradients(context_id)[tensor]
            assert str(gradient.device) == LAZY
            assert gradient.tolist() == [2, 2]


REFUSAL = (
    "TensorPipe RPC backend only supports CPU tensors by default, please move your tensors to CPU before sending them "
    "over RPC, or call `set_device_map` on `TensorPipeRpcBackendOptions` to explicitly configure device mapping. "
)


def refused(function: Callable[..., Any], *args: Any) -> str:
    with pytest.raises(errors.EncodeError) as raised:
        function("a", args[0], args=args[1:])
    assert isinstance(raised.value, RuntimeError)
    return str(raised.value)


def test_strict_workers_refuse_with_torchs_words() -> None:
    tensor = torch.ones(2, device=LAZY)
    with cluster(None, strict_devices=True):
        for function in (rpc.rpc_sync, rpc.rpc_async, rpc.remote):
            for value in (tensor, [tensor], tensor.clone().requires_grad_()):
                expected = f"{REFUSAL}Request device mapping is not available for destination a, "
                assert refused(function, where, value) == expected + f"but found tensor on device: {LAZY}"
        text = refused(rpc.rpc_sync, double, torch.ones(2), LAZY)
        expected = f"{REFUSAL}Response device mapping is not available for destination driver, "
        assert text.endswith(expected + f"but found tensor on device: {LAZY}")
        assert rpc.rpc_sync("a", double, args=(torch.ones(2), "cpu")).tolist() == [2, 2]  # and it goes on
    with cluster({"cpu": "cpu"}, strict_devices=True):
        for function, which, to in ((where, "Request", "a"), (double, "Response", "driver")):
            text = refused(rpc.rpc_sync, function, *((tensor,) if function is where else (torch.ones(2), LAZY)))
            expected = f"{REFUSAL}{which} device mapping is not available for destination {to} for device {LAZY} but "
            assert text.endswith(expected + "received a tensor on that device.")


def test_a_strict_worker_sends_gradients_and_errors_of_any_device() -> None:
    with cluster({"cpu": LAZY}, strict_devices=True):
        x = torch.ones(2, requires_grad=True)
        with autograd.context() as context_id:
            autograd.backward(context_id, [rpc.rpc_sync("a", double, args=(x, LAZY)).sum()])
            assert autograd.get_gradients(context_id)[x].tolist() == [2, 2]
        with pytest.raises(ValueError, match="it has a tensor"):
            rpc.rpc_sync("a", fail_with_tensor)


def fail_with_tensor() -> None:
    raise ValueError("it has a tensor", torch.ones(2, device=LAZY))


# -- gradients -----------------------------------------------------------------------------------------------


def sines(count: int, *tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.sin() * number for tensor in tensors for number in range(1, count + 1)]


@pytest.mark.parametrize("size", [3, 40_000])
@pytest.mark.parametrize("device_map", [{"cpu": LAZY}, {LAZY: "cpu"}, {"cpu": LAZY, LAZY: "cpu"}])
def test_gradients_go_back_to_where_the_tensors_came_from(
    device_map: dict[str, str], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each arrives on the device of the tensor that was sent: none has to be moved again."""
    arrived: list[Any] = []
    with cluster(device_map) as found:
        for worker in found._in_process:

            def watch(envelope: Any, *args: Any, decode: Any = worker.decode) -> Any:
                body = decode(envelope, *args)
                if envelope.kind == Kind.GRADIENTS:
                    arrived.append((envelope.device_map, where(*body.gradients)))
                return body

            monkeypatch.setattr(worker, "decode", watch)
        leaves = [torch.linspace(0, 1, size).to(device).requires_grad_() for device in device_map]
        with autograd.context() as context_id:
            results = rpc.rpc_sync("a", sines, args=(2, *leaves))
            autograd.backward(context_id, [sum(result.sum().cpu() for result in results)])
            gradients = autograd.get_gradients(context_id)
            for leaf in leaves:
                assert gradients[leaf].device == leaf.device
                torch.testing.assert_close(gradients[leaf].cpu(), 3 * leaf.detach().cpu().cos())
    forth, back = arrived
    assert forth == (device_map, [device_map[str(leaf.device)] for leaf in leaves for _ in range(2)])
    assert back == ({there: here for here, there in device_map.items()}, where(*leaves))


def test_second_derivatives_by_a_map() -> None:
    with cluster({"cpu": LAZY}):
        x = torch.tensor([0.5, 1.0], requires_grad=True)
        with autograd.context() as context_id:
            (y,) = rpc.rpc_sync("a", sines, args=(1, x))
            (first,) = autograd.grad(context_id, [y.sum()], [x], create_graph=True)
            (second,) = autograd.grad(context_id, [first.sum()], [x])
        torch.testing.assert_close(first.detach(), x.detach().cos())
        torch.testing.assert_close(second, -x.detach().sin())


# -- modules -------------------------------------------------------------------------------------------------


def test_results_of_a_module_come_back_by_the_map() -> None:
    layer = nn.Linear(2, 2)
    x = torch.ones(1, 2)
    expected = layer(x)
    for device_map, came in (
        (None, "cpu"),
        ({LAZY: LAZY}, LAZY),
        ({"cpu": LAZY}, "cpu"),
    ):
        with cluster(device_map):
            there = RemoteModule.from_module(f"a/{LAZY}", layer)
            for found in (there(x), there.forward_async(x).wait()):
                assert str(found.device) == came
                torch.testing.assert_close(found.cpu(), expected)
            assert str(there(x.to(LAZY)).device) == ("cpu" if device_map == {"cpu": LAZY} else LAZY)
            with autograd.context() as context_id:
                autograd.backward(context_id, [there(x.requires_grad_()).sum().cpu()])
                torch.testing.assert_close(autograd.get_gradients(context_id)[x], layer.weight.detach().sum(0)[None])
            x = x.detach()
            assert [str(rref.to_here().device) for rref in there.parameters()]


@pytest.mark.parametrize("device_map", [None, {LAZY: LAZY}, {"cpu": LAZY}, {LAZY: "cpu"}])
def test_norms_of_owners_with_and_without_a_map_are_added_up(device_map: dict[str, str] | None) -> None:
    with cluster(device_map, names=["a", "b"]):
        rrefs = [rpc.remote(name, make_weight, args=(device,)) for name in "ab" for device in DEVICES]
        with autograd.context() as context_id:
            losses = [rref.rpc_sync().sum().cpu() for rref in rrefs]
            autograd.backward(context_id, losses)
            norm = optim.clip_grad_norm_(context_id, rrefs, 1.0)
            torch.testing.assert_close(norm, torch.tensor(4.0))  # the root of 4 times 4 ones
            again = optim.clip_grad_norm_(context_id, rrefs, 1.0)
            torch.testing.assert_close(again, torch.tensor(1.0))


def make_weight(device: str) -> nn.Parameter:
    return nn.Parameter(torch.zeros(4, device=device))


def test_garbage_in_a_map_of_a_peer_is_an_error_of_that_call() -> None:
    with cluster(None) as found:
        driver = found.worker
        object.__setattr__(driver.options, "device_maps", {"a": {"cpu": "no such device"}})
        with pytest.raises(errors.DecodeError, match="no such device"):
            rpc.rpc_sync("a", where, args=(torch.ones(1),))
        object.__setattr__(driver.options, "device_maps", {})
        assert rpc.rpc_sync("a", where, args=(torch.ones(1),)) == ["cpu"]
