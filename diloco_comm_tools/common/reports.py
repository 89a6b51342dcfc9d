"""Times of a measurement, and its report: lines, machine, versions, and one JSON file of all."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from diloco_comm.base import launch
from diloco_comm.base.files import whole_file

from . import outputs


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the value at the nearest index, without interpolation; `percent` in 0..100."""
    ordered = sorted(values)
    return ordered[round((len(ordered) - 1) * percent / 100)]


def summary(values: Sequence[float]) -> dict[str, float]:
    """Return the median and its spread, as stored in every results file."""
    return {
        "median": statistics.median(values),
        "p10": percentile(values, 10),
        "p90": percentile(values, 90),
        "samples": len(values),
    }


def ratio_of_medians(numerator: Sequence[float], denominator: Sequence[float]) -> float:
    """Return the ratio of two times that a table shows as medians, so that it fits the columns."""
    return statistics.median(numerator) / statistics.median(denominator)


def slowest_of_ranks(seconds: Sequence[float]) -> list[float]:
    """Return the elementwise maximum over ranks: an operation ends when its last rank ends."""
    times = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return times.tolist()


# The root of the checkout, if this file lies in one.
_ROOT = Path(__file__).resolve().parents[2]
# The most characters in a line of a record, unless a value alone is longer.
_LINE = 120


def machine() -> dict[str, object]:
    """Describe the hardware, without the host's name."""
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": model,
        "architecture": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "isa": torch.backends.cpu.get_cpu_capability(),
        "memory_gib": round(memory / 2**30, 1),
        "kernel": platform.release().split("-")[0],
        "tcp": _congestion_control(),
    }


def _congestion_control() -> str | None:
    """Name TCP's congestion control, which changes loopback throughput by a factor."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    return None


def versions() -> dict[str, str]:
    """Return the versions of the software; with a GPU also ``gpu``, ``nccl`` and ``driver``."""
    from diloco_comm import __version__

    found = {
        "diloco_comm": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
        found["cuda"] = str(torch.version.cuda)
        if dist.is_nccl_available():
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        with contextlib.suppress(OSError):
            line = Path("/proc/driver/nvidia/version").read_text().splitlines()[0]
            found["driver"] = next(w for w in line.split() if w[0].isdigit() and "." in w)
    return found


def commit() -> str:
    """Return the checked-out commit; empty outside git.

    The commit ends in ``-dirty`` if tracked files differ, other than results of earlier runs.
    """
    git = ["git", "-C", str(_ROOT)]
    try:
        # The environment of an installed package may lie in the checkout of another project.
        subprocess.check_output(
            [*git, "ls-files", "--error-unmatch", __file__], stderr=subprocess.DEVNULL
        )
        name = subprocess.check_output([*git, "rev-parse", "--short=12", "HEAD"], text=True).strip()
        others = ["--", ".", ":!benchmarks/results"]
        status = [*git, "status", "--porcelain", "--untracked-files=no", *others]
        return name + ("-dirty" if subprocess.check_output(status) else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def about() -> dict[str, object]:
    """Return what every record begins with: date, commit, machine and versions."""
    now = datetime.datetime.now(datetime.timezone.utc)
    return {
        "date": now.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "commit": commit(),
        "machine": machine(),
        "versions": versions(),
    }


def command_line() -> str:
    """Return the running command, as typed in the checkout."""
    script = Path(sys.argv[0])
    with contextlib.suppress(ValueError):
        script = script.resolve().relative_to(_ROOT)
    words = ["python", str(script)]
    spec = sys.modules["__main__"].__spec__
    if spec is not None:
        words = ["python", "-m", spec.name.removesuffix(".__main__")]
    if script.name in ("diloco-comm", "cli.py"):
        words = ["diloco-comm"]
    return shlex.join([*words, *sys.argv[1:]])


def check_output(option: str, path: Path | None) -> None:
    """Make sure that results can be written; only the launcher and rank 0 write results.

    Raises:
        ValueError: If the file cannot be written.
    """
    found = launch.find()
    if found is None or found.rank == 0:
        outputs.check_file(option, path)


def record_text(value: object, indent: str = "") -> str:
    """Return JSON with one line for each value that fits, list of numbers, or flat dictionary."""
    line = json.dumps(value)
    if not isinstance(value, dict | list) or len(indent) + len(line) <= _LINE:
        return line
    inner = indent + " "
    if isinstance(value, dict):
        if not any(isinstance(item, dict | list) for item in value.values()):
            return line
        items = [f"{json.dumps(str(key))}: {record_text(value[key], inner)}" for key in value]
    elif all(isinstance(item, int | float | None) for item in value):
        return line
    else:
        items = [record_text(item, inner) for item in value]
    begin, end = "{}" if isinstance(value, dict) else "[]"
    return begin + ",".join(f"\n{inner}{item}" for item in items) + f"\n{indent}{end}"


class Report:
    """Print lines, keep them, and write lines and figures as one JSON file."""

    def __init__(self, title: str, *, quiet: bool = False, **header: object) -> None:
        self.lines: list[str] = []
        self.header = header
        self.quiet = quiet
        numbers = "  ".join(f"{k} {v}" for k, v in versions().items())
        box = machine()
        self.print(f"# {title}: {numbers}  commit {commit() or 'unknown'}")
        cpu = f"{box['cpu']}, {box['cores']} cores, {box['memory_gib']} GiB, {box['isa']}"
        system = f"Linux {box['kernel']}, TCP {box['tcp'] or 'unknown'}"
        self.print(f"# machine: {cpu}, {system}; processes unpinned")
        for name, value in header.items():
            self.print(f"# {name}: {value}")
        self.print(f"# command: {command_line()}")

    def print(self, line: str = "") -> None:
        self.lines.append(line)
        if not self.quiet:
            print(line, flush=True)

    def save(self, path: str | Path, results: object, option: str = "--json") -> None:
        """Write date, commit, machine, command, figures and the full output.

        Raises:
            OSError: If the file cannot be written; its text is a sentence that names ``option``.
        """
        document = {
            **about(),
            "command": command_line(),
            **self.header,
            "results": results,
            "output": self.lines,
        }
        with whole_file(option, Path(path)) as file:
            file.write_text(record_text(document) + "\n")
