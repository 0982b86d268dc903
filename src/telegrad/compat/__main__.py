"""python -m telegrad.compat script.py ARGS: runs a script of torch's RPC on telegrad. `-m module` runs a module.

The script runs as Python itself would run it: in a module `__main__` of its own that stays where it is, since workers
may serve calls until the end of the process, in handlers of `atexit` and in threads. It imports from its own folder
first, and a module from the current directory; what telegrad imports comes from neither (current_directory.py).
"""

from __future__ import annotations

import io
import os
import sys
import types
import zipfile
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import find_spec
from typing import Any

from ..primitives import current_directory
from .replacing import install

USAGE = """usage: python -m telegrad.compat script.py [arguments of the script ...]
       python -m telegrad.compat -m module [arguments of the module ...]"""


def main() -> None:
    given = sys.argv[1:]
    if not given or given[0] in ("-h", "--help"):
        print(USAGE, file=sys.stderr)
        sys.exit(0 if given else 2)
    is_module = given[0] == "-m"
    if is_module and len(given) < 2:
        sys.exit(f"telegrad.compat: -m needs the name of a module\n{USAGE}")
    if not is_module and not os.path.exists(given[0]):
        sys.exit(f"telegrad.compat: there is no script {given[0]!r}\n{USAGE}")
    install()
    current_directory.put_back()
    sys.argv = given[1:] if is_module else given
    _run(*(_find_module(given[1]) if is_module else _find_script(given[0])))


def _run(code: types.CodeType, spec: ModuleSpec | None, loader: Any, file: str) -> None:
    module = types.ModuleType("__main__")
    package = spec.parent if spec is not None else None
    cached = spec.cached if spec is not None else None
    vars(module).update(__spec__=spec, __loader__=loader, __package__=package, __cached__=cached, __file__=file)
    sys.modules["__main__"] = module
    exec(code, vars(module))


def _find_script(path: str) -> tuple[types.CodeType, ModuleSpec | None, Any, str]:
    file = os.path.abspath(path)
    if os.path.isdir(file) or zipfile.is_zipfile(file):
        _put_first(file, always=True)
        return _found("__main__", PathFinder.find_spec("__main__", [file]), f"{path!r} has no __main__.py")
    _put_first(os.path.dirname(os.path.realpath(file)))
    with io.open_code(file) as script:
        code = compile(script.read(), file, "exec", dont_inherit=True)
    return code, None, SourceFileLoader("__main__", file), file


def _find_module(name: str) -> tuple[types.CodeType, ModuleSpec | None, Any, str]:
    missing = f"there is no module {name!r} that can be run"
    try:
        spec = find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            name, missing = f"{name}.__main__", f"{name!r} is a package without a __main__.py"
            spec = find_spec(name)
    except (ImportError, ValueError) as error:
        sys.exit(f"telegrad.compat: {missing}: {error}")
    code, spec, loader, file = _found(name, spec, missing)
    sys.argv[0] = file
    return code, spec, loader, file


def _found(name: str, spec: ModuleSpec | None, missing: str) -> tuple[types.CodeType, ModuleSpec, Any, str]:
    loader: Any = spec.loader if spec is not None else None
    code = loader.get_code(name) if hasattr(loader, "get_code") else None
    if spec is None or code is None or spec.origin is None:
        sys.exit(f"telegrad.compat: {missing}")
    return code, spec, loader, spec.origin


def _put_first(place: str, *, always: bool = False) -> None:
    """Has Python look there first, where it puts a script's directory; else the current one is there, for -m. With
    `python -P` neither is, and only what is `always` there comes first: a script that is a directory itself."""
    if not sys.flags.safe_path:
        sys.path[0] = place
    elif always:
        sys.path.insert(0, place)


if __name__ == "__main__":
    main()
