"""Figures, table and plot of benchmarks/against_torchft/elastic.py."""

from __future__ import annotations

import argparse
import itertools
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.against_torchft.elastic_replica import NUM_REPLICAS
from benchmarks.against_torchft.peer import PACKAGE, VERSION
from benchmarks.support import common
from diloco_comm_tools.common import plots

if TYPE_CHECKING:
    from benchmarks.against_torchft.elastic import Process, Side

# Kept by the round of a commit; all others of the same process are lost.
_COMMITS = ("commit", "healed")
# Seconds of a bin in the plot.
_WIDTH_S = 2.0


def figures_of(side: Side, args: argparse.Namespace) -> dict[str, Any]:
    """Return what the logs of one side say. All times count from the first event."""
    begin, end = side.events[0][0], side.events[-1][0]
    commits = sorted(at for process in side.processes for at in process.times("commit"))
    kept = [kept_steps(process) for process in side.processes]
    kept_between = [at for times in kept for at in times if begin < at <= end]
    calm_end = begin + args.calm
    calm = [at for times in kept for at in times if begin < at <= calm_end]
    # Steps a second of three replicas that nothing happens to.
    speed = len(calm) / args.calm
    taken = sum(begin < at <= end for process in side.processes for at in process.times("step"))
    kills = [at for at, kind, _ in side.events if kind == "kill"]
    down, up = (
        next(at for at, kind, _ in side.events if kind == f"coordinator {what}")
        for what in ("down", "up")
    )
    joins = [process for process in side.processes[NUM_REPLICAS:]]
    losses = [
        line["loss"] for process in side.processes for line in process.lines() if "loss" in line
    ]
    copied = [line["received"] for one in joins for line in one.lines() if "received" in line]
    return {
        "parameters": side.processes[0].lines()[0]["parameters"],
        "seconds": round(end - begin, 1),
        "goodput": round(len(kept_between) / (speed * (end - begin)), 4),
        "steps_a_second": round(speed, 2),
        "steps": {"taken": taken, "kept": len(kept_between)},
        "fault_to_commit_s": [round(_next(commits, at) - at, 2) for at in kills],
        "start_to_commit_s": [
            round(times[0] - one.started, 2) for one in joins if (times := one.times("commit"))
        ],
        "join_gap_s": [round(_gap(commits, one), 2) for one in joins if one.times(*_COMMITS)],
        "join_bytes": max(copied, default=0),
        "coordinator": {
            "away_s": round(up - down, 2),
            "commits_while_away": _count_between(commits, down, up),
            "return_to_commit_s": round(_next(commits, up) - up, 2),
            "longest_gap_s": round(_longest_gap(commits, down, end), 2),
        },
        "restarts": side.restarts,
        "final_loss": round(statistics.mean(losses), 4) if losses else None,
        "events": [(round(at - begin, 2), kind, replica) for at, kind, replica in side.events],
        "kept_in_bins": in_bins([at - begin for at in kept_between], end - begin),
    }


def in_bins(times: list[float], seconds: float) -> list[int]:
    """Count the times in each whole bin of the plot."""
    counts = [0] * int(round(seconds, 1) / _WIDTH_S)
    for at in times:
        if 0 <= at < len(counts) * _WIDTH_S:
            counts[int(at / _WIDTH_S)] += 1
    return counts


def kept_steps(process: Process) -> list[float]:
    """Return the times of the inner steps that committed rounds hold, of one process.

    torchft throws the steps of a round away that failed ("discarded"), and those of a replica that
    was given the state in the round ("healed"); ours keep them until a round counts.
    """
    kept: list[float] = []
    waiting: list[float] = []
    for line in process.lines():
        if line["kind"] == "step":
            waiting.append(line["at"])
        elif line["kind"] == "commit":
            kept += waiting
            waiting = []
        elif line["kind"] in ("healed", "discarded"):
            waiting = []
    return kept


def _next(times: list[float], after: float) -> float:
    return next((at for at in times if at > after), float("nan"))


def _count_between(times: list[float], begin: float, end: float) -> int:
    return sum(begin < at <= end for at in times)


def _longest_gap(times: list[float], begin: float, end: float) -> float:
    inside = [begin, *(at for at in times if begin < at <= end), end]
    return max(b - a for a, b in itertools.pairwise(inside))


def _gap(commits: list[float], process: Process) -> float:
    """Return the longest time without a commit around the first one of a replica that joins."""
    first = process.times(*_COMMITS)[0]
    return _longest_gap(commits, process.started, first)


# ---------------------------------------------------------------------------------- table


def print_table(report: common.Report, results: dict[str, Any]) -> None:
    rows = [
        ("goodput", lambda r: f"{r['goodput']:.3f}"),
        ("inner steps taken", lambda r: f"{r['steps']['taken']}"),
        ("  of which no committed round holds", lambda r: f"{_lost(r)}"),
        ("fault to next commit, s", lambda r: _listed(r["fault_to_commit_s"])),
        ("start of a process to its first commit, s", lambda r: _listed(r["start_to_commit_s"])),
        ("longest time without a commit while it joins, s", lambda r: _listed(r["join_gap_s"])),
        ("bytes of state that a newcomer receives", lambda r: f"{r['join_bytes']:,}"),
        (
            "commits while lighthouse or registry is away",
            lambda r: f"{r['coordinator']['commits_while_away']}",
        ),
        (
            "its return to the next commit, s",
            lambda r: f"{r['coordinator']['return_to_commit_s']:.2f}",
        ),
        (
            "longest time without a commit from its end on, s",
            lambda r: f"{r['coordinator']['longest_gap_s']:.2f}",
        ),
        ("processes that ended by themselves", lambda r: f"{r['restarts']}"),
        ("final loss, nats a byte", lambda r: f"{r['final_loss']}"),
        ("seconds", lambda r: f"{r['seconds']:.0f}"),
    ]
    report.print("#")
    report.print(f"# {'':48}" + "".join(f"{name:>24}" for name in results))
    for name, text in rows:
        report.print(f"  {name:48}" + "".join(f"{text(result):>24}" for result in results.values()))
    report.print("# goodput: inner steps in committed rounds, over those that three replicas take")
    report.print("#   in the same time when nothing happens to them.")


def _lost(result: dict[str, Any]) -> int:
    return int(result["steps"]["taken"] - result["steps"]["kept"])


def _listed(seconds: list[float]) -> str:
    return ", ".join(f"{one:.1f}" for one in seconds) or "-"


# ----------------------------------------------------------------------------------- plot

_LABELS = {"kill": "kill", "start": "start", "coordinator down": "coordinator\nkilled"}


def plot(results: dict[str, Any], path: Path) -> None:
    """Draw the inner steps that were kept over time, and the events, of each side."""
    figure, panels = plots.new_panels(len(results), 1, 10.0, 2.9)
    for axes, (name, result) in zip(panels[:, 0], results.items(), strict=True):
        x = [(i + 0.5) * _WIDTH_S for i in range(len(result["kept_in_bins"]))]
        y = [count / _WIDTH_S for count in result["kept_in_bins"]]
        axes.fill_between(x, y, step="mid", color=plots.GREY, alpha=0.35)
        axes.step(x, y, where="mid", color=plots.BLACK, linewidth=1.2)
        axes.axhline(result["steps_a_second"], color=plots.BLUE, linewidth=1, linestyle="--")
        for at, kind, replica in result["events"]:
            if kind in ("kill", "start", "coordinator down", "coordinator up"):
                colour = plots.VERMILION if kind in ("kill", "coordinator down") else plots.GREEN
                axes.axvline(at, color=colour, linewidth=1, linestyle=":")
                if kind in _LABELS:
                    height = -16 if kind == "start" else -2
                    text = f"{_LABELS[kind]} {replica}" if replica >= 0 else _LABELS[kind]
                    axes.annotate(
                        text,
                        (at, 1.0),
                        xycoords=("data", "axes fraction"),
                        xytext=(2, height),
                        textcoords="offset points",
                        va="top",
                        fontsize="small",
                        color=colour,
                    )
        axes.set_ylim(bottom=0.0, top=1.35 * max([1.0, *y]))
        title = f"{PACKAGE} {VERSION}" if name == "torchft" else "diloco_comm"
        axes.set_title(f"{title}: goodput {result['goodput']:.3f}")
        axes.set_ylabel("inner steps a second\nthat were kept")
    panels[-1, 0].set_xlabel("seconds")
    plots.save(figure, path)
