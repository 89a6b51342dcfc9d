"""Synthetic traces: Kineto JSON and Nsight Systems SQLite, as their writers lay them out."""

from __future__ import annotations

import gzip
import json
import random
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
GEMM = "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x64_tn>(Params)"
ADD = 'void at::native::vectorized_elementwise_kernel<4, "},{">(int, std::array<char*, 3ul>)'
NAMES = (NCCL, "ncclKernel_SendRecv(ncclWorkElem)", GEMM, ADD, "Memcpy DtoH (Device -> Pinned)")
NAMES += ("Memset (Device)", "void batchMemcpyKernel(int)", "ncclMemoryHelper", "dmaCopy")


def event(
    name: str, category: str, ts: float, dur: float, thread: int = 1, **args: Any
) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": 10,
        "tid": thread,
        "ts": ts,
        "dur": dur,
        "args": args,
    }


def kernel(
    name: str, ts: float, dur: float, stream: int, correlation: int, **args: Any
) -> dict[str, Any]:
    own = {"device": 0, "stream": stream, "correlation": correlation, **args}
    return event(name, "kernel", ts, dur, stream, **own)


def launch(ts: float, correlation: int, thread: int = 1) -> dict[str, Any]:
    return event("cudaLaunchKernel", "cuda_runtime", ts, 1, thread, correlation=correlation)


def random_events(seed: int, num_steps: int, has_fractions: bool) -> list[dict[str, Any]]:
    """Kernels on three streams, with their launches, in profiled steps; some launched outside."""
    draw = random.Random(seed)

    def time_us(low: float, high: float) -> float:
        value = draw.uniform(low, high)
        return round(value, 3) if has_fractions else round(value)

    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": 10, "tid": 0, "ts": 0, "args": {"name": "x"}}
    ]
    length = 4000
    for step in range(num_steps):
        name = f"ProfilerStep#{step + 7}"
        events.append(event(name, "user_annotation", 1000 + step * length, length - 10))
        events.append(event(name, "gpu_user_annotation", 1100 + step * length, length - 10, 7))
    for correlation in range(1, 300):
        begin = time_us(0, 1000 + max(num_steps, 1) * length)
        if draw.random() < 0.95:
            events.append(launch(begin, correlation, draw.choice((1, 2))))
        # Some last less than a microsecond, which rounding makes negative.
        dur = time_us(0.1, 1.5) if draw.random() < 0.2 else time_us(2, 60)
        stream = draw.choice((7, 20, 24))
        begin += time_us(1, 400)
        events.append(kernel(draw.choice(NAMES), begin, dur, stream, correlation))
        if draw.random() < 0.1:
            wait = event("Event Sync", "cuda_sync", begin, 3, stream=stream, correlation=-1)
            events.append(wait)
    draw.shuffle(events)
    return events


def kineto_text(events: Sequence[dict[str, Any]], rank: int | None, indent: int | None = 2) -> str:
    document: dict[str, Any] = {"schemaVersion": 1, "deviceProperties": [{"id": 0, "name": "H"}]}
    if rank is not None:
        document["distributedInfo"] = {"backend": "nccl", "rank": rank, "world_size": 2}
    document["traceEvents"] = list(events)
    document |= {"traceName": "trace.json", "displayTimeUnit": "ms", "baseTimeNanoseconds": 17}
    separators = None if indent else (",", ":")
    return json.dumps(document, indent=indent, separators=separators)


def write_kineto(
    path: Path, events: Sequence[dict[str, Any]], rank: int | None = 0, indent: int | None = 2
) -> Path:
    data = kineto_text(events, rank, indent).encode()
    path.write_bytes(gzip.compress(data, 1) if path.suffix == ".gz" else data)
    return path


class Nsys:
    """An export of Nsight Systems, table by table, as far as anything was recorded."""

    PROCESS = 77 << 24

    def __init__(self, path: Path) -> None:
        self.path = path
        self.database = sqlite3.connect(path)
        self.database.execute("CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT)")
        self._strings: dict[str, int] = {}

    def string(self, value: str) -> int:
        if value not in self._strings:
            self._strings[value] = len(self._strings)
            row = (self._strings[value], value)
            self.database.execute("INSERT INTO StringIds VALUES (?, ?)", row)
        return self._strings[value]

    def add_kernel(
        self, name: str, begin_ns: int, end_ns: int, correlation: int = 0, process: int = PROCESS
    ) -> None:
        self.database.execute(
            "CREATE TABLE IF NOT EXISTS CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, end INTEGER, "
            "deviceId INTEGER, streamId INTEGER, correlationId INTEGER, globalPid INTEGER, "
            "shortName INTEGER, demangledName INTEGER)"
        )
        short = self.string(name.split("(")[0])
        row = (begin_ns, end_ns, 0, 7, correlation, process, short, self.string(name))
        self.database.execute(
            "INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row
        )

    def add_launch(self, begin_ns: int, correlation: int, thread: int) -> None:
        self.database.execute(
            "CREATE TABLE IF NOT EXISTS CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER, end INTEGER, "
            "globalTid INTEGER, correlationId INTEGER, nameId INTEGER)"
        )
        row = (begin_ns, begin_ns + 10, thread, correlation, self.string("cudaLaunchKernel"))
        self.database.execute("INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (?, ?, ?, ?, ?)", row)

    def add_range(
        self,
        text: str,
        begin_ns: int,
        end_ns: int | None,
        thread: int,
        domain: int = 0,
        kind: int = 59,
        by_id: bool = False,
    ) -> None:
        self.database.execute(
            "CREATE TABLE IF NOT EXISTS NVTX_EVENTS (start INTEGER, end INTEGER, "
            "eventType INTEGER, text TEXT, textId INTEGER, globalTid INTEGER, domainId INTEGER)"
        )
        words = (None, self.string(text)) if by_id else (text, None)
        row = (begin_ns, end_ns, kind, *words, thread, domain)
        self.database.execute("INSERT INTO NVTX_EVENTS VALUES (?, ?, ?, ?, ?, ?, ?)", row)

    def close(self) -> Path:
        self.database.commit()
        self.database.close()
        return self.path
