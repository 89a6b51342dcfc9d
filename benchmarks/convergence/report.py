"""Table and plot of sweep.py."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from benchmarks.support import common
from diloco_comm_tools.common import plots


def write_report(
    report: common.Report, results: list[dict[str, Any]]
) -> dict[str, list[dict[str, Any]]]:
    """Print one table a task, best loss first; returns the rows as they are printed."""
    tables: dict[str, list[dict[str, Any]]] = {}
    for task in dict.fromkeys(result["task"] for result in results):
        rows = tables[task] = _rows([r for r in results if r["task"] == task])
        report.print("#")
        names = ("loss", "spread", "accuracy", "sent MB", "exposed s")
        report.print(f"# {task:>24}" + "".join(f"{n:>11}" for n in names) + "  numbers")
        for row in rows:
            exposed = f"{row['exposed_s']:11.2f}" if row["exposed_s"] is not None else f"{'-':>11}"
            cells = f"{row['loss']:11.4f}{row['spread']:11.4f}{row['accuracy']:11.4f}"
            numbers = " ".join(f"{k} {v:g}" for k, v in row["choice"].items())
            line = f" {row['row']:>25}{cells}{row['sent_bytes'] / 1e6:11.1f}{exposed}  {numbers}"
            report.print(line)
    report.print("# loss: outer parameters after flush(), on held-out data, mean of the seeds;")
    report.print("#   spread: their sample standard deviation.")
    report.print("# exposed s: what a whole run would have waited on the link, from a few rounds.")
    return tables


def tuning_losses(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the loss of each candidate that was tried for the numbers of a method."""
    return [
        {key: result[key] for key in ("task", "family", "candidate", "choice", "loss")}
        for result in results
        if result["kind"] == "tune"
    ]


def _rows(results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    exposed = {
        r["row"]: r["exposed_s_per_round"] * r["size"]["num_steps"] / r["size"]["sync_every"]
        for r in results
        if r["kind"] == "link"
    }
    trained: dict[str, list[dict[str, Any]]] = {}
    for result in results:
        if result["kind"] == "train":
            trained.setdefault(result["row"], []).append(result)
    rows = []
    for name, runs in trained.items():
        losses = [run["loss"] for run in runs]
        rows.append(
            {
                "row": name,
                "loss": statistics.fmean(losses),
                "spread": statistics.stdev(losses) if len(losses) > 1 else 0.0,
                "losses": losses,
                "accuracy": statistics.fmean(run["accuracy"] for run in runs),
                "sent_bytes": statistics.fmean(run["sent_bytes"] for run in runs),
                "exposed_s": exposed.get(name),
                "choice": runs[0]["choice"],
            }
        )
    # NaN compares as neither less nor more: a method that diverged goes to the end.
    return sorted(rows, key=lambda r: (r["loss"] != r["loss"], r["loss"]))


def draw(tables: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Draw mean and every seed of each method, one panel a task."""
    height = 1.5 + 0.25 * max(len(rows) for rows in tables.values())
    figure, panels = plots.new_panels(1, len(tables), 7, height)
    for axes, (task, rows) in zip(panels[0], tables.items(), strict=True):
        for place, row in enumerate(reversed(rows)):
            axes.plot(
                row["losses"], [place] * len(row["losses"]), "o", color=plots.GREY, markersize=4
            )
            axes.plot(row["loss"], place, "|", color=plots.BLUE, markersize=14, markeredgewidth=2)
        axes.set_yticks(range(len(rows)), [row["row"] for row in reversed(rows)], fontsize=8)
        axes.set_xlabel("validation loss, nats (bar: mean; dots: seeds)")
        axes.set_title(task)
    plots.save(figure, path)
