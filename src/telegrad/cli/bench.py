"""`telegrad bench`: the repository's benchmarks where they are, else a short comparison of single calls."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from .output import Code, Stopped, console, error_console


def measure(arguments: list[str], *, short: bool, with_torch: bool, as_json: bool) -> int:
    """The exit code: that of the benchmarks, or 0.

    Raises:
        Stopped: the arguments make no sense, or something could not be measured.
    """
    repository = None if short or as_json or not with_torch else _repository()
    if repository is not None:
        return _run_benchmarks(repository, arguments)
    if arguments:
        raise Stopped(
            f"{' '.join(arguments)!r} is for the repository's benchmarks, and this is the built-in comparison: leave "
            "it out, or go to a checkout of the repository (and leave out --short, --no-torch and --json)",
            Code.USAGE,
        )
    return _compare(with_torch=with_torch, as_json=as_json)


def _repository() -> Path | None:
    """The checkout that we are in, or that this package is used from."""
    for place in (Path.cwd(), Path(__file__).resolve().parents[3]):
        if (place / "benchmarks" / "__main__.py").is_file() and (place / "src" / "telegrad").is_dir():
            return place
    return None


def _run_benchmarks(repository: Path, arguments: list[str]) -> int:
    command = [sys.executable, "-m", "benchmarks", *arguments]
    error_console().print(f"[dim]in {repository}: python -m benchmarks {' '.join(arguments)}[/]")
    path = os.pathsep.join(filter(None, [str(repository / "src"), os.environ.get("PYTHONPATH", "")]))
    # Ctrl-C reaches it too, and it ends its own processes: all that is left to us is to wait for that.
    with subprocess.Popen(command, cwd=repository, env={**os.environ, "PYTHONPATH": path}) as process:
        while True:
            try:
                code = process.wait()
                break
            except KeyboardInterrupt:
                continue
    return code if code >= 0 else 128 - code


def _compare(*, with_torch: bool, as_json: bool) -> int:
    import torch
    import torch.distributed.rpc as torch_rpc

    from ..cluster.local import LocalCluster
    from ..errors import TelegradError
    from .comparison import FIGURES, compare

    target = error_console() if as_json else console()
    if with_torch and not torch_rpc.is_available():
        target.print("note        this torch has no torch.distributed.rpc: telegrad alone")
        with_torch = False
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > cores / 2:
        target.print(f"note        this machine is busy (load {load:.1f}, {cores} cores); it shows in all times")
    torch.set_num_threads(1)
    handler = signal.signal(signal.SIGTERM, _stop)
    try:
        began = time.perf_counter()
        with LocalCluster(["callee"]) as cluster:
            target.print(f"start-up    {time.perf_counter() - began:.1f} s for a worker")
            results = compare(target, cluster.names[0], FIGURES, with_torch=with_torch)
    except (TelegradError, RuntimeError) as error:
        raise Stopped(str(error)) from error
    finally:
        signal.signal(signal.SIGTERM, handler)
    if as_json:
        told = [{"call": r.title, "telegrad_seconds": r.telegrad, "torch_seconds": r.torch} for r in results]
        print(json.dumps({"torch": torch.__version__, "figures": told}, indent=2))
    return Code.FINE


def _stop(number: int, frame: object) -> None:
    """SIGTERM ends it as Ctrl-C does, by an exception, so that the processes are ended too."""
    raise SystemExit(128 + number)
