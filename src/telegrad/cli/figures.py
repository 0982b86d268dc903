"""Figures in words: short, so that columns are narrow."""

from __future__ import annotations


def number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if 0 < value < 10 else f"{value:,.0f}"


def count(value: int | None, separator: str = ",") -> str:
    return "-" if value is None else f"{value:{separator}}"


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
