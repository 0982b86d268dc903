"""The machine a run was made on: what matters for its speed, and nothing that names it; and how busy it is."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

FAMILIES = ("epyc", "ryzen", "threadripper", "xeon", "core", "graviton", "neoverse", "apple")


@dataclass(frozen=True)
class Machine:
    cpu: str
    cores: int
    kernel: str
    python: str
    torch: str

    @classmethod
    def here(cls) -> Machine:
        return cls(
            cpu=_cpu_model(),
            cores=_usable_cores(),
            kernel=f"{platform.system()} {platform.release()}",
            python=platform.python_version(),
            torch=version("torch"),
        )

    @property
    def slug(self) -> str:
        """For a file name: `2core-epyc`."""
        words = re.findall(r"[a-z]+", self.cpu.lower())
        family = next((family for family in FAMILIES if family in words), platform.machine())
        return f"{self.cores}core-{family}"

    def __str__(self) -> str:
        cores = f"{self.cores} core{'s' if self.cores != 1 else ''}"
        return f"{self.cpu}, {cores}, {self.kernel}, Python {self.python}, torch {self.torch}"


@dataclass(frozen=True)
class Load:
    averages: tuple[float, float, float]
    """Over 1, 5 and 15 minutes. From the second round on, most of it is the benchmark's own."""
    busy: float
    """Cores in use during one second in which the benchmark does nothing: the work of others."""

    @classmethod
    def now(cls) -> Load:
        before = _core_seconds_used()
        start = time.monotonic()
        time.sleep(1.0)
        used = _core_seconds_used() - before
        return cls(os.getloadavg(), used / (time.monotonic() - start))

    def __str__(self) -> str:
        return f"{' '.join(f'{value:.2f}' for value in self.averages)} ({self.busy:.2f} cores busy)"


def _core_seconds_used() -> float:
    """By everything on this machine, waits for disks left out. 0 where there is no /proc."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, stat.read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.M) if cpuinfo.exists() else None
    return found[1].strip() if found else platform.processor() or platform.machine()


def commit_here() -> str:
    """The commit that is measured, with a + where files were changed since; COMMIT where there is no repository."""
    if given := os.environ.get("COMMIT"):
        return given
    said = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        found = subprocess.run(said, capture_output=True, text=True, check=False, timeout=10)
    except OSError:
        return ""
    return found.stdout.strip()
