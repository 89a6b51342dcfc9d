"""Table of ``async_convergence.py``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from benchmarks.asynchronous.claims import ALIKE, judge
from benchmarks.asynchronous.methods import METHODS, SPEEDS
from benchmarks.asynchronous.plots import draw_methods, draw_time
from benchmarks.support import common
from benchmarks.support.run_file import grouped
from benchmarks.support.tuning import Choice

Row = dict[str, Any]
Chosen = Mapping[int, Mapping[str, Choice]]


def kept_rows(rows: list[Row], chosen: Chosen, tuning_seed: int) -> list[Row]:
    """Return the runs of the table: those at the learning rate that the search chose.

    Args:
        chosen: By steps and method, the learning rate.
        tuning_seed: Of the runs that chose it.
    """
    return [row for row in rows if row["seed"] != tuning_seed and _is_chosen(row, chosen)]


def condense(rows: list[Row]) -> list[Row]:
    """Return the record of the runs: for each setting and rate, the losses and the mean figures."""
    keys = ("model", "num_workers", "steps", "speeds", "method", "lr")
    return [
        {
            **setting,
            "seed, loss": [[run["seed"], run["loss"]] for run in own],
            **{
                key: fmean(run[key] for run in own)
                for key in ("seconds", "updates", "mean_staleness")
            },
        }
        for setting, own in grouped(rows, keys)
    ]


def recorded_losses(results: list[Row]) -> list[Row]:
    """Return the runs of a record, with their losses alone."""
    return [
        {**{k: v for k, v in entry.items() if k != "seed, loss"}, "seed": seed, "loss": loss}
        for entry in results
        for seed, loss in entry["seed, loss"]
    ]


def draw(kept: list[Row], steps: int, path: Path) -> None:
    """Draw the losses of the table's runs over their steps, and beside it those over time."""
    if kept:
        draw_methods(kept, steps, path)
        draw_time(kept, path.with_name(f"{path.stem}-time{path.suffix}"))


def _is_chosen(row: Row, chosen: Chosen) -> bool:
    choice = chosen[row["steps"]].get(row["method"])
    return choice is not None and row["lr"] == choice.lr


def report_lines(rows: list[Row], chosen: Chosen, tuning_seed: int) -> Iterator[str]:
    """Return the table's lines; see ``kept_rows``."""
    kept = kept_rows(rows, chosen, tuning_seed)
    seconds = sum(row["cpu_s"] for row in rows)
    yield f"# {common.command_line()}"
    yield "# loss: held out, nats per byte, mean and standard deviation of the seeds; all methods"
    yield "# take the same number of inner steps. vs DiLoCo: on the same seeds; at equal updates:"
    yield "# when both had applied as many (interpolated; DyLU's rounds are shorter: more updates)."
    yield "# time: virtual, until the last arrival, over DiLoCo's. stale: mean staleness."
    yield f"# {len(kept)} runs in the table, {len(rows)} in all, {seconds:.0f} s of processor time"
    if kept:
        start = fmean(row["points"][0]["loss"] for row in kept)
        yield f"# before the first round: {start:.4f}"
    for steps, by_name in chosen.items():
        yield from _tuned(rows, steps, by_name, tuning_seed)
    for (model, workers, steps), title in _groups(kept):
        key = (model, workers, steps)
        here = [r for r in kept if (r["model"], r["num_workers"], r["steps"]) == key]
        yield from _table(here, title)
        yield from _judged(here)


def _tuned(
    rows: list[Row], steps: int, by_name: Mapping[str, Choice], tuning_seed: int
) -> Iterator[str]:
    if by_name:
        yield ""
        yield f"outer learning rates, {steps} steps a worker, loss of the tuning runs:"
    for name, choice in by_name.items():
        tried = {
            r["lr"]: r["loss"]
            for r in rows
            if (r["seed"], r["method"], r["steps"]) == (tuning_seed, name, steps)
        }
        shown = ", ".join(f"{lr:g}: {tried[lr]:.4f}" for lr in sorted(tried))
        yield f"  {name:22} {shown} -> {choice.lr:g}"
        if not choice.is_bracketed:
            yield f"  ERROR: {name}: the best learning rate, {choice.lr:g}, is at the grid's edge"


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


def _judged(rows: list[Row]) -> Iterator[str]:
    """Yield the verdicts on the claims, at each of the speeds."""
    for speeds in SPEEDS:
        here = [r for r in rows if r["speeds"] == speeds or METHODS[r["method"]].is_synchronous]
        lines = list(judge(here)) if any(r["speeds"] == speeds for r in here) else []
        if lines:
            yield f"  claims, speeds {speeds} (alike: within {ALIKE:g}):"
            yield from lines


def barrier_seconds(row: Row, speeds: str) -> float:
    """Return DiLoCo's virtual time at other speeds than those of the run."""
    slowest = {name: max(SPEEDS[name](row["num_workers"])) for name in SPEEDS}
    return row["seconds"] * slowest[speeds] / slowest[row["speeds"]]


def mean_and_deviation(values: Sequence[float], sign: str = "") -> str:
    if not values:
        return "-"
    spread = f" ({stdev(values):.4f})" if len(values) > 1 else ""
    return f"{fmean(values):{sign}.4f}{spread}"
