"""Output of sub-commands: for people or, with ``--json``, for programs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ...base.files import whole_file
from .exits import fail

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

# Columns; every table of this package is narrower.
_WIDEST = 1000


def announcer(as_json: bool) -> Callable[[str], None]:
    """Return a function that prints the address on which a command listens."""

    def announce(address: str) -> None:
        text = json.dumps({"schema": 1, "address": address}) if as_json else address
        print(text, flush=True)

    return announce


def print_whole(console: Console, table: Table) -> None:
    """Print a table uncut, even if it is wider than the terminal."""
    unlimited = console.options.update(max_width=_WIDEST)
    table.width = console.measure(table, options=unlimited).maximum
    console.print(table, crop=False)


def save_plot(path: Path, draw: Callable[[Path], None], *, as_json: bool) -> None:
    """Draw into the file of ``--plot``; end with status 1 if that fails.

    Called after the results are printed, so that a failure loses no result.
    """
    try:
        with whole_file("--plot", path) as file:
            draw(file)
    except OSError as error:
        fail(str(error))
    except ValueError as error:
        fail(f"cannot write --plot {path}: {error}")
    if not as_json:
        print(f"plot: {path}")
