"""Messages that meet the end of their context, on their way out and on their way in: nothing of it stays."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest
import torch

from telegrad import errors
from telegrad.gradients.attach import Attach
from telegrad.gradients.contexts import Context, Contexts
from telegrad.messages import Autograd, Envelope, Hello, Kind, LogEntry


@dataclass(eq=False)
class Link:
    peer: Hello


class Worker:
    """As much of a worker as messages need: what becomes of a context when they meet its end."""

    def __init__(self) -> None:
        self.new_id = itertools.count(1 << 48).__next__
        self.contexts = Contexts(1, self.new_id)
        self.attach = Attach(1, self.contexts, self.new_id)

    def end_before(self, what: str, context: Context) -> None:
        """Another thread ends the context just before the log takes something over."""
        function = getattr(self.contexts.log, what)

        def late(*args):
            self.contexts.take_out(context.id)
            return function(*args)

        setattr(self.contexts.log, what, late)


def test_a_context_that_ends_before_its_message_is_attached():
    worker = Worker()
    context = worker.contexts.new()
    worker.contexts.take_out(context.id)
    envelope = Envelope(Kind.CALL, worker.new_id())
    worker.attach.outgoing(context, envelope, [], "wire", 2)
    assert envelope.autograd is None, "its receiver would make a context of which nobody tells it the end"
    with pytest.raises(errors.UnknownContextError, match=f"context {context.id} has 1 tensors that require grad"):
        worker.attach.outgoing(context, envelope, [torch.ones(3, requires_grad=True)], "wire", 2)
    assert len(worker.contexts.log) == 0


def test_a_context_that_ends_while_its_message_is_attached():
    worker = Worker()
    context = worker.contexts.new()
    worker.end_before("merge", context)
    envelope = Envelope(Kind.CALL, worker.new_id())
    with pytest.raises(errors.UnknownContextError, match="the context has ended on this worker"):
        worker.attach.outgoing(context, envelope, [torch.ones(3, requires_grad=True) * 2], "wire", 2)
    assert len(worker.contexts.log) == 0
    assert not context.sends


def test_a_context_that_ends_while_its_message_is_read():
    worker = Worker()
    context = worker.contexts.new()
    worker.end_before("merge", context)
    message = (2 << 48) + 1
    said = Autograd(context.id, (LogEntry(message, context.id, ()),))
    worker.attach.merge(Envelope(Kind.REPLY, message, autograd=said), Link(Hello("g", 2, "peer")))
    assert len(worker.contexts.log) == 0
