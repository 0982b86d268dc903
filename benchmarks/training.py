"""The suite `training`: handles to remote values, the optimizer over several owners, and a training step of an RNN
whose embedding table and decoder are remote. `models.py` has what the owners run."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.figures import Figure, Repeats, Session, Setting, Suite
from benchmarks.models import WORDS, RemoteRNN, make_parameters, negated, total
from benchmarks.sampling import timed

OWNERS = 4
TENSORS = 25
SIZE = 64  # elements of each


def time_remote(session: Session) -> list[float]:
    """One sample: a value is made there, and fetched."""
    rpc, peer = session.backend.rpc, session.peer
    small = torch.arange(16.0)

    def call() -> Tensor:
        return rpc.remote(peer, negated, args=(small,)).to_here()  # type: ignore[no-any-return]

    assert torch.equal(call(), -small)
    return timed(call, session.repeats)


def time_optimizer(session: Session) -> list[float]:
    """One sample: a step with gradients that are there already."""
    rpc, autograd = session.backend.rpc, session.backend.autograd
    handles = [
        handle for peer in session.peers for handle in rpc.remote(peer, make_parameters, args=(TENSORS, SIZE)).to_here()
    ]
    optimizer = session.backend.optim.DistributedOptimizer(torch.optim.SGD, handles, lr=1e-3)
    by_owner = [handles[n : n + TENSORS] for n in range(0, len(handles), TENSORS)]

    with autograd.context() as context_id:
        futures = [rpc.rpc_async(p, total, args=(own,)) for p, own in zip(session.peers, by_owner, strict=True)]
        autograd.backward(context_id, [torch.stack([future.wait() for future in futures]).sum()])
        before = handles[-1].to_here()
        optimizer.step(context_id)
        after = handles[-1].to_here()
        torch.testing.assert_close(after, before - 2e-3 * before)  # the gradient of a sum of squares
        return timed(partial(optimizer.step, context_id), session.repeats)


def time_rnn(session: Session) -> list[float]:
    """One sample: context, forward, backward and the optimizer's step."""
    backend = session.backend
    torch.manual_seed(0)
    model = RemoteRNN(backend.rpc, session.peer)
    optimizer = backend.optim.DistributedOptimizer(torch.optim.SGD, model.handles(), lr=0.05)
    words = torch.randint(WORDS, (10, 4))
    targets = words.roll(-1, 0).flatten()

    def step() -> float:
        with backend.autograd.context() as context_id:
            loss = nn.functional.cross_entropy(model(words).flatten(0, 1), targets)
            backend.autograd.backward(context_id, [loss])
            optimizer.step(context_id)
            return loss.item()

    first = step()
    samples = timed(step, session.repeats)
    if session.repeats.count > 20 and not step() < first:
        raise AssertionError(f"{backend.name} did not learn")
    return samples


FIGURES = (
    Figure(
        name="remote",
        title="remote + to_here of 64 bytes",
        measure=time_remote,
        repeats=Repeats(count=1000, warmup=100),
        goal=0.30,
    ),
    Figure(
        name="optimizer",
        title=f"optimizer step, {OWNERS} owners with {TENSORS} tensors each",
        measure=time_optimizer,
        repeats=Repeats(count=200, warmup=20),
        setting=Setting(workers=OWNERS + 1),
        unit="ms",
        goal=0.40,
    ),
    Figure(
        name="rnn",
        title="a training step of an RNN with a remote embedding and decoder",
        measure=time_rnn,
        repeats=Repeats(count=150, warmup=20),
        unit="ms",
        goal=0.50,
    ),
)

SUITE = Suite(
    name="training",
    title="Handles, optimizer and a training step: telegrad and torch.distributed",
    figures=FIGURES,
    remarks=(
        "All processes run on one host, started afresh for each round of each backend, with one torch thread each. "
        "Both sides run the same program.",
        f"The optimizer is SGD; each tensor has {SIZE} elements. The RNN is an LSTM of 2 layers with 32 units, over "
        "10 words in 4 sequences.",
    ),
)
