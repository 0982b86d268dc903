"""Values to bytes and back. They are pickled in the first of these ways that can:

    flat      each value is plain or a tensor; tensors' metadata lies beside the values
    nested    any picklable values, with tensors wherever they are
    by value  the same, made by cloudpickle, for what the callee cannot import (see by_value.py)

Nested, most tensors stand apart: they are sent ahead of the values, as flat ones, and the pickle of the values says
only where the next one belongs. In a message that is tracked (one sent in a context), all that require grad do, and get
their history before the values are rebuilt.
"""

from __future__ import annotations

import io
import operator
import pickle
import struct
import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from .._torch import DisableTorchFunctionSubclass, dual_level, tree_leaves
from ..errors import DecodeError, EncodeError, text_of
from ..options import SHARED_MEMORY_FROM
from ..primitives import current
from ..primitives.interrupts import interruptible, is_interrupt
from ..transport.base import Buffer, Frames
from .by_value import ByValuePickler, Dependencies
from .by_value_cache import Definitions
from .gathering import gather, rebuild_gathered
from .handles import Handle
from .namespaces import Namespaces, is_by_value, is_definition, module_attribute
from .pickling_state import MANY, Outgoing, unpickling
from .severed import IN_DEFINITION
from .tensors import (
    FLAGS,
    NEXT_TENSOR,
    REQUIRES_GRAD,
    attributes_of,
    describe,
    rebuild,
    reduce_severed,
    reduce_tensor,
    reduce_tracked,
)
from .torch_objects import is_named_by_torch, reduce_named_by_torch
from .transforms import refuse_dual

# Gives received tensors their history, and small ones memory of their own.
Attach = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]

_FLAT = 1  # the first byte of flat values; a pickle's is 0x80
_FLAT_BYTE = b"\x01"
_APART = 2  # the first byte where tensors come before the values
_APART_HEAD = struct.Struct("<BIQ")  # that, the buffers of the values, the length of the tensors' pickle
_PLAIN = frozenset((type(None), bool, int, float, complex, str, bytes))


class _ByValueError(Exception):
    """Something in the message must go by value."""


def check_bare(values: Any, message: Outgoing) -> None:
    """Refuses tensors that are sent by themselves and in a module: their gradients would come back or not, depending
    on which of the two the receiver uses.

    Raises:
        EncodeError: there is one.
    """
    in_modules = message.in_modules or ()
    for value in (*tree_leaves(values), *(message.tracked or ())):
        if isinstance(value, torch.Tensor) and value.requires_grad and id(value) in in_modules:
            raise EncodeError(
                f"a tensor of shape {tuple(value.shape)} that requires grad is sent by itself, and also in a module. "
                "Modules go by value, and no gradients come back from them. Send one of the two, or detach() the tensor"
            )


class Values:
    """Pickles and unpickles values, for one worker."""

    def __init__(self, worker_id: int) -> None:
        self.namespaces = Namespaces(worker_id)
        self.definitions = Definitions(self.namespaces, self._dump_definition)
        # Asks a worker for a definition of its `__main__`, until a deadline.
        self.ask_for: Callable[[int, str, float | None], bytes | None] = lambda *_: None
        self.handle: Callable[[int, int], Any] = _no_handle  # the worker, and its entry for a handle that came

    # -- pickling --------------------------------------------------------------------------------------

    def dump(self, values: Sequence[Any], message: Outgoing, *, apart: bool = False) -> tuple[bytes, Sequence[Buffer]]:
        """Values as a pickle, and the large memory beside it. `apart`: they are the tensors that stand apart; the
        pickle is empty if they cannot be flat.

        Flat are (the values with None for tensors, {position: tensor's description}). A tensor that is there more than
        once is described once, and then by its first position. Tensors that are alike have one description, by all
        their positions.
        """
        others: list[Any] | None = None
        tensors: dict[Any, Any] = {}
        positions: Collection[int]
        if apart:
            others, positions = [None] * len(values), range(len(values))
        else:
            for position, value in enumerate(values):
                kind = type(value)
                if kind is torch.Tensor and attributes_of(value) is None:
                    if others is None:
                        others = list(values)
                        seen: dict[int, int] = {}
                    others[position] = None
                    if (first := seen.setdefault(id(value), position)) != position:
                        tensors[position] = first
                elif kind not in _PLAIN:
                    return self._dump_nested(values, message)
            if others is None:
                return _FLAT_BYTE + pickle.dumps((values, None), 5), ()
            positions = seen.values()
        left = positions if len(positions) <= MANY else gather(values, positions, tensors, message)
        for position in left:
            description = describe(values[position], message)
            if description is None:  # it has more to it than plain memory
                return (b"", ()) if apart else self._dump_nested(values, message)
            tensors[position] = description
        if message.tracked is not None:
            for position in positions:  # a comprehension would be a call, in each message
                if values[position].requires_grad:
                    message.tracked.append(values[position])
        buffers: list[pickle.PickleBuffer] = []
        pickled = _FLAT_BYTE + pickle.dumps((tuple(others), tensors), 5, buffer_callback=buffers.append)
        return pickled, [buffer.raw() for buffer in buffers] if buffers else ()

    def _dump_nested(self, values: Any, message: Outgoing) -> tuple[bytes, Sequence[Buffer]]:
        """The same for any values."""
        buffers: list[Buffer] = []
        pickled = self._pickle(values, message, buffers, _beside(buffers))
        if not message.apart:
            return pickled, buffers
        with DisableTorchFunctionSubclass():
            apart, beside = self.dump(message.apart, message, apart=True)
            if not apart:
                apart, beside = self._dump_apart(message)
        return b"".join((_APART_HEAD.pack(_APART, len(buffers), len(apart)), apart, pickled)), [*buffers, *beside]

    def _dump_apart(self, message: Outgoing) -> tuple[bytes, Sequence[Buffer]]:
        """The tensors that stand apart, where some have more to them than plain memory: a pickle of them without their
        history, and of the places of those that are tracked."""
        apart, buffers = message.apart, list[Buffer]()
        if dual_level() >= 0:
            for tensor in apart:
                refuse_dual(tensor)
        places = [place for place, tensor in enumerate(apart) if tensor.requires_grad]
        plain = [torch.Tensor._make_subclass(torch.Tensor, tensor, False) for tensor in apart]
        for tensor, same in zip(apart, plain, strict=True) if message.put else ():
            if id(tensor) in message.put:  # it lies in device memory already
                message.put[id(same)] = same, message.put[id(tensor)][1]
        message.apart, message.tracked, message.in_place = [], None, sys.maxsize
        pickled = self._pickle((plain, places), message, buffers, _beside(buffers))
        message.tracked = [apart[place] for place in places]
        return pickled, buffers

    def _pickle(
        self, values: Any, message: Outgoing, buffers: list[Buffer], on_buffer: Callable[[Any], Any] | None
    ) -> bytes:
        already = len(buffers)
        file = io.BytesIO()
        pickler: pickle.Pickler = _Pickler(file, on_buffer, self._reducer(message, by_value=False))
        try:
            interruptible(pickler.dump, values)
            return file.getvalue()
        except (_ByValueError, pickle.PicklingError, AttributeError, TypeError):
            pass  # and now with cloudpickle
        del buffers[already:]
        for noted in (message.apart, message.handles):
            if noted:
                noted.clear()
        file = io.BytesIO()
        reduce = self._reducer(message, by_value=True)
        pickler = ByValuePickler(file, on_buffer, self.namespaces, reduce, Dependencies())
        interruptible(pickler.dump, values)
        return file.getvalue()

    def _dump_definition(self, value: Any, made_of: Dependencies) -> bytes:
        """Pickles a definition, with all that it needs."""
        message = Outgoing(-1, same_main=False, severed=IN_DEFINITION)
        file = io.BytesIO()
        pickler = ByValuePickler(file, None, self.namespaces, lambda obj: _reduce_data(obj, message), made_of)
        try:
            interruptible(pickler.dump, value)
        except BaseException as error:
            raise EncodeError(reason_of(error)) from error
        return file.getvalue()

    def _reducer(self, message: Outgoing, *, by_value: bool) -> Callable[[Any], Any]:
        """How pickle should save the objects of a message. Most of many are plain tensors."""
        stands_apart, in_modules, is_tracked = message.apart.append, message.in_modules, message.tracked is not None

        def reduce(obj: Any) -> Any:
            if type(obj) is not torch.Tensor or attributes_of(obj) is not None:
                return self._reduce(obj, message, by_value=by_value)
            if obj.requires_grad:
                if not is_tracked or (in_modules and id(obj) in in_modules):
                    return _reduce_data(obj, message)
            elif message.in_place > 0:
                message.in_place -= 1
                return _reduce_data(obj, message)
            stands_apart(obj)
            return NEXT_TENSOR

        return reduce

    def _reduce(self, obj: Any, message: Outgoing, *, by_value: bool) -> Any:
        """How pickle should save an object; NotImplemented: in its own way."""
        if is_definition(obj):
            if not is_by_value(obj):
                return NotImplemented
            reduced = self.definitions.reduce(obj, message)
            if reduced is NotImplemented and not by_value:
                raise _ByValueError
            return reduced
        if isinstance(obj, Handle):
            if message.handles is None:
                raise EncodeError("an RRef cannot be sent in an exception")
            message.handles.append(obj)
            return obj.rebuild, (obj.entry.id, obj.entry.owner)
        if message.tracked is not None and isinstance(obj, torch.Tensor) and obj.requires_grad:
            if message.follows(obj):
                return reduce_tracked(obj, message.apart)
        elif message.in_modules is not None and isinstance(obj, torch.nn.Module):
            for part in obj.modules():  # not parameters(): a RemoteModule asks its worker for them
                for members in (vars(part).get("_parameters"), vars(part).get("_buffers")):
                    message.in_modules.update(map(id, members.values() if members else ()))
        return _reduce_data(obj, message)

    # -- unpickling ------------------------------------------------------------------------------------

    def load(
        self,
        pickled: memoryview,
        buffers: Sequence[Buffer],
        sender: int | None = None,
        attach: Attach | None = None,
        apart: Sequence[torch.Tensor] = (),
        frames: Frames | None = None,
        deadline: float | None = None,
    ) -> Any:
        """The values of a message of `sender`; `attach` gives those that were tracked their history. `frames` are there
        if tensors of it lie in device memory. The deadline is that of the call that it belongs to."""
        if pickled[0] == _FLAT:
            values, tensors = pickle.loads(pickled[1:], buffers=buffers)
            if tensors is None:
                return values
            if torch.is_inference_mode_enabled():
                with torch.inference_mode(False), unpickling(self, sender, (), frames):
                    return _unflatten(values, tensors, attach)
            if frames is None:
                return _unflatten(values, tensors, attach)
            with unpickling(self, sender, (), frames):
                return _unflatten(values, tensors, attach)
        if pickled[0] == _APART:
            _, ahead, length = _APART_HEAD.unpack_from(pickled)
            start = _APART_HEAD.size + length
            first = pickled[_APART_HEAD.size : start]
            found = self.load(first, buffers[ahead:], sender, attach, (), frames, deadline)
            if first[0] != _FLAT:
                found, places = found
                tracked = [found[place] for place in places]
                with torch.inference_mode(False):
                    history = [tensor.requires_grad_() for tensor in tracked] if attach is None else attach(tracked)
                for place, tensor in zip(places, history, strict=True):
                    found[place] = tensor
            return self.load(pickled[start:], buffers[:ahead], sender, None, found, frames, deadline)
        # What arrives in inference mode is no inference tensor: it may be kept beyond that.
        no_inference = torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()
        with no_inference, unpickling(self, sender, apart, frames, deadline):
            return interruptible(partial(pickle.loads, pickled, buffers=buffers))

    def of_main(self, sender: int | None, qualname: str, deadline: float | None) -> Any:
        """What the `__main__` of this worker has under a name; else what the sender's has, which is asked for it.

        Raises:
            AttributeError: neither has it.
        """
        try:
            return module_attribute("__main__", qualname)
        except AttributeError:
            top, *path = qualname.split(".")
            blob = None
            if sender is not None and sender != self.namespaces.worker_id:
                blob = interruptible(self.ask_for, sender, top, deadline)
            if blob is None:
                raise
        with unpickling(self, sender):
            found = interruptible(self.definitions.adopt, blob, sender)
        return operator.attrgetter(".".join(path))(found) if path else found

    def load_definitions(self, carried: Buffer, sender: int) -> None:
        """Rebuilds the definitions that a message carries."""
        with unpickling(self, sender):
            interruptible(self.definitions.receive, carried, sender)
        for device in current.thread.used_devices:  # other threads use what is in them, on streams of theirs
            torch.accelerator.current_stream(device).synchronize()


def reason_of(error: BaseException) -> str:
    """The text of an error that users' code has raised. A Ctrl-C goes through."""
    if is_interrupt(error):
        raise error
    return f"{type(error).__name__}: {text_of(error)}"


def _no_handle(id: int, owner: int) -> Any:
    raise DecodeError(f"an RRef (to value {id} of worker {owner}) came where none is known")


def _reduce_data(obj: Any, message: Outgoing) -> Any:
    if issubclass(type(obj), torch.Tensor):
        if message.severed and obj.requires_grad and message.severs(obj):
            return reduce_severed(obj, message.severed)
        return reduce_tensor(obj, message)
    if is_named_by_torch(obj):
        return reduce_named_by_torch(obj, message)
    return NotImplemented


def _beside(buffers: list[Buffer]) -> Callable[[pickle.PickleBuffer], bool]:
    """Puts large memory beside the pickle. Small memory stays in it: there may be any number of small arrays."""

    def on_buffer(buffer: pickle.PickleBuffer) -> bool:
        memory = buffer.raw()
        if memory.nbytes < SHARED_MEMORY_FROM:
            return True
        buffers.append(memory)
        return False

    return on_buffer


class _Pickler(pickle.Pickler):
    """The plain pickler. `reduce` has the first word about every object."""

    def __init__(self, file: io.BytesIO, on_buffer: Callable[[Any], Any] | None, reduce: Callable[[Any], Any]) -> None:
        super().__init__(file, 5, buffer_callback=on_buffer)
        self.reducer_override = reduce  # type: ignore[method-assign]


def _unflatten(values: tuple[Any, ...], tensors: dict[Any, Any], attach: Attach | None) -> tuple[Any, ...]:
    found = list(values)
    tracked: list[torch.Tensor] = []
    places: list[int] = []  # of those
    for position, description in tensors.items():
        if type(description) is int:
            continue
        is_tracked: Any = attach is not None and description[FLAGS] & REQUIRES_GRAD
        if type(position) is int:
            found[position] = tensor = rebuild(*description, detached=is_tracked)  # type: ignore[misc]
            if is_tracked:
                tracked.append(tensor)
                places.append(position)
        else:
            alike = rebuild_gathered(len(position), is_tracked, *description)
            for place, tensor in zip(position, alike, strict=True):
                found[place] = tensor
            if is_tracked:
                places += position
                tracked += alike
    if tracked:
        assert attach is not None
        if len(values) > MANY:  # else they are in order
            places.sort()
            tracked = [found[place] for place in places]
        for place, tensor in zip(places, attach(tracked), strict=True):
            found[place] = tensor
    for position, description in tensors.items():
        if type(description) is int:
            found[position] = found[description]
    return tuple(found)
