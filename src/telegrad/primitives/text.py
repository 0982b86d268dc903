"""Names and texts of other workers, made harmless for terminals."""

from __future__ import annotations

LONGEST_NAME = 255


def check_name(name: object) -> None:
    """A worker's name: what every log, table and terminal can show as it is.

    Raises:
        ValueError: it is none, and why.
    """
    if not isinstance(name, str) or not name:
        raise ValueError(f"a worker's name is a string that is not empty, not {name!r}")
    if len(name) > LONGEST_NAME:
        raise ValueError(f"a worker's name has at most {LONGEST_NAME} characters; {name[:20]!r}... has {len(name)}")
    if not name.isprintable():
        raise ValueError(
            f"the worker's name {name!r} has characters that cannot be printed, such as line ends or escape "
            "sequences; choose another name"
        )


def clean(text: str) -> str:
    """The text in one line, with control characters and the like written out: `\\x1b` for an escape. It may have come
    from another worker or a file, and a terminal must not obey it."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def clean_lines(text: str) -> str:
    """As clean(), with its lines left as they are."""
    return "\n".join(map(clean, text.split("\n")))
