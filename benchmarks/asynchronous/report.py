"""Table and plots of ``convergence.py``: one method a panel, so that no curve hides another."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.asynchronous.claims import ALIKE, ASYNCHRONOUS, judge
from benchmarks.asynchronous.methods import METHODS, SPEEDS
from benchmarks.asynchronous.training import TUNING_SEED
from benchmarks.support.common import command_line, mean_and_deviation
from benchmarks.support.run_file import grouped
from benchmarks.support.tuning import Choice, Tried, choose, search_lines, tried_rates
from diloco_comm_tools.common import plots

Row = dict[str, Any]
BASE = "DiLoCo"
_COLUMNS = 4


def tried(rows: list[Row]) -> Tried:
    return tried_rates(rows, ("steps", "method"), TUNING_SEED)


def choices(rows: list[Row]) -> dict[tuple[Any, ...], Choice]:
    """Return the learning rate by steps and method: of the tuning run that ended lowest."""
    return {key: choose(losses) for key, losses in tried(rows).items()}


def kept_rows(rows: list[Row]) -> list[Row]:
    """Return the runs of the table: those at the learning rate that the search chose."""
    chosen = {key: choice.lr for key, choice in choices(rows).items()}
    return [
        row
        for row in rows
        if row["seed"] != TUNING_SEED and row["lr"] == chosen.get((row["steps"], row["method"]))
    ]


def condense(rows: list[Row]) -> list[Row]:
    """Return the record of the runs: for each setting and rate, the losses and the mean figures."""
    found = []
    for setting, own in grouped(rows, ("model", "num_workers", "steps", "speeds", "method", "lr")):
        losses = [[run["seed"], run["loss"]] for run in own]
        figures = ("seconds", "updates", "mean_staleness")
        means = {key: fmean(run[key] for run in own) for key in figures}
        found.append({**setting, "seed, loss": losses, **means})
    return found


def recorded_losses(results: list[Row]) -> list[Row]:
    """Return the runs of a record, with their losses alone."""
    return [
        {**{k: v for k, v in entry.items() if k != "seed, loss"}, "seed": seed, "loss": loss}
        for entry in results
        for seed, loss in entry["seed, loss"]
    ]


def report_lines(rows: list[Row]) -> Iterator[str]:
    """Return the table's lines; see ``kept_rows``."""
    kept = kept_rows(rows)
    seconds = sum(row["cpu_s"] for row in rows)
    yield f"# {command_line()}"
    yield "# loss: held out, nats per byte, mean and standard deviation of the seeds; all methods"
    yield "# take the same number of inner steps. vs DiLoCo: on the same seeds; at equal updates:"
    yield "# when both had applied as many (interpolated; DyLU's rounds are shorter: more updates)."
    yield "# time: virtual, until the last arrival, over DiLoCo's. stale: mean staleness."
    yield f"# {len(kept)} runs in the table, {len(rows)} in all, {seconds:.0f} s of processor time"
    if kept:
        start = fmean(row["points"][0]["loss"] for row in kept)
        yield f"# before the first round: {start:.4f}"
    yield from search_lines(tried(rows))
    for (model, workers, steps), title in _groups(kept):
        key = (model, workers, steps)
        here = [r for r in kept if (r["model"], r["num_workers"], r["steps"]) == key]
        yield from _table(here, title)
        for speeds in SPEEDS:
            own = [r for r in here if r["speeds"] == speeds or METHODS[r["method"]].is_synchronous]
            if any(row["speeds"] == speeds for row in own):
                title = f"  claims, speeds {speeds} (alike: within {ALIKE:g}):"
                yield from judge(own, ASYNCHRONOUS, title)


def _groups(rows: list[Row]) -> list[tuple[tuple[str, int, int], str]]:
    keys = dict.fromkeys((row["model"], row["num_workers"], row["steps"]) for row in rows)
    ordered = sorted(keys, key=lambda key: (key[1:2] != (4,), key[0] != "118k", key[2], key[1]))
    return [(key, f"model {key[0]}, {key[1]} workers, {key[2]} steps each") for key in ordered]


def _table(rows: list[Row], title: str) -> Iterator[str]:
    yield ""
    yield title
    yield (
        f"  {'method':22} {'speeds':9} {'seeds':>5} {'loss':>16} {'vs DiLoCo':>17}"
        f" {'updates':>8} {'at equal updates':>17} {'time':>5} {'stale':>5}"
    )
    for speeds in SPEEDS:
        for name in METHODS:
            yield from _line(rows, name, speeds)


def _line(rows: list[Row], name: str, speeds: str) -> Iterator[str]:
    mine = {r["seed"]: r for r in rows if r["method"] == name and r["speeds"] == speeds}
    if not mine:
        return
    base = {r["seed"]: r for r in rows if r["method"] == "DiLoCo"}
    shared = sorted(mine.keys() & base.keys())
    differences = [mine[s]["loss"] - base[s]["loss"] for s in shared]
    equal = [_at_equal_updates(mine[s], base[s]) for s in shared]
    # With a barrier, time is that of the slowest worker at these speeds.
    times = [mine[s]["seconds"] / barrier_seconds(base[s], speeds) for s in shared]
    yield (
        f"  {name:22} {speeds:9} {len(mine):5d}"
        f" {mean_and_deviation([row['loss'] for row in mine.values()]):>16}"
        f" {mean_and_deviation(differences, '+'):>17}"
        f" {fmean(row['updates'] for row in mine.values()):8.0f}"
        f" {mean_and_deviation(equal, '+'):>17} {fmean(times) if times else 0:5.2f}"
        f" {fmean(row['mean_staleness'] for row in mine.values()):5.1f}"
    )


def _at_equal_updates(one: Row, other: Row) -> float:
    updates = min(one["updates"], other["updates"])
    return loss_at(one["points"], updates) - loss_at(other["points"], updates)


def loss_at(points: Sequence[Mapping[str, float]], updates: float) -> float:
    """Return the loss after so many updates, between two points by a straight line."""
    for before, after in pairwise(points):
        if before["updates"] <= updates <= after["updates"]:
            span = after["updates"] - before["updates"]
            share = (updates - before["updates"]) / span if span else 1.0
            return before["loss"] + share * (after["loss"] - before["loss"])
    return points[-1]["loss"]


def barrier_seconds(row: Row, speeds: str) -> float:
    """Return DiLoCo's virtual time at other speeds than those of the run."""
    slowest = {name: max(SPEEDS[name](row["num_workers"])) for name in SPEEDS}
    return row["seconds"] * slowest[speeds] / slowest[row["speeds"]]


# -------------------------------------------------------------------------------------- plots


def draw(kept: list[Row], steps: int, path: Path) -> None:
    """Draw losses at very different speeds, beside DiLoCo's.

    The first figure has the losses over the inner steps of short runs, and a second file (-time)
    those of longer runs over virtual time.
    """
    here = [r for r in kept if (r["model"], r["num_workers"], r["speeds"]) == ("118k", 4, "very")]
    longer = sorted({row["steps"] for row in here} - {steps})
    for key, lengths, file in (
        ("steps", [steps], path),
        ("seconds", longer, path.with_name(f"{path.stem}-time{path.suffix}")),
    ):
        cells = [
            (length, name, own)
            for length in lengths
            for name in METHODS
            if name != BASE and (own := _of(here, length, name))
        ]
        if cells:
            _draw_cells(cells, here, key, file)


def _of(rows: list[Row], steps: int, name: str) -> list[Row]:
    return [row for row in rows if (row["steps"], row["method"]) == (steps, name)]


def _draw_cells(
    cells: list[tuple[int, str, list[Row]]], here: list[Row], key: str, path: Path
) -> None:
    rows = math.ceil(len(cells) / _COLUMNS)
    figure, panels = plots.new_panels(rows, _COLUMNS, 3.3, 2.6, sharey=True)
    # DiLoCo is broad and pale, and the method narrow, dark and marked: both can be seen.
    dark = {"color": plots.BLUE, "linewidth": 1.2, "marker": "o", "markersize": 3}
    for (steps, name, own), axis in zip(cells, panels.flat, strict=False):
        if base := _of(here, steps, BASE):
            axis.plot(*curve(base, key), color="0.8", linewidth=5, label=BASE)
        axis.plot(*curve(own, key), **dark, label=name)
        axis.set_xlabel(f"{'inner steps' if key == 'steps' else 'virtual seconds'}, {steps} each")
        plots.legend(axis, fontsize=7, loc="upper right")
    for axis in panels.flat[len(cells) :]:
        axis.set_visible(False)
    for row in panels:
        row[0].set_ylabel("held-out loss, nats per byte", fontsize=8)
    figure.suptitle("4 workers of very different speed, mean of the seeds")
    plots.save(figure, path)


def curve(rows: Sequence[Row], key: str) -> tuple[list[float], list[float]]:
    """Return the means over the seeds of ``key`` and of the loss, point by point."""
    points = list(zip(*(row["points"] for row in rows), strict=False))
    x, y = ([fmean(point[name] for point in at) for at in points] for name in (key, "loss"))
    return x, y
