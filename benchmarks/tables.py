"""One table, two dresses: Markdown (for the results file and pipes) and rich (for a terminal)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Grid:
    header: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    """The first column is text, the others are figures."""

    def markdown(self) -> str:
        widths = [max(len(cell) for cell in column) for column in zip(self.header, *self.rows, strict=True)]
        rule = tuple(("-" * width)[:-1] + ("-" if i == 0 else ":") for i, width in enumerate(widths))
        return "\n".join(_markdown_row(row, widths) for row in (self.header, rule, *self.rows))

    def print(self, title: str) -> None:
        from rich.console import Console
        from rich.table import Table

        console = Console()
        if not console.is_terminal:
            print(f"{title}\n\n{self.markdown()}\n")
            return
        table = Table(title=title, title_justify="left")
        for i, name in enumerate(self.header):
            table.add_column(name, justify="right" if i else "left", no_wrap=i == 0)
        for row in self.rows:
            table.add_row(*row, style={"yes": "green", "no": "red"}.get(row[-1]))
        console.print(table)


def _markdown_row(row: tuple[str, ...], widths: list[int]) -> str:
    cells = (
        cell.rjust(width) if i else cell.ljust(width) for i, (cell, width) in enumerate(zip(row, widths, strict=True))
    )
    return f"| {' | '.join(cells)} |"
