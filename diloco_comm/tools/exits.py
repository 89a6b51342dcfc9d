"""How a sub-command ends when it cannot do what was asked."""

from __future__ import annotations

import sys
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
