"""Time ``diloco-comm profile report`` on a large trace, and measure its memory.

    python -m benchmarks.training.profile_speed --gigabytes 1 --json FILE

The trace is written first: operators with their shapes, launches and kernels, laid out as Kineto
does, of one rank in ten profiled steps.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.support import common
from diloco_comm_tools.profile.report import make_report, read_traces

NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
ADD = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, "
    "std::array<char*, 3ul> >(int, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul>)"
)
EVENT = """  {{
    "ph": "X", "cat": "{cat}", "name": "{name}", "pid": {pid}, "tid": {tid},
    "ts": {ts:.3f}, "dur": {dur:.3f},
    "args": {args}
  }}"""


def event(cat: str, name: str, pid: int, tid: int, ts: float, dur: float, **args: object) -> str:
    return EVENT.format(cat=cat, name=name, pid=pid, tid=tid, ts=ts, dur=dur, args=json.dumps(args))


def events(draw: random.Random) -> Iterator[str]:
    """Operator, launch and kernel in turn, for ever."""
    now, idx = 1e6, 0
    shapes = {"Input Dims": [[512], [64, 512], [512, 512]], "Input type": ["float"] * 3}
    while True:
        now += draw.uniform(3, 20)
        idx += 1
        yield event("cpu_op", "aten::addmm", 10, 10, now, 3.5, **{"External id": idx}, **shapes)
        yield event("cuda_runtime", "cudaLaunchKernel", 10, 10, now + 1, 1.2, correlation=idx)
        name, stream = (NCCL, 20) if idx % 9 == 0 else (ADD, 7)
        args = {"device": 0, "stream": stream, "correlation": idx, "grid": [64, 1, 1]}
        yield event("kernel", name, 0, stream, now + 5, draw.uniform(0.5, 9), **args)


def write_trace(path: Path, num_bytes: int) -> int:
    """Write a trace of about that size; return the number of its events."""
    count = 0
    with path.open("w") as file:
        size = file.write('{\n  "schemaVersion": 1,\n  "distributedInfo": {"rank": 0},\n')
        size += file.write('  "traceEvents": [\n')
        for text in events(random.Random(0)):
            count += 1
            size += file.write(text + ",\n")
            if count % 1000 == 0 and size >= num_bytes:
                break
        seconds = count / 3 * 11.5
        for step in range(10):
            begin = 1e6 + step * seconds / 10
            args = ("user_annotation", f"ProfilerStep#{step}", 10, 10, begin, seconds / 10)
            file.write(event(*args) + (",\n" if step < 9 else "\n"))
        file.write('  ],\n  "traceName": "trace.json"\n}\n')
    return count + 10


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--folder", type=Path, default=None, help="where the trace is put")
    common.add_output(parser)
    args = parser.parse_args()
    report = common.Report("profile", trace="synthetic, one rank, ten steps")
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        path = Path(folder) / "rank0.json"
        num_events = write_trace(path, int(args.gigabytes * 1e9))
        before_mb = _peak_mb()
        begin, cpu = time.perf_counter(), time.process_time()
        rank = make_report(read_traces([path]))["ranks"][0]
        seconds, cpu_s = time.perf_counter() - begin, time.process_time() - cpu
        size_gb = os.path.getsize(path) / 1e9
    row = {
        "gigabytes": size_gb,
        "events": num_events,
        "seconds_per_gb": seconds / size_gb,
        "cpu_seconds_per_gb": cpu_s / size_gb,
        "peak_memory_mb": _peak_mb(),
        "peak_memory_before_mb": before_mb,
        "overlap": rank["overlap"],
    }
    for name, value in row.items():
        report.print(f"# {name}: {value:.4g}")
    common.save(report, args.json, row)
    return 0


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


if __name__ == "__main__":
    sys.exit(main())
