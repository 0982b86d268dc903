"""`telegrad doctor`: what would go wrong on this machine, and how to mend it."""

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
    """Looks, tells, and gives the exit code: 1 if something is wrong."""
    target = console()
    found = []
    for finding in _all(with_test):
        found.append(finding)
        if not as_json:
            _tell(target, finding)
    wrong = sum(finding.status == WRONG for finding in found)
    warnings = sum(finding.status == SLOW for finding in found)
    if as_json:
        print(json.dumps({"wrong": wrong, "warnings": warnings, "findings": [asdict(f) for f in found]}, indent=2))
    else:
        target.print(_verdict(wrong, warnings, with_test))
    return Code.WRONG if wrong else Code.FINE


def _all(with_test: bool) -> Iterator[Finding]:
    yield from findings()
    if with_test:
        from .selftest import self_test

        yield from self_test()


def _tell(target: Console, finding: Finding) -> None:
    sign, style = _SIGNS[finding.status]
    narrow = target.width < 60
    topic = f"{finding.topic}: " if narrow else f"{finding.topic:<14}"
    line = Text.assemble((f"{sign:<3}", style), (topic, "bold"), finding.text)
    indent = 3 if narrow else 17
    _print_hanging(target, line, indent)
    if finding.remedy:
        _print_hanging(target, Text.assemble(" " * indent, ("-> ", style), finding.remedy), indent + 3)


def _print_hanging(target: Console, line: Text, indent: int) -> None:
    """Further lines begin under the first one's text. Where there is no terminal, it is one line."""
    if not target.is_terminal:
        target.print(line, soft_wrap=True)
        return
    first, *rest = line.wrap(target, target.width)
    target.print(first, soft_wrap=True)
    if rest:
        target.print(Padding(line[len(first.plain) :].plain.lstrip(), (0, 0, 0, indent)))


def _verdict(wrong: int, warnings: int, with_test: bool) -> str:
    if wrong:
        return f"[bold red]{wrong} wrong[/]: telegrad will fail here until this is mended"
    works = "telegrad works here" if with_test else "nothing is wrong (no workers were started to try it)"
    return f"[green]{works}[/]" + (f", with {warnings} warning{'s' * (warnings > 1)}" if warnings else "")
