"""`telegrad doctor`: what would go wrong on this machine, and how to mend it.

The checks (checks.py) only look; the self-test (selftest.py) starts workers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from .checks import OK, SLOW, WRONG, Finding, findings
from .output import Code, console

_SIGNS = {OK: ("ok", "green"), SLOW: ("!", "yellow"), WRONG: ("X", "bold red")}


def examine(*, as_json: bool, with_test: bool) -> int:
    """Prints the findings. Returns the exit code: 1 if something is wrong."""
    target, found = console(), []
    for finding in _all(with_test):
        found.append(finding)
        if not as_json:
            _tell(target, finding)
    wrong = sum(finding.status == WRONG for finding in found)
    warnings = sum(finding.status == SLOW for finding in found)
    if as_json:
        print(json.dumps({"wrong": wrong, "warnings": warnings, "findings": [asdict(f) for f in found]}, indent=2))
    elif wrong:
        target.print(f"[bold red]{wrong} wrong[/]: telegrad will fail here until this is mended")
    else:
        works = "telegrad works here" if with_test else "nothing is wrong (no workers were started to try it)"
        target.print(f"[green]{works}[/]" + (f", with {warnings} warning{'s' * (warnings > 1)}" if warnings else ""))
    return Code.WRONG if wrong else Code.FINE


def _all(with_test: bool) -> Iterator[Finding]:
    yield from findings()
    if with_test:
        from .selftest import self_test  # here: the checks must run where torch cannot be imported

        yield from self_test()


def _tell(target: Console, finding: Finding) -> None:
    sign, style = _SIGNS[finding.status]
    narrow = target.width < 60
    topic = f"{finding.topic}: " if narrow else f"{finding.topic:<14}"
    indent = 3 if narrow else 17
    _print_hanging(target, Text.assemble((f"{sign:<3}", style), (topic, "bold"), finding.text), indent)
    if finding.remedy:
        _print_hanging(target, Text.assemble(" " * indent, ("-> ", style), finding.remedy), indent + 3)


def _print_hanging(target: Console, line: Text, indent: int) -> None:
    """Indents all lines but the first. Where there is no terminal, it is one line."""
    if not target.is_terminal:
        target.print(line, soft_wrap=True)
        return
    first, *rest = line.wrap(target, target.width)
    target.print(first, soft_wrap=True)
    if rest:
        target.print(Padding(line[len(first.plain) :].plain.lstrip(), (0, 0, 0, indent)))
