"""Device maps: what the workers of a group say of their devices, and torch's rules for that.

A map says where the tensors of a worker's calls to another one arrive. In a group of a fixed size all exchange theirs
when they join, if one has any, and each checks those of all: so all fail, and with the same words. Where workers come
and go each checks its own side; the other side is checked with each message that a map was used for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import torch

from ..messages import Member
from ..options import Options
from ..rendezvous.address import first_line
from ..rendezvous.group import Group

_TOPIC = "devices"


class WorkerDevices(msgspec.Struct, frozen=True, array_like=True):
    """What a worker says of its devices. They are named as in Options."""

    name: str
    count: int  # of CUDA devices
    maps: dict[str, dict[str, str]] = {}  # by worker: its devices, and where their tensors arrive there
    devices: tuple[str, ...] = ()  # that maps may name; none: all


def are_set(options: Options) -> bool:
    """Whether there is anything to check."""
    return bool(options.device_maps or options.devices)


def check_own(group: Group, member: Member, options: Options) -> None:
    """Checks the device maps of a worker that is about to join a group where others come and go.

    Raises:
        ValueError: a map cannot be used.
    """
    if group.world_size is None and are_set(options):
        check([_own(member, options)], is_whole=False)


def agree(group: Group, member: Member, options: Options) -> None:
    """Waits until all of a group of a fixed size have joined, and checks the device maps.

    Raises:
        RendezvousError: some did not come in time.
        ValueError: a map cannot be used, this worker's or that of another one.
    """
    if group.world_size is None:
        return
    members = group.wait_for_all()
    if are_set(options) or any(m.has_device_maps for m in members):
        said = group.exchange(_TOPIC, member, msgspec.msgpack.encode(_own(member, options)))
        workers = [_decoded(group, key, data) for key, data in said.items()]
        check(workers, is_whole=len(workers) == group.world_size)


def _decoded(group: Group, key: str, data: bytes) -> WorkerDevices:
    worker = group.decode(key, data, WorkerDevices)
    devices = [*worker.devices, *(d for found in worker.maps.values() for pair in found.items() for d in pair)]
    try:
        for device in devices:
            torch.device(device)
    except RuntimeError as error:
        raise group.spoilt(key, data, first_line(error)) from None
    if not all(text.isprintable() for text in (worker.name, *worker.maps, *devices)):
        raise group.spoilt(key, data)
    return worker


def _own(member: Member, options: Options) -> WorkerDevices:
    return WorkerDevices(member.name, torch.cuda.device_count(), options.device_maps, tuple(options.devices))


def check(workers: Sequence[WorkerDevices], *, is_whole: bool) -> None:
    """Checks the maps of these workers against each other. `is_whole`: there are no others.

    Raises:
        ValueError: torch's words, with the values that it speaks of.
    """
    by_name = {worker.name: worker for worker in workers}
    for worker in workers:
        if len(set(worker.devices)) != len(worker.devices):
            raise _wrong(worker, "has duplicated devices", devices=_devices(worker.devices))
        if not _exist(worker.devices, worker.count):
            told = {"devices": _devices(worker.devices), "device count": worker.count}
            raise _wrong(worker, "has devices with invalid indices", **told)
    for worker in workers:
        if is_whole and not by_name.keys() >= worker.maps.keys():
            told = {"device maps": worker.maps.keys(), "node names": list(by_name)}
            raise _wrong(worker, "has invalid target node names in its device maps", **told)
        for to, device_map in worker.maps.items():
            _check_map(worker, to, by_name.get(to), device_map)


def _check_map(worker: WorkerDevices, to: str, target: WorkerDevices | None, device_map: dict[str, str]) -> None:
    where = f"in its device map for {to}"
    shown = {torch.device(source): torch.device(found) for source, found in device_map.items()}
    if len(set(device_map.values())) != len(device_map):
        raise _wrong(worker, f"has duplicated target devices {where}", **{"device map": shown})
    sides = (("source", device_map.keys(), worker), ("target", device_map.values(), target))
    for side, names, of in sides:
        if of is None:
            continue
        if of.devices:
            if not set(names) <= set(of.devices):
                told = {"device map": shown, "devices": _devices(of.devices)}
                raise _wrong(worker, f"has unexpected {side} devices {where}", **told)
        elif not _exist(names, of.count):
            what = f"has {side} devices with invalid indices {where}"
            raise _wrong(worker, what, **{"device map": shown, "device count": of.count})


def _exist(names: Iterable[str], count: int) -> bool:
    """Whether these are CPUs and CUDA devices of a worker that has so many of the latter."""
    for device in map(torch.device, names):
        if device.type != "cpu" and not (device.type == "cuda" and 0 <= (device.index or 0) < count):
            return False
    return True


def _devices(names: Iterable[str]) -> list[torch.device]:
    return [torch.device(name) for name in names]


def _wrong(worker: WorkerDevices, what: str, **told: object) -> ValueError:
    return ValueError("\n".join([f"Node {worker.name} {what}", *(f"{key} = {value}" for key, value in told.items())]))
