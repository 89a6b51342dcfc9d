"""Count what a sync costs in steady state: large allocations and page faults.

    python -m benchmarks.training.steady_state -g 2 --wire int8

Allocations above 64 KiB are counted in all threads of the process by a preloaded library (built
here with the C++ compiler); minor page faults in the calling thread (RUSAGE_THREAD) and in the
engine's threads (/proc). gloo's own threads are listed apart. The last figure is the time of a log
line about a round, from its figures to a stream that drops the line.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import logging
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.support import common

_ENGINE_THREADS = "diloco-"
_SHAPES = [(1024, 1024), (1024,), (333, 777), (7,), (0,), (2048, 512), (100_003,)]


def build_counter(folder: str) -> str:
    """Compile the allocation counter; the path of the library."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or "c++"
    library = str(Path(folder) / "allocation_counter.so")
    source = str(Path(__file__).with_name("allocation_counter.cpp"))
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", "-o", library, source], check=True)
    return library


def thread_faults() -> dict[str, int]:
    """Minor page faults so far of every other thread of this process, added up by name."""
    faults: dict[str, int] = {}
    for task in Path("/proc/self/task").iterdir():
        if int(task.name) != os.getpid():
            try:
                text = (task / "stat").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue  # a call on the store that has just ended
            name = text[text.index("(") + 1 : text.rindex(")")]
            faults[name] = faults.get(name, 0) + int(text[text.rindex(")") + 2 :].split()[7])
    return faults


def caller_faults() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


class Counts:
    """What one call costs, on this rank."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL(None)
        for name in ("large_allocations", "last_large_bytes"):
            getattr(self.library, name).restype = ctypes.c_uint64

    def measure(self, function: Callable[[], object]) -> dict[str, int]:
        threads = thread_faults()
        allocations = self.library.large_allocations()
        faults = caller_faults()
        function()
        faults = caller_faults() - faults
        allocations = self.library.large_allocations() - allocations
        after = thread_faults()
        grown = {name: after[name] - threads.get(name, 0) for name in after}
        ours = sum(n for name, n in grown.items() if name.startswith(_ENGINE_THREADS))
        return {
            "large_allocations": allocations,
            "caller_faults": faults,
            "engine_faults": ours,
            "other_threads_faults": sum(grown.values()) - ours,
        }


class Model(nn.Module):
    """Tensors of mixed sizes, 3.5 M parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in _SHAPES)


def measure(args: argparse.Namespace, wire: str) -> list[dict[str, int]]:
    """The counts of each sync after the warm-up, largest rank."""
    from diloco_comm import DiLoCo, Nesterov

    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options: dict[str, Any] = {"sync_every": 1, "wire": wire, "attach": False}
    diloco = DiLoCo(model, optimizer, outer=Nesterov(lr=0.7, momentum=0.9), **options)
    counts = Counts()
    syncs = []
    for i in range(args.warmup_iters + args.iters):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.99)
        dist.barrier()
        once = counts.measure(diloco.step)
        dist.barrier()
        if i >= args.warmup_iters:
            syncs.append(once)
    diloco.close()
    names = list(syncs[0])
    flat = common.slowest_of_ranks([float(once[name]) for once in syncs for name in names])
    rows = [flat[i : i + len(names)] for i in range(0, len(flat), len(names))]
    return [dict(zip(names, map(int, row), strict=True)) for row in rows]


def line_us(count: int = 2000) -> float:
    """Microseconds that a line about a round takes."""
    from diloco_comm.rounds import metrics, progress

    recorder, clock = metrics.Recorder(), itertools.count(step=progress.PERIOD_S)
    group = SimpleNamespace(replica=0, members=(0, 1), collectives="gloo")
    options: dict[str, Any] = {"parameter_bytes": 1, "clock": lambda: next(clock)}
    told = progress.Progress(recorder, group, num_parts=2, **options)
    metrics.logger.setLevel(logging.INFO)
    with open(os.devnull, "w") as null:
        metrics.logger.addHandler(logging.StreamHandler(null))
        begin = time.perf_counter()
        for i in range(count):
            recorder.add(metrics.SyncMetrics(i, 0, i, 1 << 20, pseudo_gradient_norm=1.0))
            told.tell()
        return (time.perf_counter() - begin) / count * 1e6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("-g", "--nprocs", type=int, default=2, help="local processes")
    add("-n", "--iters", type=int, default=50, help="syncs measured")
    add("-w", "--warmup_iters", type=int, default=20, help="syncs before them")
    add("--wire", default="int8", help="wire formats, a comma list")
    common.add_output(parser)
    args = parser.parse_args()
    if not common.is_worker():
        with tempfile.TemporaryDirectory() as folder:
            # The pages that forked ranks share would be faults of theirs.
            env = {"LD_PRELOAD": build_counter(folder)}
            common.relaunch(args.nprocs, env=env, preload=None)
        return 0
    rank, world = common.init_workers()
    header = {"workers": world, "link": "loopback", "wire": args.wire}
    report = common.Report("steady_state", quiet=rank != 0, **header)
    results: dict[str, dict[str, dict[str, float]]] = {}
    for wire in args.wire.split(","):
        syncs = measure(args, wire)
        results[wire] = {}
        report.print("#")
        report.print(f"#{'a sync over ' + wire:>22} {'mean':>8} {'max':>6}")
        for name in syncs[0]:
            values = [once[name] for once in syncs]
            results[wire][name] = {"mean": sum(values) / len(values), "max": max(values)}
            report.print(f" {name:>22} {results[wire][name]['mean']:8.2f} {max(values):6d}")
    report.header["log_line_us"] = line_us()
    report.print(f"# a log line about a round: {report.header['log_line_us']:.1f} us")
    common.finish(report, results, args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
