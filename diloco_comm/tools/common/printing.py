"""What sub-commands print for people or, with ``--json``, for programs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from .exits import fail
from .outputs import writing

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

# No table of ours is wider.
_WIDEST = 1000


def announcer(as_json: bool) -> Callable[[str], None]:
    """Return what prints the address that a command listens on, at once."""

    def announce(address: str) -> None:
        text = json.dumps({"schema": 1, "address": address}) if as_json else address
        print(text, flush=True)

    return announce


def print_whole(console: Console, table: Table) -> None:
    """Print a table as wide as it needs, also where the terminal is narrower: nothing is cut."""
    unlimited = console.options.update(max_width=_WIDEST)
    table.width = console.measure(table, options=unlimited).maximum
    console.print(table, crop=False)


def save_plot(path: Path, draw: Callable[[Path], None], *, as_json: bool) -> None:
    """Draw into the file of ``--plot``, once the results are printed; end with 1 if that fails."""
    try:
        with writing("--plot", path):
            draw(path)
    except OSError as error:
        fail(str(error))
    except ValueError as error:
        fail(f"cannot write --plot {path}: {error}")
    if not as_json:
        print(f"plot: {path}")
