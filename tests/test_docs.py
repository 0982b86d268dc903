"""What the documents say is true: their programs run, their links lead somewhere, and no error is left out."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

from telegrad import errors

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
FROM_SCRATCH = ROOT / "docs" / "from_scratch.py"
PATIENCE = 60.0

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]


def programs() -> list[pytest.param]:
    """Each Python block of each document."""
    found = []
    for document in DOCUMENTS:
        blocks = re.findall(r"^```python\n(.*?)^```", document.read_text(encoding="utf-8"), re.S | re.M)
        found += [pytest.param(block, id=f"{document.stem}-{n}") for n, block in enumerate(blocks, 1)]
    return found


@pytest.mark.parametrize("program", programs())
def test_a_program_runs_as_it_is(program: str, tmp_path: Path) -> None:
    """What a line should print stands behind it, as a comment: `print(x)  # 3`."""
    script = tmp_path / "program.py"
    script.write_text(program, encoding="utf-8")
    launcher = TORCHRUN if "torchrun" in program.splitlines()[0] else [sys.executable]
    done = subprocess.run(
        [*launcher, str(script)], capture_output=True, text=True, timeout=PATIENCE, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    expected = re.findall(r"^\s*print\(.*\)  # (.+)$", program, re.M)
    assert expected, "the program prints nothing that could be checked"
    assert done.stdout.splitlines() == expected


def test_the_idea_from_scratch_runs(tmp_path: Path) -> None:
    """It compares its gradients with local autograd's by itself, and raises if they differ."""
    done = subprocess.run(
        [sys.executable, "-W", "error", str(FROM_SCRATCH)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.splitlines()[-1] == "all gradients are equal"


def test_the_idea_from_scratch_needs_only_torch() -> None:
    """It explains telegrad, so it may not lean on it."""
    imported = set(re.findall(r"^\s*(?:import|from) (\w+)", FROM_SCRATCH.read_text(encoding="utf-8"), re.M))
    assert imported - sys.stdlib_module_names == {"torch"}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: d.stem)
def test_links_lead_somewhere(document: Path) -> None:
    text = re.sub(r"^```.*?^```", "", document.read_text(encoding="utf-8"), flags=re.S | re.M)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        if "://" in path:
            continue
        linked = (document.parent / path).resolve() if path else document
        assert linked.exists(), f"{document.name} links to {target}"
        if anchor:
            assert anchor in anchors(linked), f"{document.name} links to {target}"


def anchors(document: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", document.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def test_every_error_is_described() -> None:
    headings = re.findall(r"^### (\w+)$", (ROOT / "docs" / "errors.md").read_text(encoding="utf-8"), re.M)
    classes = [
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, BaseException) and value.__module__ == errors.__name__
    ]
    assert sorted(headings) == sorted(classes)


def test_every_error_is_in_the_drawn_tree() -> None:
    assert errors.__doc__ is not None
    for name, value in vars(errors).items():
        if inspect.isclass(value) and issubclass(value, errors.TelegradError):
            assert re.search(rf"\b{name}\b", errors.__doc__), f"{name} is missing in the docstring of errors.py"


def test_documents_name_files_that_exist() -> None:
    """Paths within the repository that stand in backticks."""
    folders = r"(?:src|tests|docs|examples|benchmarks|scripts|transport)"
    for document in DOCUMENTS:
        for path in re.findall(rf"`({folders}/[\w./-]+\w)`", document.read_text(encoding="utf-8")):
            places = (ROOT / path, ROOT / "src" / "telegrad" / path)
            is_there = any(place.exists() for place in places)
            assert is_there, f"{document.name} names {path}, which is not there"
