"""How a sub-command ends when it cannot do what was asked."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from typing import NoReturn

import typer

FAILED = 1
MISUSED = 2


def misuse(message: str) -> NoReturn:
    """End with status 2 after one sentence: what was given is wrong, and what was expected."""
    print(f"diloco-comm: {message}", file=sys.stderr)
    raise typer.Exit(MISUSED)


def fail(message: str) -> NoReturn:
    """End with status 1 after one sentence: the request was right, but could not be met."""
    print(f"diloco-comm: {message}", file=sys.stderr)
    raise typer.Exit(FAILED)


def in_options(sentence: str, names: Iterable[str]) -> str:
    """Call the arguments that a sentence of the library names by their options here.

    Args:
        names: Of the arguments; a name of one word is told from plain words by its place.
    """
    for name in names:
        forms = [rf"^(the |outer )?{name}(?= (must|is)\b)", rf"\b{name}=(True)?"]
        forms += [rf"\b{name}\b"] * ("_" in name)
        sentence = re.sub("|".join(forms), f"--{name.replace('_', '-')}", sentence)
    return sentence
