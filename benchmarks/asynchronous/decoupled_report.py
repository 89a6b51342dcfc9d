"""Table and plot of ``decoupled.py``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.asynchronous.claims import ALIKE, DECOUPLED, differences, judge
from benchmarks.asynchronous.decoupled_methods import (
    DELAYED,
    GRACE,
    METHODS,
    NAMES,
    STREAMING,
    steps_in_equal_time,
)
from benchmarks.asynchronous.report import curve
from benchmarks.asynchronous.training import TUNING_SEED
from benchmarks.support.common import mean_and_deviation
from benchmarks.support.run_file import grouped
from benchmarks.support.tuning import Tried, choose, search_lines, tried_rates
from diloco_comm_tools.common import plots

Row = dict[str, Any]
Cell = tuple[str, str, int, int]
_MEAN_FIGURES = (
    "seconds", "updates", "goodput", "applied", "lost", "reports", "effective_lr", "bytes_up",
    "bytes_down",
)  # fmt: skip


def tried(rows: Sequence[Row]) -> Tried:
    return tried_rates(rows, ("model", "num_learners", "speeds", "method"), TUNING_SEED)


def kept_rows(rows: Sequence[Row]) -> list[Row]:
    """Return the runs of the table: those at the learning rate that the search chose."""
    searches = tried(rows)
    kept = []
    for row in rows:
        method = METHODS.get(row["method"])
        name = (method.rate_of if method is not None else "") or row["method"]
        places = [key for key in searches if (*key[:2], key[3]) == (*_size(row), name)]
        # A search at the row's own speeds goes before the one at other speeds.
        places.sort(key=lambda key: key[2] != row["speeds"])
        losses = searches[places[0]] if places else {}
        if row["seed"] != TUNING_SEED and losses and row["lr"] == choose(losses).lr:
            kept.append(row)
    return kept


def _size(row: Row) -> tuple[str, int]:
    return row["model"], row["num_learners"]


def _cell(row: Row) -> Cell:
    return row["model"], row["speeds"], row["num_learners"], row["steps"]


def condense(rows: list[Row]) -> list[Row]:
    """Return the record of the runs: for each setting and rate, the losses and the mean figures."""
    found = []
    for setting, own in grouped(rows, ("model", "speeds", "num_learners", "steps", "method", "lr")):
        means = {
            key: fmean(run[key] for run in own)
            for key in _MEAN_FIGURES
            if all(key in run for run in own)
        }
        if all("rho" in run for run in own):
            means["rho"] = [fmean(x) for x in zip(*(run["rho"] for run in own), strict=True)]
        losses = [[run["seed"], run["loss"]] for run in own]
        found.append({**setting, "seed, loss": losses, **means})
    return found


def report_lines(rows: list[Row]) -> Iterator[str]:
    """Return the table's lines."""
    kept = kept_rows(rows)
    yield "# loss: held out, nats a byte, mean (standard deviation) of the seeds"
    yield "# tokens: loss less that of Streaming after equal tokens, on the same seeds"
    yield "# time: the same after equal virtual time, in which waiting learners take fewer steps"
    yield "# goodput: inner steps over those that the learners can take in the time"
    yield "# applied, lost: share of the inner steps in a merge, and overwritten; merges: of all"
    yield "# fragments; in: reports in a merge; rho: cosine of successive merges of the three"
    yield "# fragments; eff: effective outer learning rate; up, down: MB of all learners"
    seconds = sum(row["cpu_s"] for row in rows)
    yield f"# {len(kept)} runs in the table, {len(rows)} in all, {seconds:.0f} s of processor time"
    for cell in dict.fromkeys(map(_cell, kept)):
        here = [row for row in kept if _cell(row) == cell]
        if {row["method"] for row in here} == {STREAMING}:
            continue  # stands in the table of the cell whose time it has
        yield from _table(here, cell, kept)
        yield from judge(here, DECOUPLED, f"  claims (no worse: by less than {ALIKE:g})")
    yield from search_lines(tried(rows))


def in_equal_time(kept: Sequence[Row], cell: Cell) -> list[Row]:
    """Return the runs of Streaming that end when the decoupled ones of the cell do."""
    wanted = (*cell[:-1], steps_in_equal_time(*cell[1:]))
    return [row for row in kept if row["method"] == STREAMING and _cell(row) == wanted]


def _table(here: list[Row], cell: Cell, kept: list[Row]) -> Iterator[str]:
    model, speeds, num_learners, steps = cell
    yield ""
    yield f"# model {model}, speeds {speeds}, {num_learners} learners, {steps} steps each"
    yield (
        f"#{'method':>26}{'lr':>6}{'seeds':>6}{'loss':>16}{'tokens':>17}{'time':>17}{'goodput':>8}"
        f"{'applied':>8}{'lost':>7}{'merges':>7}{'in':>6}{'rho':>16}{'eff':>6}{'up':>7}{'down':>7}"
    )
    for name in NAMES:
        mine = [row for row in here if row["method"] == name]
        if mine:
            yield _line(mine, _over(mine, here), _over(mine, in_equal_time(kept, cell)))
    short = in_equal_time(kept, cell)
    if short and _cell(short[0]) != cell:
        yield _line(short, [], [], f"{STREAMING}, {short[0]['steps']} steps")


def _over(mine: Sequence[Row], base: Sequence[Row]) -> list[float]:
    of_seed = {row["seed"]: row["loss"] for row in base if row["method"] == STREAMING}
    return [row["loss"] - of_seed[row["seed"]] for row in mine if row["seed"] in of_seed]


def _line(mine: list[Row], tokens: list[float], time: list[float], name: str = "") -> str:
    line = (
        f" {name or mine[0]['method']:>26}{mine[0]['lr']:>6g}{len(mine):>6}"
        f"{mean_and_deviation([row['loss'] for row in mine]):>16}"
        f"{mean_and_deviation(tokens, '+'):>17}{mean_and_deviation(time, '+'):>17}"
    )
    if "rho" not in mine[0]:
        return line

    def mean(key: str) -> float:
        return fmean(row[key] for row in mine)

    rho = " ".join(f"{fmean(values):.2f}" for values in zip(*(r["rho"] for r in mine), strict=True))
    return line + (
        f"{mean('goodput'):>8.0%}{mean('applied'):>8.0%}{mean('lost'):>7.0%}{mean('updates'):>7.0f}"
        f"{mean('reports'):>6.2f}{rho:>16}{mean('effective_lr'):>6.2f}"
        f"{mean('bytes_up') / 1e6:>7.1f}{mean('bytes_down') / 1e6:>7.1f}"
    )


# ------------------------------------------------------------------------------------- the plot

_STYLES = {
    STREAMING: (plots.BLACK, "-"),
    DELAYED: (plots.GREY, "--"),
    "K=1": (plots.VERMILION, "-"),
    GRACE: (plots.BLUE, "-"),
    "K=M": (plots.GREEN, "-."),
    "K=1, grace, carry": (plots.PURPLE, ":"),
}


def draw(rows: list[Row], path: Path) -> None:
    """Draw the loss over virtual time at very different speeds, and the differences by method.

    One row of panels for each model.
    """
    kept = kept_rows(rows)
    models = [name for name in ("34k", "118k") if any(row["model"] == name for row in kept)]
    if not models:
        return
    figure, panels = plots.new_panels(len(models), 3, 4.6, 3.8)
    for own, model in zip(panels, models, strict=True):
        cells = {speeds: (model, speeds, 4, 160) for speeds in ("doubling", "none")}
        _draw_time(own[0], [row for row in kept if _cell(row) == cells["doubling"]])
        for axes, (speeds, cell) in zip(own[1:], cells.items(), strict=True):
            _draw_cell(axes, [row for row in kept if _cell(row) == cell])
            words = {"none": "equal speeds", "doubling": "steps of 1, 1, 2, 4 s"}[speeds]
            axes.set_title(f"{model}, 4 learners, {words}, equal tokens", fontsize="medium")
    plots.save(figure, path)


def _draw_time(axes: Any, here: Sequence[Row]) -> None:
    for name, (colour, line) in _STYLES.items():
        mine = [row for row in here if row["method"] == name]
        if mine:
            axes.plot(*curve(mine, "seconds"), line, color=colour, label=name)
    axes.set_xlabel("virtual seconds")
    axes.set_ylabel("held-out loss (nats a byte)")
    axes.set_title("4 learners, steps of 1, 1, 2, 4 s", fontsize="medium")
    plots.legend(axes, fontsize="small")


def _draw_cell(axes: Any, here: list[Row]) -> None:
    names = [name for name in NAMES if name != STREAMING and differences(here, name, STREAMING)]
    for place, name in enumerate(reversed(names)):
        found = differences(here, name, STREAMING)
        axes.plot(found, [place] * len(found), "o", color=plots.SKY, markersize=4)
        axes.plot(fmean(found), place, "|", color=plots.BLUE, markersize=14, markeredgewidth=2)
    axes.axvline(0.0, color=plots.BLACK, linewidth=0.8)
    axes.set_yticks(range(len(names)), list(reversed(names)), fontsize="small")
    axes.set_xlabel("loss over Streaming (nats a byte)")
