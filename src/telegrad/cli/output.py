"""Where commands write to, figures in words, and how commands end: plain text without a terminal, exit codes."""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NoReturn

from rich.console import Console
from rich.table import Table

from ..primitives.text import clean_lines


class Code(IntEnum):
    """The exit code of a command. `telegrad run` ends with the code of the rank that failed first."""

    FINE = 0
    WRONG = 1  # the command ran, and found or met something wrong
    USAGE = 2
    SILENT = 3  # no group answers at the address
    INTERRUPTED = 130  # Ctrl-C, as a shell has it: 128 + the number of the signal


class Stopped(Exception):
    """A command cannot go on: the text is for the user."""

    def __init__(self, text: str, code: int = Code.WRONG) -> None:
        super().__init__(text)
        self.code = int(code)


def console(**options: Any) -> Console:
    return Console(highlight=False, soft_wrap=False, **options)


def error_console() -> Console:
    return Console(stderr=True, highlight=False, soft_wrap=True)


def stop(command: str, text: str, code: int = Code.WRONG) -> NoReturn:
    """Prints the reason on stderr, and ends the command."""
    from typer import Exit

    error_console().print(f"[bold red]telegrad {command}:[/] ", end="", markup=True)
    error_console().print(clean_lines(text), markup=False)
    raise Exit(int(code))


def show(target: Console, table: Table) -> None:
    """Prints a table: framed at a terminal, with nothing but blanks between its columns elsewhere."""
    if target.is_terminal:
        target.print(table)
        return
    table.box, table.pad_edge, table.show_edge = None, False, False
    wide = Console(file=target.file, width=10_000, highlight=False, color_system=None)
    with wide.capture() as captured:
        wide.print(table)
    for line in captured.get().splitlines():
        target.file.write(line.rstrip() + "\n")


# -- figures in words: short, so that columns are narrow; "-" where there is no figure -----------------------


def number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if 0 < value < 10 else f"{value:,.0f}"


def size(value: float | None) -> str:
    if value is None:
        return "-"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" or value >= 99.5 else f"{value:.1f} {unit}"


def duration(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    for factor, unit in ((1e6, "µs"), (1e3, "ms")):
        if seconds * factor < 999.5:
            return f"{seconds * factor:.{0 if seconds * factor >= 99.5 or unit == 'µs' else 1}f} {unit}"
    return f"{seconds:.1f} s"
