"""Futures in a process where tensors on devices come and go. The meta device is one of them here: torch looks for
tensors in the value of a future that has a device, by pickling it."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import telegrad
from telegrad import rpc
from telegrad.primitives import current, futures
from telegrad.primitives.futures import Future

META = torch.device("meta", 0)


@pytest.fixture
def devices() -> Iterator[None]:
    futures.devices[:] = [META]
    yield
    futures.devices.clear()
    current.thread.used_devices = ()


@pytest.fixture
def cluster() -> Iterator[telegrad.LocalCluster]:
    with telegrad.LocalCluster(["a"], transport="inproc") as cluster:
        yield cluster


def nothing(*_: Any) -> None:
    pass


def make_local() -> Any:
    return [lambda: 7, type("Local", (), {"x": 8})]


@pytest.mark.usefixtures("devices", "cluster")
def test_results_that_plain_pickle_cannot_save() -> None:
    function, kind = rpc.rpc_async("a", make_local).wait()
    assert function() == 7
    assert kind.x == 8


@pytest.mark.usefixtures("devices", "cluster")
def test_handles_in_a_future_with_devices() -> None:
    rref = rpc.remote("a", list, args=((1, 2),))
    future = Future(nothing, nothing, [META])
    future.set_result([rref, torch.ones(2)])
    assert future.wait()[0] is rref
    with pytest.raises(RuntimeError, match="Can not pickle rref"):
        pickle.dumps(rref)


@pytest.mark.usefixtures("devices")
def test_only_calls_with_tensors_on_devices_have_such_futures(cluster: telegrad.LocalCluster) -> None:
    calls = cluster.worker.calls
    assert not rpc.rpc_async("a", abs, args=(-1,)).has_devices  # type: ignore[attr-defined]
    future = rpc.rpc_async("a", type, args=(torch.ones(2, device="meta"),))
    assert future.has_devices  # type: ignore[attr-defined]
    future.wait()
    calls._device_functions.add("abs")
    assert rpc.rpc_async("a", abs, args=(-1,)).has_devices  # type: ignore[attr-defined]


def test_an_answer_with_tensors_on_a_device_is_waited_for(
    cluster: telegrad.LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A future without devices is not done before they are there, and the next one of that function has some."""
    waited = []

    class Stream:
        def __init__(self, device: torch.device) -> None:
            self.device = device

        def synchronize(self) -> None:
            waited.append(self.device)

    monkeypatch.setattr(torch.accelerator, "current_stream", Stream)
    calls = cluster.worker.calls
    decode = cluster.worker.decode

    def decode_on_device(*args: Any) -> Any:
        current.thread.used_devices = (META,)
        return decode(*args)

    monkeypatch.setattr(cluster.worker, "decode", decode_on_device)
    assert rpc.rpc_async("a", abs, args=(-1,)).wait() == 1
    assert waited == [META]
    assert calls._device_functions == {"abs"}


def test_ctrl_c_while_an_answer_is_opened(cluster: telegrad.LocalCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The future fails; without that its next wait() would never end."""

    def interrupted(*_: Any) -> Any:
        monkeypatch.undo()
        raise KeyboardInterrupt

    future = rpc.rpc_async("a", abs, args=(-1,))
    other = rpc.rpc_async("a", abs, args=(-2,))
    monkeypatch.setattr(cluster.worker.calls, "_open_answer", interrupted)
    done = []
    for each in (future, other):
        try:
            done.append(each.wait(5.0))
        except (KeyboardInterrupt, telegrad.errors.RemoteError):
            done.append(None)
    assert sorted(map(str, done)) in (["1", "None"], ["2", "None"])
    for each in (future, other):
        assert each.done()
    assert rpc.rpc_sync("a", abs, args=(-3,)) == 3
