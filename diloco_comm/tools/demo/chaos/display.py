"""The chaos demo on screen: a live table on a terminal, a line for each event elsewhere."""

from __future__ import annotations

import time

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from .messages import DONE
from .record import Happened, Record, Track
from .results import Results, Row
from .settings import ChaosSettings

# Events that stay on screen.
_NUM_EVENTS = 6
# Seconds over which the table takes rates and losses.
_RECENT_S = 2.0


def open_display(console: Console, settings: ChaosSettings) -> LiveDisplay | PlainDisplay:
    """Return the display that suits the console."""
    return (LiveDisplay if console.is_terminal else PlainDisplay)(console, settings)


class PlainDisplay:
    """One line for each event, for logs and pipes."""

    def __init__(self, console: Console, settings: ChaosSettings) -> None:
        self._console, self._settings = console, settings

    def start(self) -> None:
        _print_header(self._console, self._settings)

    def update(self, record: Record) -> None:
        pass

    def tell(self, event: Happened) -> None:
        self._console.print(_line(event), highlight=False)

    def finish(self) -> None:
        pass


class LiveDisplay:
    """A table of the replicas that is redrawn while they train, and the last events below it."""

    def __init__(self, console: Console, settings: ChaosSettings) -> None:
        self._console, self._settings = console, settings
        self._live = Live(console=console, refresh_per_second=8, transient=True)
        self._events: list[Happened] = []

    def start(self) -> None:
        _print_header(self._console, self._settings)
        self._live.start()
        self._live.update(Text("starting the replicas", style="dim"))

    def update(self, record: Record) -> None:
        self._live.update(Group(self._table(record), *self._last_events()))

    def tell(self, event: Happened) -> None:
        self._events.append(event)

    def finish(self) -> None:
        self._live.stop()
        for event in self._events:
            self._console.print(_line(event), highlight=False)

    def _last_events(self) -> list[Text]:
        return [Text(_line(event)) for event in self._events[-_NUM_EVENTS:]]

    def _table(self, record: Record) -> Table:
        now = time.monotonic() - record.begin
        view = record.newest_view
        members = () if view is None else view.members
        title = "no view yet" if view is None else f"view {view.number}: replicas {list(members)}"
        table = Table(title=f"{now:.0f} s, {title}", title_style="bold", box=box.SIMPLE_HEAD)
        for name in ("replica", "what it does", "inner step", "loss", "tokens/s"):
            table.add_column(name, justify="left" if name == "what it does" else "right")
        for number in sorted({track.number for track in record.tracks}):
            track = record.tracks_of(number)[-1]
            table.add_row(str(number), *self._cells(track, now, number in members))
        return table

    def _cells(self, track: Track, now: float, is_member: bool) -> list[Text]:
        recent = [step for step in track.steps[-100:] if step[0] > now - _RECENT_S]
        rate = len(recent) / _RECENT_S * self._settings.tokens_per_step
        if track.ended is not None:
            what, style = track.how, "red" if track.how != DONE else "dim"
        elif track.stopped is not None and track.resumed is None:
            what, style = "stopped", "red"
        elif not track.steps:
            what, style = _copying(track), "yellow"
        else:
            what, style = ("trains", "green") if recent and is_member else ("waits", "yellow")
        last = track.steps[-1][1] if track.steps else 0
        loss = f"{sum(step[2] for step in recent) / len(recent):.3f}" if recent else ""
        return [Text(what, style=style), Text(str(last)), Text(loss), Text(f"{rate:,.0f}")]


def print_results(console: Console, results: Results) -> None:
    """Print what each event cost, and the claims with their verdicts."""
    table = Table(title="what each event cost the others", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("at (s)", justify="right")
    table.add_column("event")
    table.add_column("view")
    table.add_column("others stood still (s)", justify="right")
    for row in results.rows():
        table.add_row(*_row_cells(row))
    console.print()
    console.print(table)
    claims = Table.grid(padding=(0, 1))
    for claim in results.claims():
        claims.add_row("[green]yes[/]" if claim.holds else "[bold red]NO[/]", claim.text)
    console.print(claims)
    console.print()


def _row_cells(row: Row) -> list[str]:
    view = "" if row.view is None else f"{row.view.number}: {list(row.view.members)}"
    seconds = "" if row.view is None else f"{row.view.seconds:.1f}"
    return [f"{row.event.at:.1f}", row.event.text, view, seconds]


def _print_header(console: Console, settings: ChaosSettings) -> None:
    console.print(
        "[bold]4 replicas[/] train a byte-level transformer, while replicas and the registry are "
        f"killed, stopped and started; wire {settings.wire}, an exchange every "
        f"{settings.sync_every} inner steps",
        highlight=False,
    )


def _line(event: Happened) -> str:
    return f"{event.at:6.1f} s  {event.text}"


def _copying(track: Track) -> str:
    received, total = track.copied
    return f"copies the state, {received / total:.0%}" if total else "starts"
