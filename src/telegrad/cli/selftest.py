"""The test of `telegrad doctor`: two workers, a call, and a backward pass through both that must equal autograd's."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from .. import autograd, rpc
from ..cluster.local import LocalCluster
from ..errors import TelegradError
from .bench import FIGURES, median_time
from .checks import OK, SLOW, WRONG, Finding
from .output import duration

_TOPIC = "self-test"
_REPORT = "please report this, with telegrad doctor --json"


def self_test() -> Iterator[Finding]:
    began = time.perf_counter()
    try:
        with LocalCluster(["first", "second"], start_timeout=60.0) as cluster:
            yield Finding(_TOPIC, OK, f"two workers started in {time.perf_counter() - began:.1f} s")
            yield _calls(cluster)
            yield _gradients()
            if torch.cuda.is_available():
                yield _devices(cluster)
    except (TelegradError, OSError) as error:
        yield Finding(_TOPIC, WRONG, f"{type(error).__name__}: {error}", "docs/errors.md says what this error means")


def _calls(cluster: LocalCluster) -> Finding:
    for count in (16, 1 << 18):
        tensor = torch.arange(count, dtype=torch.float32)
        if not torch.equal(cluster.call("first", torch.add, tensor, 1), tensor + 1):
            return Finding(_TOPIC, WRONG, "a call gave a wrong result", _REPORT)
    took = median_time(rpc, autograd, "first", FIGURES[1])
    used = {c.transport: c for c in cluster.worker.statistics().connections.values()}
    told = f"a call takes {duration(took)}, over {', '.join(used)}"
    if "unix" not in used:
        return Finding(_TOPIC, SLOW, told, "workers of one machine should meet over unix sockets; see above")
    if not any(c.shared_bytes for c in used.values()):
        return Finding(_TOPIC, SLOW, f"{told}, with no shared memory for 1 MiB", "see memfd above")
    return Finding(_TOPIC, OK, f"{told} and shared memory")


def _devices(cluster: LocalCluster) -> Finding:
    tensor = torch.arange(1 << 18, dtype=torch.float32, device="cuda")
    for _ in range(3):  # the first goes through the host, and is answered with how the next may go
        if not torch.equal(cluster.call("first", torch.add, tensor, 1), tensor + 1):
            return Finding("GPU", WRONG, "a call with a tensor on a GPU gave a wrong result", _REPORT)
    used = cluster.worker.statistics().connections.values()
    if any(c.device_bytes_out and c.device_bytes_in for c in used):
        return Finding("GPU", OK, "tensors on a GPU go from worker to worker by device memory")
    why = next((c.device_refusal for c in used if c.device_refusal), "the other worker has not answered the offer")
    remedy = "both workers must see the GPU, and each other's processes: in containers --ipc=host and --pid=host"
    return Finding("GPU", SLOW, f"tensors on a GPU go through the host: {why}", remedy)


def layer(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Runs on a worker."""
    return (x @ weight).tanh()


def _gradients() -> Finding:
    random = torch.Generator().manual_seed(0)
    x, first, second = (torch.randn(8, 8, generator=random, dtype=torch.float64) for _ in range(3))
    weights = [first.requires_grad_(), second.requires_grad_()]
    with autograd.context() as context_id:
        hidden = rpc.rpc_sync("first", layer, (x, weights[0]))
        autograd.backward(context_id, [rpc.rpc_sync("second", layer, (hidden, weights[1])).sum()])
        distributed = autograd.get_gradients(context_id)
    local = torch.autograd.grad(layer(layer(x, weights[0]), weights[1]).sum(), weights)
    worst = max(
        float((distributed[w] - g).abs().max()) if w in distributed else float("inf")
        for w, g in zip(weights, local, strict=True)
    )
    told = f"gradients through both differ from local autograd's by {worst:.1g} at most"
    return Finding(_TOPIC, WRONG, told, _REPORT) if worst > 1e-12 else Finding(_TOPIC, OK, told)
