"""The contents of the page and of ``/status.json``: the state of each run as JSON types."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from ..group.records import cause_of
from .figures import Figures
from .status import (
    AWAITED,
    CUT,
    SILENT,
    SILENT_S,
    SLOW_ONE,
    Process,
    Run,
    Seen,
    State,
    numbers_of,
    printable,
)

SCHEMA = 1
# The page shows at most so many runs; the metrics have all.
MAX_SHOWN = 32
_PHASE = 32
# Figures that ``_row`` reports as values of their own, and not among the row's figures.
_IN_ROW = ("replica", "phase", "waits_for", "waits_s", "inner_step")


def status(state: State, version: str) -> dict[str, Any]:
    """Return all that the page shows, as JSON types.

    Args:
        version: The version of the package.
    """
    order = {name: (run.has_ended, run.silent_s, name) for name, run in state.runs.items()}
    shown = sorted(sorted(order, key=order.__getitem__)[:MAX_SHOWN])
    return {
        "schema": SCHEMA,
        "version": version,
        "at": round(state.now, 3),
        "facts": dict(state.facts),
        "report": state.report,
        "num_runs": len(state.runs),
        "runs": [{"run": name, **_run_report(state.runs[name])} for name in shown],
    }


def view_report(seen: Seen) -> dict[str, Any] | None:
    """Return the last view as JSON types."""
    view = seen.view
    if view is None:
        return None
    return {
        "number": view.number,
        "inner_step": view.inner_step,
        "cause": cause_of(view),
        "joined": list(view.joined),
        "left": list(view.left_out),
        "evicted": [key.number for key in view.members if seen.is_evicted(key)],
        "is_finished": view.is_finished,
        "members": [{"id": key.number, "nonce": key.nonce.hex()} for key in view.members],
    }


def _run_report(run: Run) -> dict[str, Any]:
    rows = [_row(run, one) for one in sorted(run.processes.values(), key=lambda one: one.key)]
    view = view_report(run.seen)
    if view is not None:
        view |= {"cause": run.cause, "members": [one["id"] for one in view["members"]]}
    return {
        "view": view,
        "has_ended": run.has_ended,
        "members": rows,
        "alerts": [
            f"replica {row['id']}: {words}"
            for row in rows
            if row["marks"]
            for words in row["words"]
        ],
        "rounds": run.rounds,
        "rounds_over_time": [list(point) for point in run.points],
        "events": [event._asdict() for event in reversed(run.events)],
    }


def _row(run: Run, process: Process) -> dict[str, Any]:
    beat, figures = process.beat, process.figures
    stage = "" if beat is None else beat.stage
    if run.has_ended:
        stage = "ended" if run.is_over else "not heard"
    inner_step = max(
        0 if beat is None else beat.place.inner_step, 0 if figures is None else figures.inner_step
    )
    return {
        "id": process.key.number,
        "process": process.key.nonce.hex()[:8],
        "is_member": run.counts(process),
        "stage": stage,
        "phase": printable(process.phase[:_PHASE]),
        "inner_step": inner_step,
        "silent_s": _finite(process.silent_s),
        "waits_for": list(figures.waits_for) if figures and process.is_waiting else [],
        "waits_s": _finite(process.waited_s),
        "awaited_by": list(process.awaited_by),
        "awaited_s": _finite(process.awaited_s),
        "cut_from": list(process.cut_from),
        "cannot_reach": list(process.cannot_reach),
        "speed": _finite(process.speed) if process.silent_s <= SILENT_S else None,
        "marks": sorted(process.marks),
        "words": list(_words(run, process)),
        "figures": None if figures is None else _figures_report(figures),
    }


def _words(run: Run, process: Process) -> Iterable[str]:
    """Yield short clauses for people about a process: silence, waits, cuts, slowness."""
    number, figures = process.key.number, process.figures
    if process.is_gone and process.beat is not None:
        yield process.beat.stage
        return
    is_left = not (run.counts(process) or run.is_finished)
    if SILENT in process.marks or (is_left and process.silent_s > SILENT_S):
        yield f"silent for {process.silent_s:.0f} s"
    if AWAITED in process.marks:
        others = run.replicas.keys() - {number}
        everyone = len(process.awaited_by) > 1 and others <= set(process.awaited_by)
        few = f"{numbers_of(process.awaited_by)} wait{'s' * (len(process.awaited_by) == 1)}"
        yield (
            f"{'the others wait' if everyone else few} for replica {number}, "
            f"since {process.awaited_s:.0f} s"
        )
    if CUT in process.marks:
        other = run.replicas.get(process.cut_from[0])
        if len(process.cut_from) == 1 and other is not None and other.cut_from == (number,):
            names = numbers_of(sorted({number, *process.cut_from}))
            yield f"cut off: {names} cannot reach each other"
        else:
            yield f"cut off from {numbers_of(process.cut_from)}"
    if process.cannot_reach:
        ending = "s" * (len(process.cannot_reach) > 1)
        yield f"cannot reach replica{ending} {numbers_of(process.cannot_reach)}"
    if SLOW_ONE in process.marks:
        part = process.speed / process.median
        yield (f"slow: {process.speed:.3g} inner steps per second, {part:.0%} of the median")
    if figures is not None and process.is_waiting:
        yield f"waits for {numbers_of(figures.waits_for)}, since {process.waited_s:.0f} s"
    if run.seen.is_evicted(process.key):
        yield "is asked to leave"
    if is_left:
        yield "is no member"


def _figures_report(figures: Figures) -> dict[str, Any]:
    return {name: _finite(value) for name, value in vars(figures).items() if name not in _IN_ROW}


def _finite(value: Any) -> Any:
    """Return a number for JSON; None for infinity and NaN, which JSON does not have."""
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else None
    return value
