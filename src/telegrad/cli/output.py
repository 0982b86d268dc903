"""What commands write to, and how they end: plain text where there is no terminal, and exit codes for scripts."""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NoReturn

from rich.console import Console
from rich.table import Table

from ..primitives.text import clean_lines


class Code(IntEnum):
    """How a command ends. `telegrad run` ends with the code of the process that failed first."""

    FINE = 0
    WRONG = 1  # it ran, and found or met something wrong
    USAGE = 2  # it was not asked for something that it can do
    NOBODY = 3  # nobody answers there
    INTERRUPTED = 130  # Ctrl-C, as a shell has it: 128 + the number of the signal


class Stopped(Exception):
    """A command cannot go on: the text is for the user."""

    def __init__(self, text: str, code: int = Code.WRONG) -> None:
        super().__init__(text)
        self.code = int(code)


def console(**options: Any) -> Console:
    """To stdout, with nothing coloured by guess."""
    return Console(highlight=False, soft_wrap=False, **options)


def error_console() -> Console:
    return Console(stderr=True, highlight=False, soft_wrap=True)


def stop(command: str, text: str, code: int = Code.WRONG) -> NoReturn:
    """Says why on stderr, and ends the process."""
    from typer import Exit

    error_console().print(f"[bold red]telegrad {command}:[/] ", end="", markup=True)
    error_console().print(clean_lines(text), markup=False)
    raise Exit(int(code))


def show(target: Console, table: Table) -> None:
    """A table: framed at a terminal, with no more than blanks between its columns elsewhere."""
    if target.is_terminal:
        target.print(table)
        return
    table.box, table.pad_edge, table.show_edge = None, False, False
    wide = Console(file=target.file, width=10_000, highlight=False, color_system=None)
    with wide.capture() as captured:
        wide.print(table)
    for line in captured.get().splitlines():
        target.file.write(line.rstrip() + "\n")
