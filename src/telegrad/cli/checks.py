"""What `telegrad doctor` looks at: one function for each thing on this machine that telegrad leans on.

Each gives findings. A finding that is not fine says what to do about it.
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

from .figures import duration, size

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
        wanted = [line for line in requires("telegrad") or [] if "extra ==" not in line]
        found = [f"telegrad {version('telegrad')}"]
    except PackageNotFoundError:
        yield Finding("packages", SLOW, "telegrad runs from its sources, and is not installed", "pip install -e .")
        wanted, found = [], []
    for line in wanted:
        match = re.match(r"([\w-]+)(?:>=([\d.]+))?", line)
        assert match is not None
        name, least = match.groups()
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            yield Finding("packages", WRONG, f"{name} is not installed", f"pip install '{line}'")
            continue
        if least is not None and _numbers(version(name)) < _numbers(least):
            newer = f"pip install --upgrade '{line}'"
            yield Finding("packages", WRONG, f"{name} {version(name)} is older than {least}", newer)
    if found:
        yield Finding("packages", OK, ", ".join(found))
    if shutil.which("dot"):
        yield Finding("graphviz", OK, "the program dot is there")
    else:
        what = "no program dot: pictures of graphs fall back to text"
        yield Finding("graphviz", SLOW, what, "install graphviz with the system's package manager")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", text.partition("+")[0])[:3])


def torch_build() -> Iterator[Finding]:
    import torch
    import torch.distributed as distributed

    devices = f"{torch.cuda.device_count()} CUDA devices" if torch.cuda.is_available() else "CPU only"
    told = f"torch {torch.__version__}, {devices}, {torch.get_num_threads()} threads for operators"
    if not distributed.is_available():
        yield Finding("torch", WRONG, f"{told}; built without torch.distributed", "install a standard build of torch")
    else:
        yield Finding("torch", OK, told)


def shared_memory() -> Iterator[Finding]:
    slower = "large messages go through the socket, which is slower"
    try:
        from ..transport.shared_memory import SegmentPool

        pool = SegmentPool(MIB, shared=True)
        try:
            pool.take(MIB).view()[:5] = b"hello"
        finally:
            pool.close()
        yield Finding("memfd", OK, "sealed shared memory can be made and mapped")
    except OSError as error:
        remedy = f"{slower}; allow memfd_create in the sandbox or seccomp profile that this runs in"
        yield Finding("memfd", SLOW, f"no shared memory: {error}", remedy)
    free = shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else 0
    if free < 64 * MIB:
        text = f"/dev/shm has {size(free)} free; telegrad does not use it, but torch's DataLoader does"
        yield Finding("/dev/shm", SLOW, text, "in a container: --shm-size=1g")
    else:
        yield Finding("/dev/shm", OK, f"{size(free)} free (telegrad uses memfd, torch's DataLoader this)")
    yield _memory()
    maps = _read_int("/proc/sys/vm/max_map_count", 65530)
    if maps < 16384:
        yield Finding("mappings", SLOW, f"vm.max_map_count is {maps}", "sysctl vm.max_map_count=65530")
    if _read_int("/proc/sys/vm/overcommit_memory", 0) == 2:
        text = "vm.overcommit_memory is 2: allocations may fail although memory is free"
        yield Finding("overcommit", SLOW, text, "sysctl vm.overcommit_memory=0, or lower Options.pool_bytes")


def _memory() -> Finding:
    match = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    free = int(match[1]) * 1024 if match else 0
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        limit = _read_int(name, 0)
        if 0 < limit < 1 << 50:
            used = _read_int("/sys/fs/cgroup/memory.current", 0)
            free = min(free, limit - used)
    if free < 1024 * MIB:
        text = f"{size(free)} available; a connection keeps up to 1 GiB of shared memory for reuse"
        return Finding("memory", SLOW, text, "free some, or set Options(pool_bytes=...) lower")
    return Finding("memory", OK, f"{size(free)} available")


def limits() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    told = f"{soft} open files allowed (at most {hard})"
    if soft < 256:
        yield Finding("descriptors", WRONG, told, f"ulimit -n {min(65536, hard)}")
    elif soft < 1024:
        text = f"{told}: each peer takes a few, and so does each large message on its way"
        yield Finding("descriptors", SLOW, text, f"ulimit -n {min(65536, hard)}")
    else:
        yield Finding("descriptors", OK, told)
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft != resource.RLIM_INFINITY and soft < 512:
        yield Finding("threads", SLOW, f"{soft} processes and threads allowed for this user", "ulimit -u 4096")
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY and soft < 16 << 30:
        yield Finding("address space", SLOW, f"limited to {size(soft)}", "ulimit -v unlimited")


def unix_sockets() -> Iterator[Finding]:
    topic, slower = (
        "unix sockets",
        "or set Options(transports=('tcp',)), which is slower and has no shared memory",
    )
    directory = tempfile.gettempdir()
    if not os.access(directory, os.W_OK):
        yield Finding(topic, WRONG, f"the directory {directory} cannot be written to", "set TMPDIR to one that can")
        return
    from ..transport.unix import bind_unseen

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
        remedy = f"mount /proc so that a user can follow the descriptors of their processes; {slower}"
        yield Finding(topic, WRONG, f"not reachable through /proc: {error}", remedy)
    finally:
        os.close(fd)


def loopback() -> Iterator[Finding]:
    topic = "loopback"
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            began = time.perf_counter()
            with socket.create_connection(server.getsockname(), timeout=2.0):
                took = time.perf_counter() - began
        yield Finding(topic, OK, f"a store on 127.0.0.1 can be served and connected to ({duration(took)})")
    except OSError as error:
        yield Finding(
            topic,
            WRONG,
            f"no port on 127.0.0.1: {error}",
            "bring the loopback interface up: ip link set lo up",
        )
        return
    try:
        place = socket.gethostbyname("localhost")
        if not place.startswith("127."):
            yield Finding(
                "localhost",
                SLOW,
                f"resolves to {place}",
                "write 127.0.0.1 as MASTER_ADDR, or mend /etc/hosts",
            )
    except OSError as error:
        text = f"the name does not resolve ({error})"
        yield Finding("localhost", SLOW, text, "write 127.0.0.1 as MASTER_ADDR, or mend /etc/hosts")
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
    if allowed != "max" and int(allowed) / int(period) < usable:
        share = int(allowed) / int(period)
        text = f"{told}, but the container may use {share:.1f}: workers are stopped in the middle of calls"
        yield Finding(
            "cores",
            SLOW,
            text,
            f"raise the container's cpu limit, or run at most {max(1, int(share))} workers",
        )
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
    strange = len(list(filter(None, (env.get("MASTER_ADDR"), env.get("MASTER_PORT"))))) == 1
    if strange:
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
    if hasattr(sys, "gettrace") and sys.gettrace() is not None:
        yield Finding("environment", SLOW, "a debugger or coverage traces Python", "run without it to measure")


def _read_int(path: str, otherwise: int) -> int:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return otherwise


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    versions, torch_build, shared_memory, limits, unix_sockets, loopback, clock, cores, settings,
)  # fmt: skip


def findings() -> Iterator[Finding]:
    """All of them, one after the other. A check that cannot look says so, and the rest go on."""
    for check in CHECKS:
        try:
            yield from check()
        except Exception as error:
            name = check.__name__.replace("_", " ")
            yield Finding(name, SLOW, f"could not be checked: {type(error).__name__}: {error}", "")
