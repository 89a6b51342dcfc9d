"""The sub-command ``diloco-comm members``: who trains together, as the registry knows it."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..common.exits import fail, in_options, misuse
from ..common.printing import print_whole

if TYPE_CHECKING:
    from ...elastic.beats import Beat
    from ...elastic.registry import Registry
    from ...elastic.views import View

# The paragraphs behind \b keep their line breaks.
EXAMPLES = """Examples:

\b
diloco-comm members --registry tcp://127.0.0.1:29400 --run llama-1b --watch
diloco-comm members --registry tcp://127.0.0.1:29400 --run llama-1b --evict 3
"""
# How often another writer may come first when a replica is evicted.
_ATTEMPTS = 10


def members(
    context: typer.Context,
    registry: Annotated[str, typer.Option(help="Address of the registry, tcp://host:port.")],
    run: Annotated[str, typer.Option(help="Name of the run.")],
    watch: Annotated[bool, typer.Option("--watch", help="Show the members every second.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
    evict: Annotated[
        int | None, typer.Option(help="Let this replica leave at the next boundary.")
    ] = None,
    key: Annotated[
        Path | None, typer.Option(help="Folder of keys, or a file NAME.key_secret in it.")
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Use another machine's registry without keys.")
    ] = False,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for the registry.")] = 5.0,
) -> None:
    """Show the members of a run and the processes that beat, or evict a member."""
    if watch + as_json + (evict is not None) > 1:
        misuse("--watch, --json and --evict exclude each other")
    from ...elastic.registry import RegistryMismatch, RegistryUnavailable, connect

    try:
        found = connect(registry, run=run, timeout_s=timeout, key=key, insecure=insecure)
    except ValueError as error:
        misuse(in_options(str(error), context.params))
    try:
        if evict is not None:
            _evict(found, run, evict)
        elif as_json:
            print(json.dumps(report(found, run)))
        else:
            _show(found, run, registry, watch=watch)
    except (RegistryUnavailable, RegistryMismatch, ValueError) as error:
        fail(str(error))
    finally:
        found.close()


def _evict(registry: Registry, run: str, replica: int) -> None:
    from ...elastic.views import from_bytes, to_bytes, with_evicted

    for _ in range(_ATTEMPTS):
        record = registry.read()
        if not record:
            raise ValueError(f"run {run!r} has no members: no view has been formed yet")
        view = with_evicted(from_bytes(record, run), replica)
        if registry.swap(record, to_bytes(view)):
            print(f"replica {replica} leaves at the next boundary of view {view.number}")
            return
    raise ValueError(f"the members of run {run!r} change too often: try again")


def report(registry: Registry, run: str) -> dict[str, Any]:
    """Return the last view of a run and the beats of its processes, as JSON types.

    Raises:
        RegistryUnavailable: If the registry does not answer.
        ValueError: If the registry's record is not of this run and version.
    """
    view, beats = _look(registry, run)
    return {
        "schema": 1,
        "run": run,
        "registry_id": registry.registry_id,
        "is_durable": registry.is_durable,
        "view": None if view is None else _view_report(view),
        "processes": [_beat_report(beat, view) for beat in beats],
    }


def _view_report(view: View) -> dict[str, Any]:
    names = ("number", "phase", "base", "inner_step", "reason", "joined", "left", "evicted")
    rows = [
        {"id": member.id, "nonce": member.nonce, "address": member.address}
        for member in view.members
    ]
    return {name: getattr(view, name) for name in names} | {"members": rows}


def _beat_report(beat: Beat, view: View | None) -> dict[str, Any]:
    member = beat.member
    return {
        "id": member.id,
        "nonce": member.nonce,
        "address": member.address,
        "workers": member.workers,
        "is_member": view is not None and view.is_member(*member.key),
        "stage": beat.stage,
        "view": beat.view,
        "inner_step": beat.inner_step,
        "phase": beat.phase,
        "is_leaving": beat.is_leaving,
        "unreachable": beat.unreachable,
        "counter": beat.counter,
    }


def _look(registry: Registry, run: str) -> tuple[View | None, list[Beat]]:
    """Return the last view, None if there is none, and the beats by replica."""
    from ...elastic.beats import Beat
    from ...elastic.views import from_bytes

    record, texts = registry.read(), registry.beat("", b"").values()
    beats = [beat for beat in map(Beat.from_bytes, texts) if beat is not None]
    beats.sort(key=lambda beat: beat.member.key)
    return (from_bytes(record, run) if record else None), beats


# --------------------------------------------------------------------------------------- text


def _show(registry: Registry, run: str, address: str, *, watch: bool) -> None:
    from rich.console import Console
    from rich.live import Live

    console, silence = Console(file=sys.stdout), Silence()
    view, beats = _look(registry, run)
    if not watch:
        print_whole(console, _table(f"{run} at {address}", view, beats, {}))
        return
    with Live(console=console) as live:
        while True:
            seconds = silence.after(beats, time.monotonic())
            live.update(_table(f"{run} at {address}", view, beats, seconds), refresh=True)
            time.sleep(1.0)
            view, beats = _look(registry, run)


class Silence:
    """For how long each process has not beaten, as this process has seen it."""

    def __init__(self) -> None:
        self._heard: dict[str, tuple[int, float]] = {}

    def after(self, beats: list[Beat], now: float) -> dict[str, float]:
        """Return the seconds of silence by nonce.

        Args:
            beats: The last beats.
            now: Seconds of any steady clock.
        """
        for beat in beats:
            if self._heard.get(beat.member.nonce, (None, 0.0))[0] != beat.counter:
                self._heard[beat.member.nonce] = (beat.counter, now)
        return {beat.member.nonce: now - self._heard[beat.member.nonce][1] for beat in beats}


def _table(title: str, view: View | None, beats: list[Beat], silence: dict[str, float]) -> Any:
    from rich.table import Table

    table = Table(title=f"{title}: {_headline(view)}")
    names = ["replica", "process", "member", "stage", "view", "inner step", "address"]
    for name in names + ["silent for"] * bool(silence):
        table.add_column(name, justify="right" if name in ("view", "inner step") else "left")
    for beat in beats:
        row = _beat_report(beat, view)
        cells = [str(row["id"]), row["nonce"][:8], "yes" if row["is_member"] else "no"]
        stage = f"{row['stage']} ({row['phase']})" if row["phase"] else row["stage"]
        cells += [stage, str(row["view"]), str(row["inner_step"]), row["address"]]
        if silence:
            cells.append(f"{silence[row['nonce']]:.0f} s")
        table.add_row(*cells)
    heard = {beat.member.key for beat in beats}
    for member in view.members if view is not None else ():
        if member.key not in heard:
            cells = [str(member.id), member.nonce[:8], "yes", "no beat", "", "", member.address]
            table.add_row(*cells, *[""] * bool(silence))
    return table


def _headline(view: View | None) -> str:
    if view is None:
        return "no view has been formed yet"
    parts = [f"view {view.number} is {view.phase}", f"inner step {view.inner_step}"]
    parts += [view.reason] if view.reason else []
    parts += [f"to leave: {', '.join(map(str, view.evicted))}"] if view.evicted else []
    return ", ".join(parts)
