"""Options: everything that can be set about a worker, in one frozen object that travels whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

Device = int | str | torch.device

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

# Kept out of Options: both ends must agree on it, so it belongs to the wire version.
SHARED_MEMORY_FROM = 64 * KIB  # messages of at least this many bytes leave the socket for shared memory

# Tensors with a history that are this small (bytes) are copied where they arrive, if a message has so many of them: see
# Note [copies] in gradients/nodes.py.
MOST_COPIED, LEAST_COPIED = 4 * KIB, 4


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a worker behaves. All times are in seconds."""

    rpc_timeout: float = 60.0
    """Deadline of a call that names none; 0 means no limit."""
    init_timeout: float = 60.0
    """How long start-up waits for the store and for the other workers."""
    shutdown_timeout: float = 60.0
    """How long a graceful shutdown waits for work in flight and for the others; 0 means no limit."""
    connect_timeout: float = 10.0
    """How long connecting to a peer and the handshake may take."""

    transports: tuple[str, ...] = ("unix",)
    """Which transports to listen on and to dial: "unix" for peers of this host and user, "tcp" for others.
    A peer on this host is never dialled over TCP by a worker that has "unix"."""
    tcp_host: str | None = None
    """Where to listen for TCP: an address that others can connect to, so not 0.0.0.0. Given, it adds "tcp" to
    `transports`; else a worker with "tcp" listens on 127.0.0.1, where every user of this machine can connect.
    Anything but a loopback address needs `insecure_listen_beyond_loopback`."""
    insecure_listen_beyond_loopback: bool = False
    """Lets `tcp_host` be a public address, and lets this worker dial public addresses. INSECURE: there is no
    authentication, and a program that reaches the port, or that a worker dials, can run code as this user."""

    max_message_bytes: int = 16 * GIB
    """A larger message is refused, by its sender and by its receiver."""
    peer_byte_limit: int = 256 * MIB
    """Calls in flight to one peer, in bytes; a caller over the limit waits until replies have come. What lies in
    shared memory or an in-process queue and was not read yet is held to the same limit."""
    pool_bytes: int = 1 * GIB
    """Free memory kept for reuse per connection, in bytes, before it is given back to the system."""

    device_maps: dict[str, dict[Any, Any]] = field(default_factory=dict)
    """By name of a worker: where the tensors of calls to it arrive, as {device here: device there}. A device is a
    number (of a CUDA device), a string or a torch.device. Answers, and the gradients of what was sent, go back by the
    reverse. See docs/devices.md."""
    devices: Sequence[Any] = ()
    """The CUDA devices that the maps of this worker, and those of others to it, may name; none: all that there are."""
    strict_devices: bool = False
    """Refuses to send a tensor from a device that no map names, as torch does. Else it arrives on the device of the
    same name where the other worker has that, and on the CPU where not. The CPU needs no map."""

    plain: bool = True
    """Tensors that require grad are followed to other workers outside of contexts, too, and `loss.backward()` finds its
    way back. Else they arrive as leaves there, as in torch, and so do parameters and modules that this worker sends in
    contexts. What a caller has set holds for its calls and their answers."""
    backward_timeout: float = 60.0
    """How long `loss.backward()` waits while nothing moves: no gradient comes, and no worker computes. 0 means no
    limit. A worker that computes for longer is waited for, and named in the log."""

    spin: float = 300e-6
    """How long a thread that expects a message polls before it sleeps; three and a half times as long once tensors on
    devices come and go, which takes longer. Waking an idle core costs more than most messages; 0 never spins."""
    idle_thread_timeout: float = 5.0
    """A thread that had nothing to do for this long ends (one always stays)."""

    def __post_init__(self) -> None:
        for name in ("rpc_timeout", "init_timeout", "shutdown_timeout", "connect_timeout", "backward_timeout", "spin"):
            if getattr(self, name) < 0:
                raise ValueError(f"Options.{name} is {getattr(self, name)}; it must not be negative")
        if self.tcp_host is not None and "tcp" not in self.transports:
            object.__setattr__(self, "transports", (*self.transports, "tcp"))
        unknown = set(self.transports) - {"unix", "tcp"}
        if unknown or not self.transports:
            raise ValueError(f"Options.transports is {self.transports!r}; choose from 'unix' and 'tcp'")
        if not isinstance(self.device_maps, _DeviceMaps):
            maps = _DeviceMaps({to: _one_to_one(device_map) for to, device_map in self.device_maps.items()})
            object.__setattr__(self, "device_maps", maps)
        object.__setattr__(self, "devices", tuple([_cuda_name(device) for device in self.devices]))

    @classmethod
    def of(cls, options: Options | None, backend_options: Any = None) -> Options:
        """The options given under either name, or what torch's RpcBackendOptions set, or the defaults.

        Raises:
            TypeError: both are given, or one is no options object.
        """
        if options is not None and backend_options is not None:
            raise TypeError(
                "init_rpc() takes options or rpc_backend_options, not both; init_method=... says where the group meets"
            )
        given = backend_options if options is None else options
        if given is None:
            return cls()
        if isinstance(given, cls):
            return given
        if options is None and hasattr(given, "rpc_timeout"):
            return cls().with_those_of_torch(given)
        name, others = ("options", "") if options is not None else ("rpc_backend_options", " or torch's options")
        raise TypeError(f"{name} is a {type(given).__name__}; expected telegrad.Options{others}")

    def with_those_of_torch(self, torch_options: Any) -> Options:
        """The same with the timeout, the device maps and the devices of torch's RpcBackendOptions; the last two where
        they are set. Its thread counts, channels and transports have no meaning here, and its init_method is read by
        init_rpc()."""
        # That no two devices are mapped to one, torch's object may have seen only in part: it is checked at joining.
        maps = {to: _names(device_map) for to, device_map in getattr(torch_options, "device_maps", {}).items()}
        return replace(
            self,
            rpc_timeout=float(torch_options.rpc_timeout),
            device_maps=_DeviceMaps(maps) or self.device_maps,
            devices=getattr(torch_options, "devices", ()) or self.devices,
        )


class _DeviceMaps(dict[str, dict[str, str]]):
    """Device maps whose devices are names: "cpu", or a type with an index."""


def _name(device: Device) -> str:
    found = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    if found.type == "cpu":
        return "cpu"
    if found.index is None:
        raise ValueError(f"a device map or list has {str(found)!r}; say which one, as in '{found.type}:0'")
    return str(found)


def _cuda_name(device: Device) -> str:
    name = _name(device)
    if not name.startswith("cuda:"):
        kind = name.partition(":")[0]
        raise ValueError(f"`set_devices` expect a list of CUDA devices, but got device type {kind}.")
    return name


def _names(device_map: Mapping[Device, Device]) -> dict[str, str]:
    return {_name(source): _name(target) for source, target in device_map.items()}


def _one_to_one(device_map: Mapping[Device, Device]) -> dict[str, str]:
    """A map with names; a ValueError where two devices are mapped to one: it could not be reversed."""
    reverse: dict[str, str] = {}
    for source, target in device_map.items():
        here, there = _name(source), _name(target)
        if there in reverse:
            raise ValueError(
                f"`device_map` only supports 1-to-1 mapping, trying to map {here} and {reverse[there]} to {there}"
            )
        reverse[there] = here
    return _names(device_map)


def reversed_map(device_map: dict[str, str]) -> dict[str, str]:
    """The map of what goes back."""
    return {target: source for source, target in device_map.items()}
