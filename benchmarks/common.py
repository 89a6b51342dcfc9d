"""What every benchmark shares: the package's tools for measuring, and where the results are.

The benchmarks are scripts, run as ``python benchmarks/NAME.py`` (also under torchrun), and import
this module from their own folder.
"""

from __future__ import annotations

import sys
from pathlib import Path

from diloco_comm.tools import ranks
from diloco_comm.tools.measuring import (
    Report,
    WorkerError,
    command_line,
    commit,
    format_size,
    free_port,
    init_workers,
    interleave,
    is_worker,
    leave_workers,
    machine,
    median_ratio,
    parse_size,
    percentile,
    run_workers,
    slowest_of_ranks,
    stoppable,
    summary,
    versions,
)

__all__ = [
    "RESULTS",
    "ROOT",
    "Report",
    "WorkerError",
    "command_line",
    "commit",
    "finish",
    "format_size",
    "free_port",
    "init_workers",
    "interleave",
    "is_worker",
    "leave_workers",
    "machine",
    "median_ratio",
    "parse_size",
    "percentile",
    "relaunch",
    "run_workers",
    "slowest_of_ranks",
    "stoppable",
    "summary",
    "versions",
]

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def relaunch(world: int, **options: object) -> None:
    """Run this very command as `world` local workers (the meaning of ``-g N``)."""
    options = {"preload": ranks.WITH_OPTIMIZER, **options}
    run_workers([sys.executable, *sys.argv], world, **options)  # type: ignore[arg-type]


def finish(report: Report, results: object, path: str) -> None:
    """Save what was measured, where a file was asked for, and leave the group; on every worker."""
    if path and not report.quiet:
        report.save(path, results)
    leave_workers()
