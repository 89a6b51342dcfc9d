"""Output of sub-commands: for people or, with ``--json``, for programs."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from diloco_comm.base import launch
from diloco_comm.base.files import whole_file

from .commands import fail

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


def new_console(**options: Any) -> Console:
    """Return a console that neither cuts lines nor colours their numbers."""
    from rich.console import Console

    return Console(**{"soft_wrap": True, "highlight": False} | options)


def print_report(
    report: dict[str, Any], as_json: bool, show: Callable[[Console, dict[str, Any]], None]
) -> None:
    """Print a report as JSON, or by its function."""
    if as_json:
        print(json.dumps(report, indent=1), flush=True)
    else:
        show(new_console(), report)


def plain_table(
    heads: Sequence[str], title: str | None = None, text: Collection[str] = (), **options: Any
) -> Table:
    """Return a table without a frame.

    Args:
        heads: Titles of the columns. All columns but the first are numbers, and end at the right.
        text: Titles of further columns that begin at the left.
        options: Options of the table.
    """
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", **options)
    for head in heads:
        is_text = head == heads[0] or head in text
        table.add_column(head, justify="left" if is_text else "right", no_wrap=True)
    return table


def print_whole(console: Console, table: Table) -> None:
    """Print a table uncut, even if it is wider than the terminal."""
    unlimited = console.options.update(max_width=_WIDEST)
    table.width = console.measure(table, options=unlimited).maximum
    console.print(table, crop=False)


def show_table(read: Callable[[], Any], *, watch: bool) -> None:
    """Print a table, or show it as it is every second, until an error or a signal."""
    from rich.console import Console
    from rich.live import Live

    console, table = Console(file=sys.stdout), read()
    if not watch:
        print_whole(console, table)
        return
    with Live(table, console=console) as live:
        while True:
            time.sleep(1.0)
            live.update(read(), refresh=True)


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


# -------------------------------------------------------------------------- results with claims


@dataclass(frozen=True)
class Claim:
    """A statement with a measured number, and whether the results bear it out."""

    text: str
    holds: bool


class Results(Protocol):
    """The results of a demo, by the name of its files."""

    name: str
    settings: Any

    def claims(self) -> list[Claim]: ...

    def content(self) -> dict[str, Any]:
        """Return the figures as JSON types."""

    def show(self, console: Console) -> None:
        """Print the tables."""

    def draw(self, path: Path) -> None:
        """Write the figure; needs matplotlib, and no display."""


def present(
    console: Console, results: Results, out: Path, seconds: float, *, as_json: bool
) -> Sequence[Claim]:
    """Print results and claims, write ``NAME.json`` and ``NAME.png``, and return the claims.

    If the first file cannot be written, the second is still written.

    Args:
        seconds: Duration of the demo.
        as_json: Print the content of the JSON file, too.

    Raises:
        OSError: If a file cannot be written; its text is a sentence.
    """
    import torch
    from rich.table import Table

    from diloco_comm import __version__

    claims = results.claims()
    console.print()
    results.show(console)
    table = Table.grid(padding=(0, 1))
    for claim in claims:
        table.add_row("[green]yes[/]" if claim.holds else "[bold red]NO[/]", claim.text)
    console.print()
    console.print(table)
    console.print(f"\n[dim]{seconds:.0f} s in all[/]")
    head = {
        "schema": 1,
        "diloco_comm": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
        "settings": dataclasses.asdict(results.settings),
        "total_seconds": seconds,
    }
    document = {**head, **results.content(), "claims": list(map(dataclasses.asdict, claims))}
    numbers = json.dumps(document, indent=1, default=str)
    if as_json:
        print(numbers, flush=True)
    try:
        with whole_file("--out", out / f"{results.name}.json") as file:
            file.write_text(numbers + "\n")
        console.print(f"numbers: {out / results.name}.json")
    finally:
        if importlib.util.find_spec("matplotlib") is None:
            console.print("plot:    none; for one, pip install 'diloco_comm\\[plot]'")
        else:
            with whole_file("--out", out / f"{results.name}.png") as file:
                results.draw(file)
            console.print(f"plot:    {out / results.name}.png")
    return claims
