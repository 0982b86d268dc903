"""RemoteModule: an nn.Module here, whose methods are calls to the module that it stands for, on its owner.

    layer = RemoteModule("worker/cuda:0", nn.Linear, (20, 30))
    model = nn.Sequential(nn.Linear(10, 20), layer)

It has no parameters of its own: an RRef to the module is what it holds, and objects that stand for the parameters
(optim/remote_tensor.py). Gradients flow through its calls, as through any other.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from .. import rpc
from .._torch import parse_to
from ..gradients.plain import untracked
from ..optim.remote_tensor import RemoteBuffer, RemoteParameter, RemoteTensor, check_no_pass, from_rows
from ..primitives.current import current_worker
from ..rref import RRef
from ..runtime.arguments import checked
from ..serialization.handles import Handle
from . import owner as remote
from .owner import Hook

__all__ = ["RemoteHook", "RemoteModule"]

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128)


def _refused(method: str) -> Any:
    """A method that a RemoteModule does not have: all its contents are on another worker."""

    def refused(self: RemoteModule, *_: Any, **__: Any) -> Any:
        raise ValueError(
            f"Method ``{method}`` not supported for RemoteModule: the module is on worker {self.on!r}. Put both into a "
            "module of this worker; or call it there, as module_rref.rpc_sync() does"
        )

    refused.__name__ = method
    refused.__doc__ = "Refused: all its contents are on its worker."
    return refused


class RemoteModule(nn.Module):
    """A module on another worker, to be used as if it were here.

    Args:
        remote_device: "worker", "worker/cpu", "worker/cuda:0" or "rank:0/cpu": the worker and the device there. A
            device alone is one of this worker.
        module_cls: the module's class, or a function that makes one, called on that worker with `args` and `kwargs`.
        snapshot: for several trainers of one module: backward uses the values that parameters had in its forward,
            where another trainer has stepped meanwhile. See docs/modules-and-optimizers.md.

    The module is made while the program goes on; an error in that shows on use. It can be sent to other workers, where
    it stands for the same module; attributes of the object here, such as hooks, do not go along.

    `parameters()` and the like give RemoteParameters, for a DistributedOptimizer; of a worker's own module the
    parameters themselves. All methods of a module that it is in, such as nn.Sequential, reach it; only `to(device)` of
    that leaves it where it is.

    Raises:
        TypeError, ValueError, RuntimeError: an argument is not what is needed.
        UnknownWorkerError: there is no such worker.
    """

    on: str | int
    device: str
    _what: str  # the name of the module's class, to be shown
    _snapshot: bool
    module_rref: RRef[nn.Module]

    def __init__(
        self,
        remote_device: str,
        module_cls: Callable[..., nn.Module],
        args: Any = None,
        kwargs: dict[str, Any] | None = None,
        _module_interface_cls: Any = None,
        *,
        snapshot: bool = False,
    ) -> None:
        super().__init__()
        _check_not_scripted(_module_interface_cls)
        if isinstance(module_cls, nn.Module):
            raise TypeError("module_cls is a class; for a module that was made already: RemoteModule.from_module")
        if not callable(module_cls):
            raise TypeError(f"module_cls is a class of modules, not {module_cls!r}")
        self.on, self.device = _parse(remote_device)
        self._what, self._snapshot = getattr(module_cls, "__name__", ""), snapshot
        args, kwargs = checked(args, kwargs)
        made_with = (module_cls, args, kwargs or {}, self.device)
        self.module_rref = rpc.remote(self.on, remote.create, made_with)

    @staticmethod
    def init_from_module_rref(
        remote_device: str, module_rref: RRef[nn.Module], _module_interface_cls: Any = None, *, snapshot: bool = False
    ) -> RemoteModule:
        """Stands for a module that is on its worker already. The module stays on the device where it is:
        `remote_device` is only shown."""
        _check_not_scripted(_module_interface_cls)
        if not isinstance(module_rref, RRef):
            raise TypeError(f"an RRef to a module is needed, not a {type(module_rref).__name__}")
        on, device = _parse(remote_device)
        current_worker().info(on)
        return _built(RemoteModule, module_rref, module_rref.owner_name(), device, True, "", snapshot)

    @classmethod
    def from_module(cls, remote_device: str, module: nn.Module, *, snapshot: bool = False) -> RemoteModule:
        """Takes a module of this worker to another one. The one here is a copy from then on, and has no part in it.

        Raises:
            EncodeError: it cannot be sent.
        """
        if not isinstance(module, nn.Module) or isinstance(module, RemoteModule):
            raise TypeError(f"a module of this worker is needed, not a {type(module).__name__}")
        on, device = _parse(remote_device)
        with _outside_of_contexts():  # else its parameters would arrive with a history
            rref = rpc.remote(on, remote.adopt, (module, device))
        return _built(cls, rref, on, device, module.training, type(module).__name__, snapshot)

    # -- calls -----------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module there, with its hooks, and returns the result.

        Where it is on another device than the CPU, tensors are taken to that. Results arrive where the reverse of
        this worker's device map for its owner says; where there is no such map on the CPU, unless one of the arguments
        came on the module's device.
        """
        return self._call(self._forward(), *args, **kwargs)

    def forward_async(self, *args: Any, **kwargs: Any) -> torch.futures.Future[Any]:
        """The same, and returns the result's future. Hooks of the object here do not run."""
        rref = self.module_rref
        rref.check_creation()
        future = rpc.rpc_async(rref.entry.owner, self._forward(), (rref.entry.id, *args), kwargs)
        # The call names the module by its id, so this handle has to live until it is answered. A call that waits for
        # its answer keeps its future.
        future.__dict__["keeps"] = rref
        return future

    def _forward(self) -> Callable[..., Any]:
        maps = current_worker().options.device_maps
        ways = remote.SNAPSHOT_FORWARDS if self._snapshot else remote.FORWARDS
        return ways[bool(maps) and self.module_rref.owner_name() in maps]

    def _call(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        rref = self.module_rref
        rref.check_creation()
        return rpc.rpc_sync(rref.entry.owner, function, (rref.entry.id, *args), kwargs)

    def _there(self, method: str, *args: Any, **kwargs: Any) -> RemoteModule:
        """Calls a method of the module that returns the module."""
        self._call(remote.run, method, args, kwargs)
        return self

    def get_module_rref(self) -> RRef[nn.Module]:
        """A handle to the module."""
        return self.module_rref

    # -- parameters and buffers: a module around it finds them here, too ---------------------------------

    def _members(self, which: str, cls: type[Any]) -> dict[str, Any]:
        """Asks the owner, each time: they may have been replaced there."""
        # Those that it has found are kept: programs compare the ids of parameters.
        kept = self.__dict__.get(f"_{which}", {})
        known = [tensor.key for tensor in kept.values() if isinstance(tensor, RemoteTensor)]
        try:
            found = _Members(from_rows(cls, self._call(remote.members, which, known)))
        except AttributeError as error:  # Python would say that there is no such property
            raise RuntimeError(f"on worker {self.module_rref.owner_name()!r}: {error}") from error
        self.__dict__[f"_{which}"] = found
        return found

    @property
    def _parameters(self) -> Any:
        return self._members("named_parameters", RemoteParameter)

    @_parameters.setter
    def _parameters(self, value: Any) -> None:
        self.__dict__["_parameters"] = value  # of this object itself: none, ever

    @property
    def _buffers(self) -> Any:
        return self._members("named_buffers", RemoteBuffer)

    @_buffers.setter
    def _buffers(self, value: Any) -> None:
        self.__dict__["_buffers"] = value

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Its parameters, with their names: a RemoteParameter for each."""
        start = len(prefix) + bool(prefix)
        for name, parameter in super().named_parameters(prefix, True, remove_duplicate):
            if recurse or "." not in name[start:]:
                yield name, parameter

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Its buffers, with their names: a RemoteBuffer for each."""
        start = len(prefix) + bool(prefix)
        for name, buffer in super().named_buffers(prefix, True, remove_duplicate):
            if recurse or "." not in name[start:]:
                yield name, buffer

    def remote_parameters(self, recurse: bool = True) -> list[RRef[nn.Parameter]]:
        """Handles to the parameters."""
        return [p.rref if isinstance(p, RemoteParameter) else RRef(p) for p in self.parameters(recurse)]

    def __dir__(self) -> Iterable[str]:
        return object.__dir__(self)  # nn.Module's asks for the parameters

    # -- state: nn.Module's own state_dict() and load_state_dict() call these, also those of a module around ----

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        with _outside_of_contexts():
            state, metadata = self._call(remote.state_dict)
        for name, value in state.items():
            destination[prefix + name] = value
        if hasattr(destination, "_metadata"):
            for name, value in metadata.items():
                destination._metadata[(prefix + name).removesuffix(".")] = value

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        mine = {key.removeprefix(prefix): value for key, value in state_dict.items() if key.startswith(prefix)}
        versions = getattr(state_dict, "_metadata", None)  # not in what a module around hands on
        assign = bool(local_metadata.get("assign_to_params_buffers", False))
        with _outside_of_contexts():
            missing, unexpected, problem = self._call(remote.load_state_dict, mine, versions, assign)
        missing_keys += [prefix + key for key in missing]
        unexpected_keys += [prefix + key for key in unexpected]
        if problem:
            error_msgs.append(f"on worker {self.module_rref.owner_name()!r}: {problem}")

    # -- changes of the module -----------------------------------------------------------------------

    def train(self, mode: bool = True) -> RemoteModule:
        """Sets the training mode, as of any module; eval() too."""
        if not isinstance(mode, bool):
            raise ValueError(f"training mode is expected to be boolean, not {mode!r}")
        self._there("train", mode)
        self.training = mode
        return self

    def to(self, *args: Any, **kwargs: Any) -> RemoteModule:
        """Moves or converts it, as any module. A device is one of its worker."""
        device, dtype, non_blocking, memory_format = parse_to(*args, **kwargs)
        asked = {"device": device, "dtype": dtype, "memory_format": memory_format}
        given = {name: value for name, value in asked.items() if value is not None}
        self._there("to", **given, non_blocking=non_blocking)
        if device is not None:
            self.device = str(device)
        return self

    def cpu(self) -> RemoteModule:
        """Takes it to the CPU of its worker."""
        return self.to("cpu")

    def cuda(self, device: int | torch.device | None = None) -> RemoteModule:
        """Takes it to a GPU of its worker."""
        where = "cuda" if device is None else device
        return self.to(torch.device("cuda", where) if isinstance(where, int) else where)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> RemoteModule:
        # From float(), half() and the like; also those, and to(), of a module around. The dtype follows them; the
        # device does not, since the worker need not have those of this one.
        becomes = {kind: fn(torch.empty(0, dtype=kind)).dtype for kind in _FLOATS}
        changes = {kind: new for kind, new in becomes.items() if kind is not new}
        if changes:
            self._call(remote.change_dtypes, changes)
        return self

    def to_empty(self, *, device: Any, recurse: bool = True) -> RemoteModule:
        """Moves it without its contents, as any module, on its worker."""
        self.device = str(torch.device(device))
        return self._there("to_empty", device=device, recurse=recurse)

    def apply(self, fn: Callable[[nn.Module], None]) -> RemoteModule:
        """Calls `fn` on its worker, with each of its submodules there and with itself."""
        return self._there("apply", fn)

    def requires_grad_(self, requires_grad: bool = True) -> RemoteModule:
        """Switches the recording of gradients, as of any module."""
        return self._there("requires_grad_", requires_grad)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears `.grad` of its parameters, with one message. Gradients of contexts are not there."""
        check_no_pass("zero_grad()", (self.module_rref.entry.owner,))
        self._call(remote.zero_grad, set_to_none)

    # -- hooks there; nn.Module's own register_*_hook() make hooks of this object, which run here --------

    def register_remote_forward_pre_hook(self, hook: Hook, **options: Any) -> RemoteHook:
        """nn.Module.register_forward_pre_hook of the module on its worker: `hook` is sent there, and runs there."""
        return self._hook("register_forward_pre_hook", hook, options)

    def register_remote_forward_hook(self, hook: Hook, **options: Any) -> RemoteHook:
        """nn.Module.register_forward_hook, likewise."""
        return self._hook("register_forward_hook", hook, options)

    def register_remote_full_backward_pre_hook(self, hook: Hook, **options: Any) -> RemoteHook:
        """nn.Module.register_full_backward_pre_hook, likewise."""
        return self._hook("register_full_backward_pre_hook", hook, options)

    def register_remote_full_backward_hook(self, hook: Hook, **options: Any) -> RemoteHook:
        """nn.Module.register_full_backward_hook, likewise."""
        return self._hook("register_full_backward_hook", hook, options)

    def _hook(self, method: str, hook: Hook, options: dict[str, Any]) -> RemoteHook:
        return RemoteHook(self._call(remote.register, method, hook, options))

    # -- the object here ------------------------------------------------------------------------------------

    def extra_repr(self) -> str:
        """The class of the module, its worker and device."""
        return f"{self._what}{', ' if self._what else ''}on={self.on!r}, device={self.device!r}"

    register_buffer = _refused("register_buffer")
    register_parameter = _refused("register_parameter")
    add_module = _refused("add_module")
    share_memory = _refused("share_memory")

    def __reduce__(self) -> Any:
        return _built, (
            type(self),
            _Sent(self.module_rref),
            self.on,
            self.device,
            self.training,
            self._what,
            self._snapshot,
        )


class _Members(dict[str, Any]):
    """Parameters or buffers of a RemoteModule, by name."""

    def __setitem__(self, name: str, value: Any) -> None:
        raise ValueError(
            f"{name!r} of a RemoteModule cannot be replaced from here, as by torch.func.functional_call: make a call "
            "to its worker that does it there"
        )

    def __delitem__(self, name: str) -> None:
        self[name] = None


class RemoteHook:
    """A hook of a module on another worker."""

    def __init__(self, handle: RRef[RemovableHandle]) -> None:
        self._handle = handle

    def remove(self) -> None:
        """Takes it off. Any number of times."""
        self._handle.rpc_sync().remove()

    def __enter__(self) -> RemoteHook:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


class _Sent(Handle):
    """The RRef of a RemoteModule in a message; in any other pickle it says why it cannot be there."""

    rebuild = staticmethod(RRef.rebuild)

    def __init__(self, rref: RRef[nn.Module]) -> None:
        self.rref = rref
        self.entry = rref.entry

    def __reduce__(self) -> Any:
        raise RuntimeError(
            "Cannot pickle RemoteModule in python pickler. RemoteModule can only be pickled when using RPC: its module "
            "is on another worker. What can be saved is its state_dict()"
        )


def _built(
    cls: type[RemoteModule], rref: Any, on: str | int, device: str, training: bool, what: str, snapshot: bool
) -> RemoteModule:
    module = cls.__new__(cls)
    nn.Module.__init__(module)
    module.module_rref = rref.rref if isinstance(rref, _Sent) else rref  # copy.copy() hands on what was given
    module.on, module.device, module.training, module._what = on, device, training, what
    module._snapshot = snapshot
    return module


def _parse(remote_device: Any) -> tuple[str | int, str]:
    """The worker and the device."""
    if not isinstance(remote_device, str | torch.device):
        raise TypeError(f"remote_device is a string as 'worker/cuda:0', not a {type(remote_device).__name__}")
    text = str(remote_device)
    worker, *devices = text.split("/")
    if not devices and _is_device(worker):
        return current_worker().name, worker
    is_rank = worker.startswith("rank:") and worker[5:].isdigit()
    if not worker or len(devices) > 1 or (":" in worker and not is_rank):
        raise ValueError(
            f"Could not parse remote_device: {text}. The valid format is '<workername>/<device>' or "
            "'rank:<rank>/<device>' or '<device>'"
        )
    try:
        device = str(torch.device(devices[0] if devices else "cpu"))
    except RuntimeError as error:
        raise RuntimeError(f"{error} (in remote_device {text!r})") from error
    return int(worker[5:]) if is_rank else worker, device


def _is_device(text: str) -> bool:
    with contextlib.suppress(RuntimeError):
        torch.device(text)
        return True
    return False


def _check_not_scripted(interface: Any) -> None:
    if interface is not None:
        raise NotImplementedError(
            "a RemoteModule cannot be scripted: TorchScript code makes no remote calls here. Leave out "
            "_module_interface_cls; the module itself may be a scripted one"
        )


@contextlib.contextmanager
def _outside_of_contexts() -> Iterator[None]:
    """Tensors that are sent meanwhile have no history."""
    with untracked():
        yield
