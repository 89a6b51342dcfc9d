"""The options of ``diloco-comm profile run`` and ``report``."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from ..common.commands import fail, in_sentences, misuse
from ..common.console import print_report as show_report
from ..common.console import save_plot
from ..common.outputs import check_folder, checked_plot
from ..common.sizes import at_least

# The paragraphs behind \b keep their line breaks.
RUN_EXAMPLES = """Examples:

\b
diloco-comm profile run --out traces --steps 40 -- python train.py
diloco-comm profile run -- torchrun --nproc-per-node 4 train.py --lr 1e-3
diloco-comm profile run --nsys -- torchrun --nproc-per-node 4 train.py
"""
REPORT_EXAMPLES = """Examples:

\b
diloco-comm profile report traces
diloco-comm profile report traces/rank0.json.gz --json
diloco-comm profile report traces/rank0.sqlite traces/rank1.sqlite --plot timeline.png
"""
STDERR = 2

profile = typer.Typer(
    help="Record where the time of each rank goes, and report how much communication is hidden.",
    no_args_is_help=True,
)


@profile.command("run", epilog=RUN_EXAMPLES, context_settings={"allow_interspersed_args": False})
def run(
    command: Annotated[list[str], typer.Argument(help="Program and arguments, behind --.")],
    out: Annotated[Path, typer.Option(help="Folder for the ranks' traces.")] = Path("traces"),
    skip: Annotated[int, typer.Option(help="Optimizer steps to skip before the recording.")] = 10,
    steps: Annotated[int, typer.Option(help="Optimizer steps to record.")] = 20,
    nsys: Annotated[
        bool, typer.Option("--nsys", help="Print the command for Nsight Systems; run nothing.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON; what the program prints goes to stderr.")
    ] = False,
) -> None:
    """Run a training program and record some of its steps with torch.profiler.

    A process writes rank<r>.json.gz if it constructs DiLoCo, AsyncDiLoCo or DecoupledDiLoCo, or
    uses the backend "diloco", and steps an optimizer.
    """
    with in_sentences():
        at_least(1, skip=skip, steps=steps)
    if nsys:
        words = nsys_command(command, out)
        print(json.dumps({"schema": 1, "command": words}) if as_json else shlex.join(words))
        return
    if shutil.which(command[0]) is None:
        misuse(f"there is no program {command[0]!r} to run")
    with in_sentences():
        check_folder("--out", out)
    variables = {"PROFILE": str(out.absolute()), "PROFILE_SKIP": skip, "PROFILE_STEPS": steps}
    added = {f"DILOCO_COMM_{name}": str(value) for name, value in variables.items()}
    before = _versions(out)
    stdout = STDERR if as_json else None
    status = subprocess.run(command, env={**os.environ, **added}, stdout=stdout).returncode
    written = sorted(
        path for path, time_ns in _versions(out).items() if before.get(path) != time_ns
    )
    if status:
        # As in a shell: 128 plus the number of the signal.
        raise typer.Exit(status if status > 0 else 128 - status)
    if not written:
        fail(
            f"no trace was written: did the program construct DiLoCo (or use the backend "
            f'"diloco") and step an optimizer more than {skip} times after that?'
        )
    traces = [str(path) for path in written]
    if as_json:
        print(json.dumps({"schema": 1, "command": command, "traces": traces}))
    print(f"diloco-comm profile report {shlex.join(traces)}", file=sys.stderr)


def _versions(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.glob("rank*.json.gz")}


def nsys_command(command: Sequence[str], out: Path) -> list[str]:
    """Return the command that records each rank of a command with Nsight Systems.

    Under torchrun and torch.distributed.run each worker has its own recorder.

    Args:
        out: Folder for the reports, which are exported to SQLite.
    """
    recorder = ["nsys", "profile", "--trace=cuda,nvtx", "--sample=none", "--cpuctxsw=none"]
    if Path(command[0]).name != "torchrun":
        rank = "SLURM_PROCID" if "SLURM_PROCID" in os.environ else "RANK"
        name = f"rank%q{{{rank}}}" if rank in os.environ else "rank0"
        return [*recorder, "--export=sqlite", f"--output={out / name}", *command]
    from torch.distributed.run import get_args_parser

    try:
        # Drop torchrun's own message, a usage text of more than a hundred lines.
        with contextlib.redirect_stderr(io.StringIO()):
            parsed = get_args_parser().parse_args(list(command[1:]))
    except SystemExit:
        misuse("the arguments of torchrun are wrong")
    own = len(command) - len(parsed.training_script_args) - 1
    launcher = [word for word in command[:own] if word not in ("-m", "--module", "--no-python")]
    interpreter = [] if parsed.no_python else [*(["python", "-m"] if parsed.module else ["python"])]
    output = [*recorder, "--export=sqlite", f"--output={out / 'rank%q{RANK}'}"]
    return [*launcher, "--no-python", *output, *interpreter, *command[own:]]


@profile.command("report", epilog=REPORT_EXAMPLES)
def report(
    paths: Annotated[
        list[Path],
        typer.Argument(help="Traces of the ranks: JSON (.gz), or SQLite of nsys; or a folder."),
    ],
    plot: Annotated[Path | None, typer.Option(help="Draw a timeline into this PNG.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Report communication, computation and their overlap, rank by rank."""
    from .report import find_traces, make_report, plot_timeline, print_report, read_traces

    try:
        plot = checked_plot("--plot", plot)
        traces = read_traces(find_traces(paths))
    except ValueError as error:
        misuse(str(error))
    except OSError as error:
        misuse(f"cannot read {error.filename}: {error.strerror}")
    show_report(make_report(traces), as_json, print_report)
    if plot is not None:
        save_plot(plot, functools.partial(plot_timeline, traces), as_json=as_json)
