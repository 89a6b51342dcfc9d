"""The report of ``diloco-comm profile report``: read traces, print tables, draw a timeline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from ..common import plots
from ..common.console import plain_table, print_whole
from . import nsys as profile_nsys
from .kineto import KinetoTrace
from .trace import RankTrace, TraceError, figures, merge, rank_of, settle_ranks, slowest_rank

# Most rectangles that a figure of a few thousand pixels can show.
_MOST_DRAWN = 4000
_ENDINGS = (".json", ".json.gz", ".sqlite")
_REPORTS = (".nsys-rep", ".qdrep")


def find_traces(paths: Sequence[Path]) -> list[Path]:
    """Replace each folder by its traces, ordered by the rank in their names.

    Raises:
        TraceError: If a folder has no trace.
        OSError: If a folder cannot be read.
    """
    found: list[Path] = []
    for path in paths:
        found += _in_folder(path) if path.is_dir() else [path]
    return found


def _in_folder(folder: Path) -> list[Path]:
    files = sorted((path for path in folder.iterdir() if path.is_file()), key=_by_rank)
    traces = [path for path in files if path.name.endswith(_ENDINGS)]
    # Reports of nsys count only without an export; read_traces asks the user to export them.
    traces = traces or [path for path in files if path.suffix in _REPORTS]
    if not traces:
        raise TraceError(f"there is no trace in {folder}: {', '.join(f'*{e}' for e in _ENDINGS)}")
    return traces


def _by_rank(path: Path) -> tuple[bool, int, str]:
    rank = rank_of(path)
    return rank is None, rank or 0, path.name


def read_traces(paths: Sequence[Path]) -> list[RankTrace]:
    """Read all files; their content tells Kineto from Nsight Systems.

    Raises:
        TraceError: If a file is empty, foreign or truncated, or two files have the same rank.
        OSError: If a file cannot be read.
    """
    kineto: list[KinetoTrace] = []
    traces: list[RankTrace] = []
    for path in paths:
        if path.suffix in _REPORTS:
            raise TraceError(
                f"{path} must be exported first: nsys export --type sqlite {path.name}"
            )
        with path.open("rb") as file:
            is_sqlite = file.read(16) == b"SQLite format 3\0"
        if is_sqlite:
            traces += profile_nsys.read(path)
        else:
            kineto.append(KinetoTrace.read(path))
    steps = {name for trace in kineto for name in trace.step_names}
    traces += [trace.finish(len(steps)) for trace in kineto]
    settle_ranks(traces)
    return sorted(traces, key=lambda trace: trace.rank or 0)


def make_report(traces: Sequence[RankTrace]) -> dict[str, Any]:
    """Return the figures of all ranks as JSON types; ``docs/how-to/profile.md`` has the schema."""
    ranks = [figures(trace) for trace in traces]
    return {"schema": 1, "ranks": ranks, "slowest_rank": slowest_rank(ranks)}


def print_report(console: Console, report: dict[str, Any]) -> None:
    """Print the tables of ``make_report``."""
    heads = ["rank", "traffic", "communication\n(ms)", "overlapped\n(ms)", "exposed\n(ms)"]
    heads += ["overlap", "computation\n(ms)"]
    table = plain_table(heads, text=("traffic",), padding=(0, 1, 0, 0))
    for rank in report["ranks"]:
        for name, part in (("all", rank), ("diloco_comm", rank["ours"]), ("other", rank["inner"])):
            is_first = name == "all"
            if not is_first and not part["communication_us"]:
                continue
            share = part["overlap"]
            table.add_row(
                str(rank["rank"]) if is_first else "",
                name,
                *(_ms(part[f"{key}_us"]) for key in ("communication", "overlapped", "exposed")),
                "-" if share is None else f"{100 * share:.2f} %",
                _ms(rank["computation_us"]) if is_first else "",
            )
    print_whole(console, table)
    if any(rank["phases"] for rank in report["ranks"]):
        print_whole(console, _phases(report))
    if report["slowest_rank"] is not None:
        console.print(f"slowest rank: {report['slowest_rank']} (it computes longest)")
    if any(rank["device"] == "cpu" for rank in report["ranks"]):
        console.print(
            "Without GPU kernels: communication is this library's exchanges and "
            "torch.distributed's calls, computation is the operators on the processor.",
            soft_wrap=True,
        )


def _ms(us: float) -> str:
    return f"{us / 1e3:,.3f}"


def _phases(report: dict[str, Any]) -> Table:
    heads = ("rank", "stage", "times", "mean\n(ms)", "longest\n(ms)", "in all\n(ms)")
    table = plain_table(heads, "stages of diloco_comm", ("stage",), padding=(0, 1, 0, 0))
    for rank in report["ranks"]:
        for stage, phase in rank["phases"].items():
            mean = phase["total_us"] / phase["count"]
            cells = (_ms(us) for us in (mean, phase["max_us"], phase["total_us"]))
            table.add_row(str(rank["rank"]), stage, str(phase["count"]), *cells)
    return table


def plot_timeline(traces: Sequence[RankTrace], path: Path) -> None:
    """Draw computation and communication of each rank; needs matplotlib, and no display."""
    figure = plots.new_figure(11, 1.2 + 1.1 * len(traces))
    axes = figure.subplots()
    plots.tidy(axes, grid=None)
    origin, span = _extent(traces)
    rows = (
        ("computation", "computation", plots.GREY),
        ("our_traffic", "diloco_comm", plots.VERMILION),
        ("inner", "other communication", plots.BLUE),
    )
    for idx, trace in enumerate(traces):
        for offset, (name, label, colour) in enumerate(rows):
            merged = _coarse(*merge(*getattr(trace, name)), span / _MOST_DRAWN)
            bars = [((b - origin) / 1e3, (e - b) / 1e3) for b, e in zip(*merged, strict=True)]
            label_once = label if idx == 0 else None
            y = -idx - 0.28 * offset
            axes.broken_barh(bars, (y, 0.25), color=colour, label=label_once, linewidth=0)
    axes.set_yticks([-idx - 0.15 for idx in range(len(traces))])
    axes.set_yticklabels([f"rank {trace.rank}" for trace in traces])
    axes.set_xlabel("ms since the first activity")
    figure.legend(frameon=False, ncols=3, loc="outside upper right")
    plots.save(figure, path)


def _extent(traces: Sequence[RankTrace]) -> tuple[float, float]:
    times = [np.concatenate((*t.computation, *t.our_traffic, *t.inner)) for t in traces]
    times = [own for own in times if len(own)]
    if not times:
        return 0.0, 1.0
    first = float(min(own.min() for own in times))
    return first, max(float(max(own.max() for own in times)) - first, 1.0)


def _coarse(begin: Any, end: Any, gap: float) -> tuple[Any, Any]:
    """Close gaps that are narrower than a pixel."""
    if not len(begin):
        return begin, end
    starts = np.flatnonzero(np.concatenate(([True], begin[1:] - end[:-1] > gap)))
    last = np.concatenate((starts[1:], [len(end)])) - 1
    return begin[starts], np.maximum(end[last], begin[starts] + gap)
