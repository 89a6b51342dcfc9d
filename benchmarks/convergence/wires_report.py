"""Table and plot of wires.py."""

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
CELL = ("model", "num_replicas", "sync_every", "rounds", "method")
# The method of a run without one: the oldest lines of the file.
BLOCKING = "blocking"
BASE = "fp32"
# Seeds from here on choose the learning rate, and are in no table.
FIRST_TUNING_SEED = 1000
# Of a page: names, and the lines around its tables.
_MODEL_NAMES = {
    "118k": "118,000 parameters",
    "118k, initial 0.02": "118,000 parameters, initial deviation 0.02",
    "1.4M": "1.4 million parameters",
}
_BEGIN, _END = "<!-- tables -->", "<!-- end of tables -->"
FAMILIES = {
    "int": ("two phases, rotated or integer", plots.BLUE, "o-"),
    "sub": ("sub2 to sub16", plots.GREEN, "s-"),
    "topk": ("topk", plots.VERMILION, "^-"),
    "SparseLoCo": ("SparseLoCo's scheme", plots.PURPLE, "D"),
}


def cells(rows: list[Row]) -> dict[tuple[Any, ...], dict[str, list[Row]]]:
    """Return the runs of each cell by wire, at the learning rate that was chosen.

    In the order of the seeds, and most bits first.
    """
    tried: dict[tuple[Any, ...], dict[str, list[Row]]] = {}
    for row in rows:
        values = {"method": BLOCKING, **row}
        wires = tried.setdefault(tuple(values[key] for key in CELL), {})
        wires.setdefault(row["wire"], []).append(row)
    found = {}
    for cell, wires in tried.items():
        runs = {wire: kept for wire, own in wires.items() if (kept := _at_best_rate(own))}
        if runs:
            found[cell] = dict(sorted(runs.items(), key=lambda item: -item[1][0]["bits"]))
    return found


def _at_best_rate(runs: list[Row]) -> list[Row]:
    tuning = {run["lr"]: run["tuning_loss"] for run in runs if run["seed"] >= FIRST_TUNING_SEED}
    lr = choose(tuning).lr
    kept = [run for run in runs if run["seed"] < FIRST_TUNING_SEED and run["lr"] == lr]
    return sorted(kept, key=lambda run: run["seed"])


def over_base(wires: dict[str, list[Row]], wire: str) -> list[float]:
    """Return the loss of a wire less that of fp32, seed by seed."""
    base = {row["seed"]: row["loss"] for row in wires.get(BASE, [])}
    return [row["loss"] - base[row["seed"]] for row in wires[wire] if row["seed"] in base]


def condense(rows: list[Row]) -> list[Row]:
    """Return the record of the runs: for each cell and wire, the losses at each learning rate.

    ``tuning`` lists rates and the losses that choose one, ``losses`` seed, rate and loss.
    """
    with_method = [{"method": BLOCKING, **row} for row in rows]
    found = []
    for setting, own in grouped(with_method, (*CELL, "wire", "bits")):
        is_tuning = [run["seed"] >= FIRST_TUNING_SEED for run in own]
        tuning = [run for run, is_one in zip(own, is_tuning, strict=True) if is_one]
        trained = [run for run, is_one in zip(own, is_tuning, strict=True) if not is_one]
        found.append(
            {
                **setting,
                "tuning": [[run["lr"], run["tuning_loss"]] for run in tuning],
                "losses": [[run["seed"], run["lr"], run["loss"]] for run in trained],
            }
        )
    return found


def recorded_runs(results: list[Row]) -> list[Row]:
    """Return the runs of a record, with what the tables need of them."""
    rows = []
    for entry in results:
        setting = {key: entry[key] for key in (*CELL, "wire", "bits")}
        for lr, loss in entry["tuning"]:
            rows.append({**setting, "seed": FIRST_TUNING_SEED, "lr": lr, "tuning_loss": loss})
        for seed, lr, loss in entry["losses"]:
            rows.append({**setting, "seed": seed, "lr": lr, "loss": loss})
    return rows


def report_lines(rows: list[Row]) -> Iterator[str]:
    """Return the table's lines."""
    yield "# loss: outer parameters after the last round, held-out text, mean of the seeds"
    yield "# over fp32: mean and sample deviation of the differences, seed by seed"
    yield "# bits: of one payload an element, with scales and without padding"
    for (model, num_replicas, sync_every, rounds, method), wires in cells(rows).items():
        yield ""
        name = _named(model, method)
        yield f"# {name}, {num_replicas} replicas, {rounds} rounds of {sync_every} steps"
        names = f"#{'wire':>11}{'bits':>9}{'lr':>7}{'loss':>9}{'spread':>9}"
        yield f"{names}{'over fp32':>19}{'seeds':>7}"
        for wire, runs in wires.items():
            over = over_base(wires, wire)
            difference = f"{fmean(over):+.4f} ± {deviation(over):.4f}" if over else "-"
            losses = [run["loss"] for run in runs]
            yield (
                f" {wire:>11}{runs[0]['bits']:>9.4g}{runs[0]['lr']:>7g}{fmean(losses):>9.4f}"
                f"{deviation(losses):>9.4f}{difference:>19}{len(runs):>7}"
            )


def page_lines(rows: list[Row]) -> Iterator[str]:
    """Return two Markdown tables: the cell with the most wires, and the others, a row each."""
    found = cells(rows)
    first = max(found, key=lambda cell: len(found[cell]))
    yield ""
    yield f"{_title(first, found[first])} (mean; sample deviation of the differences):"
    yield ""
    yield "| wire | bits | outer learning rate | loss | loss over fp32 |"
    yield "|---|---|---|---|---|"
    for wire, runs in found[first].items():
        yield (
            f"| {_code(wire)} | {runs[0]['bits']:.4g} | {runs[0]['lr']:g} | {_mean_loss(runs)} "
            f"| {_difference(found[first], wire)} |"
        )
    yield ""
    others = {cell: wires for cell, wires in found.items() if cell != first}
    if not others:
        return
    present = dict.fromkeys(wire for wires in others.values() for wire in wires)
    names = sorted(present.keys() - {BASE}, key=[*found[first], *present].index)
    yield "Other settings: the loss of fp32, and the loss of the wires over it, as above:"
    yield ""
    yield f"| setting | {_code(BASE)} | " + " | ".join(map(_code, names)) + " |"
    yield "|---" * (2 + len(names)) + "|"
    for cell, wires in others.items():
        values = [_difference(wires, wire) if wire in wires else "" for wire in names]
        base = _mean_loss(wires[BASE]) if BASE in wires else ""
        yield f"| {_title(cell, wires)} | {base} | " + " | ".join(values) + " |"
    yield ""


def _title(cell: tuple[Any, ...], wires: dict[str, list[Row]]) -> str:
    model, num_replicas, sync_every, rounds, method = cell
    counts = sorted({len(runs) for runs in wires.values()})
    seeds = " to ".join(str(count) for count in counts) + (" seed" if counts == [1] else " seeds")
    name = _named(_MODEL_NAMES[model], method)
    return f"{name}, W={num_replicas} replicas, {rounds} rounds of H={sync_every}, {seeds}"


def _code(wire: str) -> str:
    return wire if wire == "SparseLoCo" else f"`{wire}`"


def _mean_loss(runs: list[Row]) -> str:
    return f"{fmean(run['loss'] for run in runs):.3f}"


def _difference(wires: dict[str, list[Row]], wire: str) -> str:
    over = over_base(wires, wire)
    difference = f"{fmean(over):+.3f}" if over else "-"
    return difference + (f" ({deviation(over):.3f})" if len(over) > 1 else "")


def write_page(rows: list[Row], page: Path) -> None:
    """Replace the tables between the two marks of a Markdown page.

    Raises:
        ValueError: If the page lacks a mark.
    """
    text = page.read_text()
    before, begin, rest = text.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not end:
        raise ValueError(f"{page} has no line {_BEGIN} with a line {_END} after it")
    page.write_text(before + begin + "\n" + "\n".join(page_lines(rows)) + "\n" + end + after)


def _named(model: str, method: str) -> str:
    return model if method == BLOCKING else f"{method.capitalize()}, {model}"


def _family(wire: str) -> str:
    return next(name for name in FAMILIES if wire.startswith(name))


def draw(rows: list[Row], path: Path) -> None:
    """Draw the loss over that of fp32 against the bits, one panel a cell, two panels a row."""
    found = {cell: wires for cell, wires in cells(rows).items() if len(wires) > 1 and BASE in wires}
    if not found:
        return
    num_columns = min(2, len(found))
    num_rows = -(-len(found) // num_columns)
    figure, panels = plots.new_panels(num_rows, num_columns, 5.2, 3.6)
    for axes, (cell, wires) in zip(panels.flat, found.items(), strict=False):
        _draw_cell(axes, cell, wires)
    for axes in panels.flat[len(found) :]:
        axes.set_visible(False)
    plots.save(figure, path)


def _draw_cell(axes: Any, cell: tuple[Any, ...], wires: dict[str, list[Row]]) -> None:
    model, num_replicas, sync_every, rounds, method = cell
    for family, (label, colour, style) in FAMILIES.items():
        names = [wire for wire in wires if wire != BASE and _family(wire) == family]
        names = [wire for wire in names if over_base(wires, wire)]
        if not names:
            continue
        bits = [wires[wire][0]["bits"] for wire in names]
        over = [fmean(over_base(wires, wire)) for wire in names]
        axes.plot(bits, over, style, color=colour, label=label, markersize=5)
        for wire, x, y in zip(names, bits, over, strict=True):
            seeds = over_base(wires, wire)
            axes.plot([x] * len(seeds), seeds, ".", color=colour, markersize=3, alpha=0.6)
            axes.annotate(
                wire, (x, y), xytext=(3, 4), textcoords="offset points", fontsize="x-small"
            )
    axes.axhline(0.0, color=plots.BLACK, linewidth=0.8)
    axes.set_xscale("log", base=2)
    title = f"{_named(model, method)}, {num_replicas} replicas, {rounds} rounds of {sync_every}"
    axes.set_title(title, fontsize="medium")
    axes.set_xlabel("bits an element of one payload")
    axes.set_ylabel("loss over fp32 (nats a byte)")
    plots.legend(axes, fontsize="small")
