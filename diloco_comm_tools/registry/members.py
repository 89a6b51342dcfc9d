"""The sub-command ``diloco-comm members``: who trains together, as the registry knows it."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..common.commands import fail, in_sentences, misuse
from ..common.console import show_table

if TYPE_CHECKING:
    from diloco_comm.elastic.registry import Registry
    from diloco_comm.group.beats import Beat
    from diloco_comm.group.records import Key
    from diloco_comm.monitor.status import Seen

# The paragraphs behind \b keep their line breaks.
EXAMPLES = """Examples:

\b
diloco-comm members --registry tcp://127.0.0.1:29400 --run llama-1b --watch
diloco-comm members --registry tcp://127.0.0.1:29400 --run llama-1b --evict 3
"""


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
    from diloco_comm.elastic.registry import RegistryMismatch, RegistryUnavailable, connect

    with in_sentences(context.params):
        found = connect(registry, run=run, timeout_s=timeout, key=key, insecure=insecure)
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
    from diloco_comm.group.beats import EVICT, eviction_of

    view = _look(registry).view
    if view is None:
        raise ValueError(f"run {run!r} has no members: no view has been formed yet")
    keys = [key for key in view.members if key.number == replica]
    if not keys:
        raise ValueError(
            f"view {view.number} of run {run!r} has the members {list(view.numbers)}, and no "
            f"{replica}"
        )
    registry.beat(eviction_of(keys[0]), EVICT)
    print(f"replica {replica} leaves at the next boundary of view {view.number}")


def report(registry: Registry, run: str) -> dict[str, Any]:
    """Return the last view of a run and the beats of its processes, as JSON types.

    Raises:
        RegistryUnavailable: If the registry does not answer.
        ValueError: If the registry's record is none of this version.
    """
    from diloco_comm.monitor.report import view_report

    seen = _look(registry)
    return {
        "schema": 2,
        "run": run,
        "registry_id": registry.registry_id,
        "is_durable": registry.is_durable,
        "view": view_report(seen),
        "processes": [seen.beat_report(beat) for beat in seen.beats],
    }


def _look(registry: Registry) -> Seen:
    from diloco_comm.monitor.status import Seen

    return Seen.of(registry.read(), registry.beat("", b""))


# --------------------------------------------------------------------------------------- text


def _show(registry: Registry, run: str, address: str, *, watch: bool) -> None:
    silence = Silence()

    def table() -> Any:
        seen = _look(registry)
        seconds = silence.after(seen.beats, time.monotonic()) if watch else {}
        return _table(f"{run} at {address}", seen, seconds)

    show_table(table, watch=watch)


class Silence:
    """For how long each process has not beaten, as this process has seen it."""

    def __init__(self) -> None:
        self._heard: dict[Key, tuple[int, float]] = {}

    def after(self, beats: Sequence[Beat], now: float) -> dict[Key, float]:
        """Return the seconds of silence of each process.

        Args:
            beats: The last beats.
            now: Seconds of any steady clock.
        """
        for beat in beats:
            if self._heard.get(beat.key, (None, 0.0))[0] != beat.counter:
                self._heard[beat.key] = (beat.counter, now)
        return {beat.key: now - self._heard[beat.key][1] for beat in beats}


def _table(title: str, seen: Seen, silence: dict[Key, float]) -> Any:
    from rich.table import Table
    from rich.text import Text

    from diloco_comm.monitor.status import printable

    table = Table(title=Text(printable(f"{title}: {_headline(seen)}")))
    names = ["replica", "process", "member", "stage", "view", "inner step", "address"]
    for name in names + ["silent for"] * bool(silence):
        table.add_column(name, justify="right" if name in ("view", "inner step") else "left")
    for beat in seen.beats:
        row = seen.beat_report(beat)
        cells = [str(row["id"]), row["nonce"][:8], "yes" if row["is_member"] else "no"]
        stage = f"{row['stage']} ({row['phase']})" if row["phase"] else row["stage"]
        cells += [stage, str(row["view"] or ""), str(row["inner_step"]), row["address"]]
        if silence:
            cells.append(f"{silence[beat.key]:.0f} s")
        table.add_row(*[Text(printable(cell)) for cell in cells])
    heard = {beat.key for beat in seen.beats}
    for key in seen.members:
        if key not in heard:
            table.add_row(str(key.number), key.nonce.hex()[:8], "yes", "no beat")
    return table


def _headline(seen: Seen) -> str:
    from diloco_comm.monitor.report import view_report

    view = view_report(seen)
    if view is None:
        return "no view has been formed yet"
    parts = [f"view {view['number']}", f"inner step {view['inner_step']}", view["cause"]]
    parts += ["the run has ended"] if view["is_finished"] else []
    parts += [f"to leave: {', '.join(map(str, view['evicted']))}"] if view["evicted"] else []
    return ", ".join(parts)
