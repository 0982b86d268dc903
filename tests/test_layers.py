"""The layers of the package, as data, and a check that the code keeps to them.

The check reads syntax trees and imports nothing, so it also sees imports inside functions. Imports under
``if TYPE_CHECKING:`` don't count: they are not there when the program runs.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "telegrad"

# Top first; a folder, or a file at the top level, imports only from lines below its own. Inside of a folder, imports
# form no circle.
LAYERS = """
    __main__
    cli
    demo
    compat
    profiler
    nn
    optim
    cluster
    autograd
    rpc
    rref
    graph
    worker functions
    runtime
    references
    gradients
    serialization
    transport
    rendezvous
    messages events
    primitives
    options
    errors _torch
"""

# (importer, imported): never, whatever the layers say. A folder stands for everything in it.
FORBIDDEN = [
    ("gradients", "serialization"),
    ("gradients", "transport"),
]


LONGEST_FILE = 450  # lines
MOST_FILES_AT_THE_TOP = 12


def check_layers(package: Path, layers: str, forbidden: Collection[tuple[str, str]]) -> list[str]:
    """Return one line for each violation in the package at `package`, and for each folder or file not in `layers`."""
    depth = {name: number for number, line in enumerate(layers.strip().splitlines()) for name in line.split()}
    depth[""] = -1  # the package itself, above everything
    modules = {path: _module_name(path, package) for path in sorted(package.rglob("*.py"))}
    known = {*depth, *modules.values()}

    problems = []
    inside: dict[str, dict[str, str]] = {}  # module -> the modules of its folder that it imports, and where
    for path, module in modules.items():
        shown = path.relative_to(package).as_posix()
        layer = module.partition(".")[0]
        if layer not in depth:
            problems.append(f"{shown} is in no layer; add {layer} to LAYERS in tests/test_layers.py")
            continue
        for line_number, target in _imports(path, package, known):
            other = target.partition(".")[0]
            if other not in depth:
                continue  # in no layer: said once, at its own file
            verdict = None
            banned = [pair for pair in forbidden if layer == pair[0] and other == pair[1]]
            if banned:
                verdict = f"which {layer} must never import"
            elif module == "":
                pass
            elif other == layer:
                # A folder's __init__ may bring in any of its files, and is imported by name from outside only.
                if path.name != "__init__.py" and target != module:
                    inside.setdefault(module, {})[target] = f"{shown}:{line_number}"
            elif depth[other] < depth[layer]:
                verdict = "which is above it"
            elif depth[other] == depth[layer]:
                verdict = "which is beside it"
            if verdict:
                problems.append(f"{shown}:{line_number} imports {target or package.name}, {verdict}")
    return problems + _circles(inside)


def _circles(imports: dict[str, dict[str, str]]) -> list[str]:
    """Return one line for each import that closes a circle."""
    problems = []
    done: set[str] = set()
    way: list[str] = []

    def visit(module: str) -> None:
        way.append(module)
        for target, where in sorted(imports.get(module, {}).items()):
            if target in way:
                circle = " -> ".join([*way[way.index(target) :], target])
                problems.append(f"{where} closes a circle: {circle}")
            elif target not in done:
                visit(target)
        done.add(way.pop())

    for module in sorted(imports):
        if module not in done:
            visit(module)
    return problems


def _module_name(path: Path, package: Path) -> str:
    """`gradients/engine.py` is `gradients.engine`; the package's own `__init__.py` is the empty name."""
    parts = path.relative_to(package).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def _imports(path: Path, package: Path, known: Collection[str]) -> list[tuple[int, str]]:
    """Return (line, module) for each import of one of the package's own modules, each pair once."""
    own_package = _module_name(path.parent / "__init__.py", package)
    found: dict[tuple[int, str], None] = {}
    for node in _import_statements(ast.parse(path.read_text(encoding="utf-8"), filename=str(path))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            source = node.module or ""
            if node.level:
                # One dot is the package that the module is in; each further dot is one package up.
                parents = [package.name, *own_package.split(".")] if own_package else [package.name]
                source = ".".join(parents[: len(parents) - node.level + 1] + ([source] if source else []))
            names = [f"{source}.{alias.name}" for alias in node.names]
        for name in names:
            if _within(name, package.name):
                found[node.lineno, _longest_known(name.removeprefix(package.name).lstrip("."), known)] = None
    return list(found)


def _import_statements(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            yield from _import_statements(ast.Module(body=node.orelse, type_ignores=[]))
        else:
            yield from _import_statements(node)


def _longest_known(name: str, known: Collection[str]) -> str:
    """`worker.Worker` is in module `worker`; `Worker` is in the package itself."""
    while name not in known:
        name = name.rpartition(".")[0]
    return name


def test_the_code_keeps_to_its_layers() -> None:
    assert list(PACKAGE.rglob("*.py")), f"no code found in {PACKAGE}"
    problems = check_layers(PACKAGE, LAYERS, FORBIDDEN)
    assert not problems, "\n" + "\n".join(problems)


def test_every_layer_is_there_once() -> None:
    names = LAYERS.split()
    assert sorted(names) == sorted(set(names))
    missing = [n for n in names if not (PACKAGE / n).is_dir() and not (PACKAGE / f"{n}.py").is_file()]
    assert not missing


def test_files_stay_short() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py")}
    assert not {str(path): length for path, length in lengths.items() if length > LONGEST_FILE}
    assert len(list(PACKAGE.glob("*.py"))) <= MOST_FILES_AT_THE_TOP


# The checker itself, on small trees.

SMALL_LAYERS = """
    top
    left right gradients
    base
"""
SMALL_FORBIDDEN = [("gradients", "base")]


def problems_of(tmp_path: Path, files: dict[str, str]) -> list[str]:
    package = tmp_path / "telegrad"
    for name, text in files.items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return check_layers(package, SMALL_LAYERS, SMALL_FORBIDDEN)


def test_checker_accepts_imports_from_below(tmp_path: Path) -> None:
    files = {
        "__init__.py": "from .top import f\n",
        "top.py": "import ast\nimport telegrad.left\nfrom telegrad import base, right\n",
        "left.py": "from .base import f\n",
        "right.py": "from . import base\n",
        "base.py": "import typing\n",
        "gradients/__init__.py": "from . import engine\n",
        "gradients/engine.py": "from .nodes import f\n",
        "gradients/nodes.py": "",
    }
    assert problems_of(tmp_path, files) == []


def test_checker_reports_every_spelling_of_an_import_from_above(tmp_path: Path) -> None:
    text = "\n".join(
        [
            "import telegrad.top",
            "import telegrad.top as t",
            "from telegrad import top",
            "from telegrad.top import f, g",
            "from . import top",
            "from .top import f",
            "from telegrad import f",
        ]
    )
    expected = [f"base.py:{line} imports top, which is above it" for line in range(1, 7)]
    assert problems_of(tmp_path, {"top.py": "", "base.py": text}) == [
        *expected,
        "base.py:7 imports telegrad, which is above it",
    ]


def test_checker_resolves_dots_from_inside_a_package(tmp_path: Path) -> None:
    files = {"gradients/nodes.py": "from .engine import f\nfrom .. import top\nfrom ..left import f\n"}
    assert problems_of(tmp_path, {"top.py": "", "left.py": "", "gradients/engine.py": "", **files}) == [
        "gradients/nodes.py:2 imports top, which is above it",
        "gradients/nodes.py:3 imports left, which is beside it",
    ]


def test_checker_reports_an_import_from_beside(tmp_path: Path) -> None:
    assert problems_of(tmp_path, {"left.py": "from telegrad import right\n"}) == [
        "left.py:1 imports right, which is beside it"
    ]


def test_checker_reports_a_circle_inside_of_a_folder(tmp_path: Path) -> None:
    files = {
        "gradients/__init__.py": "from . import engine\n",
        "gradients/engine.py": "from .nodes import f\n",
        "gradients/nodes.py": "from . import leaves\n",
        "gradients/leaves.py": "def f():\n    from .engine import g\n",
    }
    assert problems_of(tmp_path, files) == [
        "gradients/leaves.py:2 closes a circle: gradients.engine -> gradients.nodes -> gradients.leaves -> "
        "gradients.engine"
    ]


def test_checker_sees_imports_inside_functions(tmp_path: Path) -> None:
    text = "def f():\n    try:\n        from telegrad import top\n    finally:\n        pass\n"
    assert problems_of(tmp_path, {"base.py": text}) == ["base.py:3 imports top, which is above it"]


def test_checker_leaves_out_imports_for_types_only(tmp_path: Path) -> None:
    text = (
        "import typing\nfrom typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from telegrad import top\n"
        "if typing.TYPE_CHECKING:\n    from telegrad import top\nelse:\n    from telegrad import left\n"
    )
    assert problems_of(tmp_path, {"base.py": text}) == ["base.py:8 imports left, which is above it"]


def test_checker_reports_a_forbidden_import_from_below(tmp_path: Path) -> None:
    files = {
        "gradients/__init__.py": "from telegrad import base\n",
        "gradients/nodes.py": "from ..base import f\n",
    }
    assert problems_of(tmp_path, files) == [
        "gradients/__init__.py:1 imports base, which gradients must never import",
        "gradients/nodes.py:1 imports base, which gradients must never import",
    ]


def test_checker_asks_for_an_unlisted_module(tmp_path: Path) -> None:
    files = {"utils.py": "from telegrad import top\n", "left.py": "from telegrad.utils import f\n"}
    assert problems_of(tmp_path, files) == ["utils.py is in no layer; add utils to LAYERS in tests/test_layers.py"]
