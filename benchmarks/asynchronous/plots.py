"""Plots of ``async_convergence.py``: one method a panel, so that no curve hides another."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.asynchronous.methods import METHODS
from diloco_comm_tools.common import plots

Row = dict[str, Any]
BASE = "DiLoCo"
_COLUMNS = 4


def draw_methods(rows: list[Row], steps: int, path: Path) -> None:
    """Draw the loss over inner steps of each method, at very different speeds, beside DiLoCo's."""
    here = _wanted(rows, steps)
    names = [name for name in METHODS if name != BASE and _of(here, name)]
    if not names:
        return
    panels = _panels(len(names))
    for name, axis in zip(names, panels.flat, strict=False):
        _draw(axis, here, name, "steps")
        axis.set_xlabel("inner steps of all workers")
    title = f"4 workers of very different speed, {steps} steps each, mean of the seeds"
    _save(panels, len(names), title, path)


def draw_time(rows: list[Row], path: Path) -> None:
    """Draw the loss over virtual time, a row of panels for each number of steps."""
    lengths = sorted({row["steps"] for row in rows})
    pairs = [
        (steps, name)
        for steps in lengths
        for name in METHODS
        if name != BASE
        and len(lengths) > 1
        and steps != lengths[0]
        and _of(_wanted(rows, steps), name)
    ]
    if not pairs:
        return
    panels = _panels(len(pairs))
    for (steps, name), axis in zip(pairs, panels.flat, strict=False):
        _draw(axis, _wanted(rows, steps), name, "seconds")
        axis.set_xlabel(f"virtual seconds, {steps} steps a worker")
    _save(panels, len(pairs), "4 workers of very different speed, mean of the seeds", path)


def _wanted(rows: list[Row], steps: int) -> list[Row]:
    keys, wanted = ("model", "num_workers", "speeds", "steps"), ("118k", 4, "very", steps)
    return [row for row in rows if tuple(row[key] for key in keys) == wanted]


def _of(rows: list[Row], name: str) -> list[Row]:
    return [row for row in rows if row["method"] == name]


def _panels(count: int) -> Any:
    num_rows = math.ceil(count / _COLUMNS)
    return plots.new_panels(num_rows, _COLUMNS, 3.3, 2.6, sharey=True)[1]


def _curve(rows: Sequence[Row], key: str) -> tuple[list[float], list[float]]:
    """Return the means over the seeds of ``key`` and of the loss, point by point."""
    count = min(len(row["points"]) for row in rows)
    points = [[row["points"][index] for row in rows] for index in range(count)]
    return [fmean(p[key] for p in at) for at in points], [
        fmean(p["loss"] for p in at) for at in points
    ]


def _draw(axis: Any, rows: list[Row], name: str, key: str) -> None:
    """Draw DiLoCo broad and pale, and the method narrow, dark and marked: both can be seen."""
    if _of(rows, BASE):
        axis.plot(*_curve(_of(rows, BASE), key), color="0.8", linewidth=5, label=BASE)
    axis.plot(
        *_curve(_of(rows, name), key),
        color=plots.BLUE,
        linewidth=1.2,
        marker="o",
        markersize=3,
        label=name,
    )
    plots.legend(axis, fontsize=7, loc="upper right")


def _save(panels: Any, count: int, title: str, path: Path) -> None:
    for axis in panels.flat[count:]:
        axis.set_visible(False)
    for row in panels:
        row[0].set_ylabel("held-out loss, nats per byte", fontsize=8)
    figure = panels[0][0].figure
    figure.suptitle(title)
    plots.save(figure, path)
