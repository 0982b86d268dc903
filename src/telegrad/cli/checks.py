"""The checks of `telegrad doctor`: one function for each thing on this machine that telegrad leans on.

Each yields findings. A finding that is not fine says what to do about it.
"""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from itertools import pairwise
from pathlib import Path

from .output import duration, size

OK, SLOW, WRONG = "ok", "warning", "wrong"
MIB = 1 << 20


@dataclass(frozen=True)
class Finding:
    topic: str
    status: str
    text: str
    remedy: str = ""


def versions() -> Iterator[Finding]:
    told = f"{platform.python_implementation()} {platform.python_version()}, {platform.system()} {platform.release()}"
    if sys.platform != "linux":
        yield Finding("system", WRONG, told, "telegrad needs Linux: it uses memfd, epoll and /proc")
    else:
        yield Finding("system", OK, told)
    try:
        lines, found = requires("telegrad") or [], [f"telegrad {version('telegrad')}"]
    except PackageNotFoundError:
        yield Finding("packages", SLOW, "telegrad runs from its sources, and is not installed", "pip install -e .")
        return
    for line in lines:
        wanted, _, extra = line.partition(";")
        if extra and "tools" not in extra:
            continue
        name, least = re.split(r"[<>=]", wanted)[0].strip(), re.search(r">=([\d.]+)", wanted)
        status, remedy = (SLOW, "telegrad[tools]") if extra else (WRONG, wanted)
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            yield Finding("packages", status, f"{name} is not installed", f"pip install '{remedy}'")
            continue
        if least and _numbers(version(name)) < _numbers(least[1]):
            text = f"{name} {version(name)} is older than {least[1]}"
            yield Finding("packages", status, text, f"pip install --upgrade '{remedy}'")
    yield Finding("packages", OK, ", ".join(found))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text.partition("+")[0])[:3])


def torch_build() -> Iterator[Finding]:
    import torch

    devices = f"{torch.cuda.device_count()} CUDA devices" if torch.cuda.is_available() else "CPU only"
    told = f"torch {torch.__version__}, {devices}, {torch.get_num_threads()} threads for operators"
    if not torch.distributed.is_available():
        yield Finding("torch", WRONG, f"{told}; built without torch.distributed", "install a standard build of torch")
    else:
        yield Finding("torch", OK, told)


def shared_memory() -> Iterator[Finding]:
    from ..transport.shared_memory import SegmentPool

    try:
        pool = SegmentPool(MIB, shared=True)
        try:
            pool.take(MIB).view()[:5] = b"hello"
        finally:
            pool.close()
        yield Finding("memfd", OK, "sealed shared memory can be made and mapped")
    except OSError as error:
        remedy = "large messages go through the socket, which is slower; allow memfd_create in the seccomp profile"
        yield Finding("memfd", SLOW, f"no shared memory: {error}", remedy)
    free = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0
    if free < 64 * MIB:
        text = f"/dev/shm has {size(free)} free; telegrad does not use it, but torch's DataLoader does"
        yield Finding("/dev/shm", SLOW, text, "in a container: --shm-size=1g")
    else:
        yield Finding("/dev/shm", OK, f"{size(free)} free (telegrad uses memfd, torch's DataLoader this)")


def memory() -> Iterator[Finding]:
    match = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    free = int(match[1]) * 1024 if match else 0
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        limit = _read_int(name, 0)
        if 0 < limit < 1 << 50:
            free = min(free, limit - _read_int("/sys/fs/cgroup/memory.current", 0))
    if free < 1024 * MIB:
        text = f"{size(free)} available; a connection keeps up to 1 GiB of shared memory for reuse"
        yield Finding("memory", SLOW, text, "free some, or set Options(pool_bytes=...) lower")
    else:
        yield Finding("memory", OK, f"{size(free)} available")
    maps = _read_int("/proc/sys/vm/max_map_count", 65530)
    if maps < 16384:
        yield Finding("mappings", SLOW, f"vm.max_map_count is {maps}", "sysctl vm.max_map_count=65530")
    if _read_int("/proc/sys/vm/overcommit_memory", 0) == 2:
        text = "vm.overcommit_memory is 2: allocations may fail although memory is free"
        yield Finding("overcommit", SLOW, text, "sysctl vm.overcommit_memory=0, or lower Options.pool_bytes")


def limits() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    told = f"{soft} open files allowed (at most {hard})"
    if soft < 1024:
        text = f"{told}: each peer takes a few, and so does each large message on its way"
        yield Finding("descriptors", WRONG if soft < 256 else SLOW, text, f"ulimit -n {min(65536, hard)}")
    else:
        yield Finding("descriptors", OK, told)
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft != resource.RLIM_INFINITY and soft < 512:
        yield Finding("threads", SLOW, f"{soft} processes and threads allowed for this user", "ulimit -u 4096")
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY and soft < 16 << 30:
        yield Finding("address space", SLOW, f"limited to {size(soft)}", "ulimit -v unlimited")


def unix_sockets() -> Iterator[Finding]:
    from ..transport.unix import bind_unseen

    topic, directory = "unix sockets", tempfile.gettempdir()
    if not os.access(directory, os.W_OK):
        yield Finding(topic, WRONG, f"the directory {directory} cannot be written to", "set TMPDIR to one that can")
        return
    try:
        listener, fd = bind_unseen()
    except OSError as error:
        yield Finding(topic, WRONG, f"cannot listen: {error}", f"set TMPDIR to a local directory, not {directory}")
        return
    try:
        with listener, socket.socket(socket.AF_UNIX) as client:
            client.settimeout(2.0)
            client.connect(f"/proc/{os.getpid()}/fd/{fd}")
        yield Finding(topic, OK, "reachable through /proc")
    except OSError as error:
        remedy = (
            "mount /proc so that a user can follow the descriptors of their processes; or set "
            "Options(transports=('tcp',)), which is slower and has no shared memory"
        )
        yield Finding(topic, WRONG, f"not reachable through /proc: {error}", remedy)
    finally:
        os.close(fd)


def loopback() -> Iterator[Finding]:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            began = time.perf_counter()
            with socket.create_connection(server.getsockname(), timeout=2.0):
                took = duration(time.perf_counter() - began)
        yield Finding("loopback", OK, f"a store on 127.0.0.1 can be served and connected to ({took})")
    except OSError as error:
        text, remedy = f"no port on 127.0.0.1: {error}", "bring the loopback interface up: ip link set lo up"
        yield Finding("loopback", WRONG, text, remedy)
        return
    try:
        place = socket.gethostbyname("localhost")
    except OSError as error:
        place = f"nothing ({error})"
    if not place.startswith("127."):
        remedy = "write 127.0.0.1 as MASTER_ADDR, or mend /etc/hosts"
        yield Finding("localhost", SLOW, f"resolves to {place}", remedy)
    found = Path("/proc/sys/net/ipv4/ip_local_port_range")
    first, last = map(int, found.read_text().split()) if found.exists() else (32768, 60999)
    if last - first < 1000:
        remedy = "sysctl net.ipv4.ip_local_port_range='32768 60999'"
        yield Finding("ports", SLOW, f"only {last - first + 1} ports for connections ({first} to {last})", remedy)


def clock() -> Iterator[Finding]:
    place = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
    source = place.read_text().strip() if place.exists() else "unknown"
    reads = [time.perf_counter() for _ in range(50_000)]
    steps = [b - a for a, b in pairwise(reads)]
    told = f"clock source {source}, read in {statistics.median(steps) * 1e9:.0f} ns"
    if min(steps) < 0:
        remedy = "boot with clocksource=tsc or hpet; until then deadlines and profiles are off"
        yield Finding("clock", WRONG, f"{told}, and it went back by {duration(-min(steps))}", remedy)
    elif statistics.median(steps) > 1e-6:
        text = f"{told}: each call reads the clock several times"
        yield Finding("clock", SLOW, text, "boot with clocksource=tsc (or kvm-clock in a virtual machine)")
    else:
        yield Finding("clock", OK, f"{told}, never back in {len(reads):,} reads")


def cores() -> Iterator[Finding]:
    usable, present = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    told = f"{usable} of {present} cores usable" if usable < present else f"{present} cores"
    quota = Path("/sys/fs/cgroup/cpu.max")
    allowed, period = quota.read_text().split() if quota.exists() else ("max", "1")
    share = usable if allowed == "max" else int(allowed) / int(period)
    if share < usable:
        text = f"{told}, but the container may use {share:.1f}: workers are stopped in the middle of calls"
        remedy = f"raise the container's cpu limit, or run at most {max(1, int(share))} workers"
        yield Finding("cores", SLOW, text, remedy)
    elif usable < 2:
        text = f"{told}: workers wait for each other's turn, and a call takes several times as long"
        yield Finding("cores", SLOW, text, "give it two cores or more; Options(spin=0) helps with one")
    else:
        yield Finding("cores", OK, told)
    load = os.getloadavg()[0]
    if load > usable:
        text = f"load {load:.1f} on {usable} cores: times measured now say little"
        yield Finding("load", SLOW, text, "wait for what else runs here")


def settings() -> Iterator[Finding]:
    env = os.environ
    if bool(env.get("MASTER_ADDR")) != bool(env.get("MASTER_PORT")):
        text = "only one of MASTER_ADDR and MASTER_PORT is set"
        yield Finding("environment", SLOW, text, "set both or none: init_rpc() with env:// reads both")
    left = [name for name in ("RANK", "WORLD_SIZE") if name in env and "TORCHELASTIC_RUN_ID" not in env]
    if left:
        text = f"{' and '.join(left)} set in this shell: init_rpc() takes it, and waits for the other ranks"
        yield Finding("environment", SLOW, text, f"unset {' '.join(left)}")
    slow = {
        "PYTHONDEVMODE": "Python's development mode", "PYTHONMALLOC": "a debugging allocator",
        "PYTHONTRACEMALLOC": "tracing of memory", "CUDA_LAUNCH_BLOCKING": "CUDA without overlap",
    }  # fmt: skip
    for name, what in slow.items():
        if env.get(name, "") not in ("", "0"):
            yield Finding("environment", SLOW, f"{name}={env[name]}: {what}; calls are slower", f"unset {name}")
    if env.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        yield Finding("environment", SLOW, "TORCH_DISTRIBUTED_DEBUG=DETAIL slows torch down", "unset it")
    if sys.gettrace() is not None:
        yield Finding("environment", SLOW, "a debugger or coverage traces Python", "run without it to measure")


def _read_int(path: str, otherwise: int) -> int:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return otherwise


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    versions, torch_build, shared_memory, memory, limits, unix_sockets, loopback, clock, cores, settings,
)  # fmt: skip


def findings() -> Iterator[Finding]:
    """Runs all checks. A check that cannot look says so, and the rest go on."""
    for check in CHECKS:
        try:
            yield from check()
        except Exception as error:
            name = check.__name__.replace("_", " ")
            yield Finding(name, SLOW, f"could not be checked: {type(error).__name__}: {error}")
