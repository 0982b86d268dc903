"""Where the tensors of a message arrive: targets by device of the sender, and what devices this process has."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..errors import DecodeError


class UnmappedDeviceError(Exception):
    """Inside the codec: a tensor is on a device that no map names, and only those may be sent."""

    def __init__(self, device: str, has_map: bool) -> None:
        super().__init__(device)
        self.device = device
        self.has_map = has_map

    def text(self, message: str, to: str) -> str:
        """torch's words. `message` is "Request" or "Response"."""
        why = (
            f" for device {self.device} but received a tensor on that device."
            if self.has_map
            else f", but found tensor on device: {self.device}"
        )
        return (
            "TensorPipe RPC backend only supports CPU tensors by default, please move your tensors to CPU before "
            "sending them over RPC, or call `set_device_map` on `TensorPipeRpcBackendOptions` to explicitly configure "
            f"device mapping. {message} device mapping is not available for destination {to}{why}"
        )


class Targets(dict[str, str]):
    """A device map. A tensor of a device that is not in it goes to the device of the same name."""

    def __missing__(self, device: str) -> str:
        return device


class StrictTargets(Targets):
    """A device map. A tensor of a device that is not in it, and not the CPU, cannot be sent."""

    def __missing__(self, device: str) -> str:
        raise UnmappedDeviceError(device, self is not NO_MAP)


NO_MAP = StrictTargets()

_found: set[str] = set()


def have_device(name: str) -> bool:
    """Whether this process has that device. The name may come from a peer, and be none."""
    if name in _found:
        return True
    try:
        device = torch.device(name)
    except RuntimeError:
        return False
    if device.type != "cpu":
        accelerator = torch.accelerator.current_accelerator()
        if accelerator is None or accelerator.type != device.type:
            return False
        if (device.index or 0) >= torch.accelerator.device_count():
            return False
    _found.add(name)
    return True


def check_all_here(names: Iterable[str]) -> None:
    """Raises DecodeError unless this process has all devices that a message's map names."""
    for name in names:
        if not have_device(name):
            raise DecodeError(f"a device map names device {name}, and there is none in this process")
