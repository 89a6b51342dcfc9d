"""What every benchmark shares: the package's tools for measuring, and where the results are.

The benchmarks are run as modules from the checkout: ``python -m benchmarks.ROOM.NAME``, or
``torchrun ... -m benchmarks.ROOM.NAME``.
"""

# The benchmarks take the names of the package's tools from here.
# ruff: noqa: F401

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from diloco_comm import ops
from diloco_comm.base.files import whole_file
from diloco_comm.base.interrupts import stoppable
from diloco_comm_tools.common import outputs, ranks
from diloco_comm_tools.common.console import progress_bar
from diloco_comm_tools.common.reports import (
    Report,
    about,
    check_output,
    command_line,
    commit,
    machine,
    percentile,
    record_text,
    slowest_of_ranks,
    summary,
    versions,
)
from diloco_comm_tools.common.sizes import format_size, parse_size
from diloco_comm_tools.common.workers import (
    WorkerError,
    free_port,
    init_workers,
    is_worker,
    leave_workers,
    run_workers,
)

ROOT = Path(__file__).resolve().parents[2]
# Records, which pages quote; and single runs, which a benchmark that goes on does not repeat.
RESULTS = ROOT / "benchmarks" / "results"
RUNS = ROOT / "build" / "runs"


def median_ratio(numerator: Sequence[float], denominator: Sequence[float]) -> float:
    """Return the median of the ratios of each round, so that slow phases of the machine cancel."""
    return statistics.median(a / b for a, b in zip(numerator, denominator, strict=True))


def interleave(
    functions: Mapping[str, Callable[[], object]], *, rounds: int, warmup: int = 2
) -> dict[str, list[float]]:
    """Time all functions in turn, `rounds` times; return the seconds of each call after warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    with progress_bar("timing", (warmup + rounds) * len(functions)) as advance:
        for i in range(warmup + rounds):
            for name, function in functions.items():
                begin = time.perf_counter()
                function()
                if i >= warmup:
                    seconds[name].append(time.perf_counter() - begin)
                advance(note=name)
    return seconds


def add_output(
    parser: argparse.ArgumentParser,
    option: str = "--json",
    *,
    default: Path | None = None,
    metavar: str = "PATH",
    help: str = "write figures and output there",
) -> None:
    """Add an option of a file to write, a Path or None, which is looked at before any work."""

    def checked(text: str) -> Path | None:
        path = Path(text) if text else None
        try:
            if metavar == "PNG":
                path = outputs.checked_plot(option, path)
            check_output(option, path)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return path

    # Only a default that is text is looked at as well.
    text = None if default is None else str(default)
    parser.add_argument(option, type=checked, default=text, metavar=metavar, help=help)


def add_plot(parser: argparse.ArgumentParser, help: str) -> None:
    """Add ``--plot``, the file of a figure."""
    add_output(parser, "--plot", metavar="PNG", help=help)


def add_runs(parser: argparse.ArgumentParser, name: str, record: Path | None = None) -> None:
    """Add the options of a benchmark that goes on where it was.

    Args:
        name: The file of single runs: a run that the file holds is not repeated.
        record: The default of ``--json``.
    """
    add_output(parser, "--runs", default=RUNS / name, help="file of the runs, none made twice")
    add_output(parser, default=record)
    parser.add_argument("--report", action="store_true", help="make no run")
    parser.add_argument(
        "--limit-s",
        type=float,
        default=float("inf"),
        help="begin no run after this many seconds",
    )


def parse_numbers(text: str) -> list[int]:
    """Return the whole numbers of a comma list, as an argument's ``type``."""
    return [int(number) for number in text.split(",")]


def mean_and_deviation(values: Sequence[float], sign: str = "") -> str:
    """Return mean and sample deviation as text; "-" without values."""
    if not values:
        return "-"
    spread = f" ({statistics.stdev(values):.4f})" if len(values) > 1 else ""
    return f"{statistics.fmean(values):{sign}.4f}{spread}"


def deviation(values: Sequence[float]) -> float:
    """Return the sample deviation; 0 of a single value."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def add_rounds(parser: argparse.ArgumentParser) -> None:
    """Add the options of a benchmark that measures rounds of a model of a given width."""
    add = parser.add_argument
    add("-n", "--iters", type=int, default=9, help="rounds measured")
    add("-w", "--warmup_iters", type=int, default=2, help="rounds thrown away before them")
    add("--sync-every", type=int, default=4, help="inner steps a round (H)")
    add("--width", type=int, default=512, help="width of the model")


def check_default(parser: argparse.ArgumentParser, option: str, path: Path) -> None:
    """Look at the file that is written when an option was left out; end with 2 if it cannot be."""
    try:
        check_output(option, path)
    except ValueError as error:
        parser.error(str(error))


def check_device(parser: argparse.ArgumentParser, device: str) -> None:
    """End with 2 and one sentence if a program needs a CUDA device, and there is none."""
    try:
        kind = torch.device(device).type
    except RuntimeError:
        parser.error(f"--device must be cuda or cpu, got {device!r}")
    if kind == "cuda" and not torch.cuda.is_available():
        has_other = "--device" in parser.format_usage()
        hint = "; --device cpu runs the same script without one" if has_other else ""
        parser.error(f"there is no CUDA device{hint}")


def parse_impls(parser: argparse.ArgumentParser, text: str, device: str) -> list[str]:
    """Return the implementations of a comma list, or all that run on a kind of device.

    Ends with 2 and one sentence if a name is none of these.
    """
    known = ops.available_impls(torch.device(device).type)
    if not text:
        return [name for name in known if name != "reference"]
    for name in (names := text.split(",")):
        if name not in known:
            parser.error(f"--impl must be of {', '.join(known)}, got {name!r}")
    return names


def parse_count(text: str) -> int:
    """Return a number of at least 1, as an argument's ``type``.

    Raises:
        argparse.ArgumentTypeError: If the text is none.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 1, got {text!r}")
    return int(text)


def benchmark_command(name: str, *arguments: object) -> list[str]:
    """Return the command of a benchmark, named as in ``exchange.all_reduce``."""
    return [sys.executable, "-m", f"benchmarks.{name}", *map(str, arguments)]


def same_command() -> list[str]:
    """Return the command with which this very benchmark was started."""
    spec = sys.modules["__main__"].__spec__
    assert spec is not None, "benchmarks are run as modules: python -m benchmarks.ROOM.NAME"
    return [sys.executable, "-m", spec.name, *sys.argv[1:]]


def module_command() -> str:
    """Return the command of this very benchmark, without its arguments."""
    return f"python -m {same_command()[2]}"


def relaunch(world: int, **options: object) -> None:
    """Run this very command as `world` local workers (the meaning of ``-g N``)."""
    options = {"preload": ranks.WITH_OPTIMIZER, **options}
    try:
        run_workers(same_command(), world, **options)  # type: ignore[arg-type]
    except WorkerError as error:
        # A worker that ended by itself has said why.
        if error.status in (1, 2):
            sys.exit(error.status)
        raise


def join_group(
    title: str,
    nprocs: int,
    *,
    timeout_s: float = 120.0,
    preload: Sequence[str] = ranks.WITH_OPTIMIZER,
    **header: object,
) -> Report | None:
    """Join the group and return a report, whose output rank 0 alone prints.

    Returns:
        None in the launcher, after `nprocs` local workers have done the work.
    """
    if nprocs and not is_worker():
        relaunch(nprocs, preload=preload)
        return None
    rank, world = init_workers(timeout_s=timeout_s)
    return Report(title, quiet=rank != 0, workers=world, **header)


def relaunch_or_explain(world: int, **options: object) -> int:
    """Like ``relaunch``, but print why the workers failed; returns the exit status."""
    try:
        relaunch(world, **options)
    except RuntimeError as error:
        print(error)
        return 1
    return 0


def save(report: Report, path: Path | None, results: object) -> None:
    """Write what was measured and printed, where a file was asked for; else end with a sentence."""
    if path is None or report.quiet:
        return
    try:
        report.save(path, results)
    except OSError as error:
        sys.exit(str(error))


def save_plot(path: Path | None, draw: Callable[[Path], None]) -> None:
    """Draw into a file, where one was asked for; as the last, or end with a sentence."""
    if path is None:
        return
    try:
        with whole_file("--plot", path) as file:
            draw(file)
    except OSError as error:
        sys.exit(str(error))


def finish(report: Report, results: object, path: Path | None) -> None:
    """Save what was measured, where a file was asked for, and leave the group; on every worker."""
    try:
        save(report, path, results)
    finally:
        leave_workers()


def conclude(report: Report, figures: dict[str, Any], path: Path | None) -> int:
    """Print the summary of the figures and ``finish``; returns the exit status.

    Args:
        figures: Has ``is_passed``, and ``summary`` where there is one, which moves to the header.
    """
    if "summary" in figures:
        report.print(figures["summary"])
        report.header["summary"] = figures.pop("summary")
    finish(report, figures, path)
    return 0 if figures["is_passed"] else 1
