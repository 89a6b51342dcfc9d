"""Table and plot of long_run.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.support.common import deviation
from benchmarks.support.run_file import grouped
from benchmarks.support.tuning import choose
from diloco_comm_tools.common import plots

Row = dict[str, Any]
CELL = ("model", "momentum", "num_replicas", "rounds")
STYLES = {
    "Blocking": (plots.BLACK, "-"),
    "Eager zero": (plots.BLUE, "-"),
    "Eager sync": (plots.SKY, "--"),
    "Delayed": (plots.VERMILION, "-."),
}


def cells(rows: list[Row]) -> dict[tuple[Any, ...], dict[str, list[Row]]]:
    """Return the runs of each cell by method, at the learning rate that the method's search chose.

    A cell has one model, momentum, number of replicas and number of rounds. The cell of longer runs
    has the overlapped methods at the learning rates of the searched runs, and the searched cell's
    Blocking to compare with.
    """
    found: dict[tuple[Any, ...], dict[str, list[Row]]] = {}
    for row in rows:
        methods = found.setdefault(tuple(row[key] for key in CELL), {})
        methods.setdefault(row["method"], []).append(row)
    for methods in found.values():
        for name, runs in methods.items():
            lr = choose({r["lr"]: r["tuning_loss"] for r in runs if r["seed"] == 0}).lr
            methods[name] = sorted((r for r in runs if r["lr"] == lr), key=lambda r: r["seed"])
    found = dict(sorted(found.items()))
    searched: dict[tuple[Any, ...], list[Row]] = {}
    for key, methods in found.items():
        blocking = methods.pop("Blocking", None) or searched.get(key[:-1], [])
        found[key] = {"Blocking": blocking, **methods} if blocking else methods
        searched.setdefault(key[:-1], blocking)
    return found


def condense(rows: list[Row]) -> list[Row]:
    """Return the record of the runs: the losses of each setting, and the mean of their curves."""
    found = []
    for setting, own in grouped(rows, (*CELL, "method", "lr")):
        losses = [[run["seed"], run["tuning_loss"], run["loss"]] for run in own]
        points = zip(*(run["curve"] for run in own), strict=True)
        curve = [[at[0][0], fmean(point[1] for point in at)] for at in points]
        found.append({**setting, "seed, tuning loss, loss": losses, "rounds, mean loss": curve})
    return found


def report_lines(rows: list[Row]) -> Iterator[str]:
    """Return the table's lines."""
    yield "# loss: mean of the outer parameters over the replicas after flush(), held-out text"
    yield "# over Blocking: mean and sample deviation of the differences, seed by seed"
    for (model, momentum, num_replicas, rounds), methods in cells(rows).items():
        yield ""
        yield f"# {model}, {num_replicas} replicas, {rounds} rounds, momentum {momentum}"
        names = f"#{'method':>13}{'rounds':>8}{'lr':>8}{'loss':>9}{'spread':>9}"
        yield f"{names}{'over Blocking':>20}{'seeds':>7}"
        base = {row["seed"]: row["loss"] for row in methods.get("Blocking", [])}
        for name, runs in methods.items():
            losses = [run["loss"] for run in runs]
            over = [run["loss"] - base[run["seed"]] for run in runs if run["seed"] in base]
            difference = f"{fmean(over):+.3f} ± {deviation(over):.3f}" if over else "-"
            yield (
                f"  {name:>12}{runs[0]['rounds']:>8}{runs[0]['lr']:>8g}{fmean(losses):>9.3f}"
                f"{deviation(losses):>9.3f}{difference:>20}{len(runs):>7}"
            )


def draw(rows: list[Row], path: Path) -> None:
    """Draw the loss over the rounds, mean and range of the seeds, one panel a cell."""
    found = cells(rows)
    figure, panels = plots.new_panels(1, len(found), 4.2, 3.6)
    for axes, ((_, momentum, num_replicas, rounds), methods) in zip(
        panels[0], found.items(), strict=True
    ):
        shown: list[float] = []
        for name, runs in methods.items():
            colour, line = STYLES[name]
            x = [point[0] for point in runs[0]["curve"]]
            losses = list(zip(*([p[1] for p in run["curve"]] for run in runs), strict=True))
            mean = [fmean(values) for values in losses]
            axes.plot(x, mean, line, color=colour, label=f"{name}, lr {runs[0]['lr']:g}")
            low, high = map(min, losses), map(max, losses)
            axes.fill_between(x, list(low), list(high), color=colour, alpha=0.15, linewidth=0)
            shown += [value for at, value in zip(x, mean, strict=True) if at >= rounds // 5]
        plots.show_range(axes, shown)
        axes.set_title(f"{num_replicas} replicas, momentum {momentum}", fontsize="medium")
        axes.set_xlabel("rounds of 15 inner steps")
        plots.legend(axes, fontsize="small")
    panels[0, 0].set_ylabel("held-out loss (nats a byte)")
    plots.save(figure, path)
