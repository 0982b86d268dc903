"""A second device, "twin", in any process that imports this: see twin.cpp, which is compiled at the first import.

torch's autograd engine runs the nodes of its tensors on a thread of their own, as it does with a GPU's. So what a pass
does beside devices can be tested where there is no GPU; but for streams, since an operator's work is done when it
returns. For good: a process that has it must run nothing else. There is no undoing it in torch.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import shutil
import subprocess
import types
from pathlib import Path

import torch

NAME = "twin"
SOURCE = Path(__file__).with_name("twin.cpp")
COMPILER = shutil.which("g++")


def _build() -> Path:
    """Compiles the source, unless that was done before for this source and this torch."""
    torch_files = Path(torch.__file__).parent
    headers = [torch_files / "include", torch_files / "include/torch/csrc/api/include"]
    options = ["-O1", "-fPIC", "-shared", "-std=c++20", *[f"-I{path}" for path in headers]]
    libraries = [f"-L{torch_files / 'lib'}", "-ltorch_cpu", "-lc10"]
    kind = f"{torch.__version__} {COMPILER} {options} {libraries}"
    name = hashlib.sha256(SOURCE.read_bytes() + kind.encode()).hexdigest()[:16]
    folder = Path(__file__).parents[2] / "build"  # which git ignores
    folder.mkdir(exist_ok=True)
    built = folder / f"twin-{name}.so"
    with (folder / "twin-lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # others may be about to
        if not built.exists():
            assert COMPILER is not None, "the device has to be compiled, and there is no g++"
            unfinished = built.with_suffix(".tmp")
            subprocess.run([COMPILER, *options, SOURCE, *libraries, "-o", unfinished], check=True, timeout=600)
            unfinished.rename(built)
    return built


def _module() -> types.ModuleType:
    """What torch looks for as torch.twin."""
    module = types.ModuleType(f"torch.{NAME}")
    functions = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "_is_in_bad_fork": lambda: False,
        "manual_seed_all": lambda seed: None,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16, torch.float32],
    }
    vars(module).update(functions)
    return module


def _load() -> ctypes.CDLL:
    torch.utils.rename_privateuse1_backend(NAME)
    found = ctypes.CDLL(str(_build()))
    found.twin_register()
    torch._register_device_module(NAME, _module())
    torch.cuda.is_initialized = lambda: True  # which is how telegrad knows that there are devices
    torch.cuda.synchronize = lambda *_: None
    return found


_library = _load()


def set_delay(microseconds: int) -> None:
    """Makes each operator on it take longer."""
    _library.twin_set_delay(microseconds)
