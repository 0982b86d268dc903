"""The machine a run was made on: what matters for its speed, and nothing that names it."""

from __future__ import annotations

import os
import platform
import re
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


def _usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(), re.M) if cpuinfo.exists() else None
    return found[1].strip() if found else platform.processor() or platform.machine()
