"""Table and plot of ``async_convergence.py``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

Row = dict[str, Any]


def write_report(
    out: Path, rows: list[Row], lrs: dict[int, dict[str, float]], tuning_seed: int
) -> None:
    """Write ``out`` with the endings .txt and .png, and print the table."""
    kept = [row for row in rows if row["seed"] != tuning_seed]
    text = "\n".join(_lines(rows, kept, lrs, tuning_seed)) + "\n"
    out.with_suffix(".txt").write_text(text)
    print(text)
    _plot(kept, out.with_suffix(".png"))


def _lines(
    rows: list[Row], kept: list[Row], lrs: dict[int, dict[str, float]], tuning_seed: int
) -> list[str]:
    lines = [
        "# python benchmarks/async_convergence.py",
        "# held-out loss in nats per byte: mean and standard deviation of the seeds; in brackets",
        "# the difference to DiLoCo on the same seeds; virtual time until the last arrival over",
        "# DiLoCo's; mean staleness. All methods take the same number of inner steps.",
        f"# {len(kept)} runs of the table, {sum(row['cpu_s'] for row in rows):.0f} s of CPU time",
        f"# before the first round: {fmean(row['points'][0]['loss'] for row in kept):.4f}",
    ]
    for steps, rates in lrs.items():
        lines += ["", f"outer learning rates, {steps} steps a worker, loss of the tuning runs:"]
        for name, lr in rates.items():
            tried = [r for r in rows if r["seed"] == tuning_seed and r["method"] == name]
            shown = ", ".join(f"{r['lr']:g}: {r['loss']:.4f}" for r in tried if r["steps"] == steps)
            lines.append(f"  {name:18} {shown:42} -> {lr:g}")
    for (model, workers, steps), title in _groups(kept):
        key = (model, workers, steps)
        here = [r for r in kept if (r["model"], r["num_workers"], r["steps"]) == key]
        lines += ["", title, f"  {'method':18} {'speeds':9} {'seeds':>5} {'loss':>17}"
                  f" {'vs DiLoCo':>20} {'time':>6} {'stale':>6}"]  # fmt: skip
        for speeds in ("none", "slight", "moderate", "very"):
            for name in lrs[steps]:
                lines += _line(here, name, speeds)
    return lines


def _groups(rows: list[Row]) -> list[tuple[tuple[str, int, int], str]]:
    keys = dict.fromkeys((row["model"], row["num_workers"], row["steps"]) for row in rows)
    return [(key, f"model {key[0]}, {key[1]} workers, {key[2]} steps each") for key in keys]


def _line(rows: list[Row], name: str, speeds: str) -> list[str]:
    mine = {r["seed"]: r for r in rows if r["method"] == name and r["speeds"] == speeds}
    if not mine:
        return []
    base = {r["seed"]: r for r in rows if r["method"] == "DiLoCo"}
    losses = [row["loss"] for row in mine.values()]
    shared = [seed for seed in mine if seed in base]
    differences = [mine[s]["loss"] - base[s]["loss"] for s in shared]
    # With a barrier, time is that of the slowest worker at these speeds.
    times = [mine[s]["seconds"] / barrier_seconds(base[s], speeds) for s in shared]
    return [
        f"  {name:18} {speeds:9} {len(losses):5d} {mean_and_deviation(losses):>17}"
        f" {mean_and_deviation(differences, '+'):>20} {fmean(times) if times else 0:6.2f}"
        f" {fmean(r['mean_staleness'] for r in mine.values()):6.1f}"
    ]


SLOWEST = {"none": 1.0, "slight": 1.25, "moderate": 2.0, "very": 3.33 / 0.58}


def barrier_seconds(row: Row, speeds: str) -> float:
    """Return DiLoCo's virtual time at other speeds than those of the run."""
    return row["seconds"] * SLOWEST[speeds] / SLOWEST[row["speeds"]]


def mean_and_deviation(values: Sequence[float], sign: str = "") -> str:
    if not values:
        return "-"
    spread = f" ({stdev(values):.4f})" if len(values) > 1 else ""
    return f"{fmean(values):{sign}.4f}{spread}"


def _plot(rows: list[Row], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(11, 8), sharey="row")
    for steps, pair in zip(sorted({row["steps"] for row in rows}), axes, strict=False):
        wanted = ("118k", 4, "very", steps)
        keys = ("model", "num_workers", "speeds", "steps")
        _draw([r for r in rows if tuple(r[key] for key in keys) == wanted], pair)
        pair[0].set_ylabel(f"held-out loss, nats per byte\n{steps} steps a worker")
    figure.suptitle("4 workers of very different speed, mean of the seeds")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def _draw(rows: list[Row], axes: Any) -> None:
    for name in dict.fromkeys(row["method"] for row in rows):
        mine = [row for row in rows if row["method"] == name]
        count = min(len(row["points"]) for row in mine)
        points = [[row["points"][i] for row in mine] for i in range(count)]
        losses = [fmean(p["loss"] for p in at) for at in points]
        for axis, key in zip(axes, ("steps", "seconds"), strict=True):
            axis.plot([fmean(p[key] for p in at) for at in points], losses, label=name)
    axes[0].set_xlabel("inner steps of all workers")
    axes[1].set_xlabel("virtual seconds")
    axes[1].legend(fontsize=8)
