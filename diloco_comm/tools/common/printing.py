"""Output of sub-commands: for people or, with ``--json``, for programs."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ...base import launch
from ...base.files import whole_file
from .exits import fail

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

# Columns; every table of this package is narrower.
_WIDEST = 1000
# Seconds between two drawings of a bar.
_REDRAW_S = 0.1


def announcer(as_json: bool, page: str | None = None) -> Callable[[str], None]:
    """Return a function that prints the address on which a command listens.

    Args:
        page: Address of the page, for the JSON; None for none.
    """

    def announce(address: str) -> None:
        beside = {} if page is None else {"http": page}
        text = json.dumps({"schema": 1, "address": address, **beside}) if as_json else address
        print(text, flush=True)

    return announce


@contextlib.contextmanager
def progress_bar(
    title: str, total: float, *, is_kept: bool = False
) -> Iterator[Callable[..., None]]:
    """Show a bar on stderr while a block runs, where stderr is a terminal; nothing elsewhere.

    The block calls ``advance(steps=1, note="")``. The bar is drawn in these calls alone: no thread
    disturbs a measurement. The block prints nothing to the terminal. In a job, rank 0 has the bar.

    Args:
        is_kept: The bar stays on the terminal after the block.
    """
    found = launch.find()
    if not sys.stderr.isatty() or (found is not None and found.rank != 0):
        yield lambda steps=1, note="": None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    # A rank that a signal ends at once could not show a hidden cursor again.
    console.show_cursor = lambda show=True: False  # type: ignore[method-assign]
    columns = (
        TextColumn("{task.description:<14}"),
        BarColumn(20),
        TextColumn("{task.percentage:>3.0f}%"),
        TimeRemainingColumn(elapsed_when_finished=True),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(
        *columns,
        console=console,
        auto_refresh=False,
        transient=not is_kept,
        redirect_stdout=False,
        redirect_stderr=False,
    ) as progress:
        task, drawn = progress.add_task(title, total=total, note=""), time.monotonic()

        def advance(steps: float = 1, note: str = "") -> None:
            nonlocal drawn
            progress.update(task, advance=steps, note=note)
            if time.monotonic() >= drawn + _REDRAW_S:
                progress.refresh()
                drawn = time.monotonic()

        progress.refresh()
        yield advance


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
