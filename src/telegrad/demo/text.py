"""The text: the source of Python's own standard library, which every machine has."""

from __future__ import annotations

import string
import sysconfig
from pathlib import Path

import torch
from torch import Tensor

from ..errors import TelegradError

CHARACTERS = "\n " + string.digits + string.ascii_letters + string.punctuation
ENOUGH = 2_000_000  # characters

_NUMBERS = {character: number for number, character in enumerate(CHARACTERS)}
_OTHERS = bytes(byte for byte in range(256) if chr(byte) not in _NUMBERS)


def standard_library() -> str:
    """Its public modules one after the other, in the order of their names, until it is enough.

    Raises:
        TelegradError: this Python came without their source.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    source = b""
    for path in sorted(folder.glob("[a-z]*.py")):
        source += path.read_bytes().expandtabs().translate(None, _OTHERS)
        if len(source) > ENOUGH:
            break
    if len(source) < 10_000:
        raise TelegradError(
            f"the demo learns from the source of Python's standard library, and {folder} has none of it; run the demo "
            "with a Python that came with its source"
        )
    return source.decode("ascii")


def encode(text: str) -> Tensor:
    """The number of each character."""
    return torch.tensor([_NUMBERS[character] for character in text])


def decode(numbers: Tensor) -> str:
    """The characters again."""
    return "".join(CHARACTERS[number] for number in numbers.tolist())
