"""Messages that the syncer handles, and its resident memory."""

from __future__ import annotations

import argparse
import time
from typing import Any

import psutil

from benchmarks.asynchronous.syncer.processes import running
from benchmarks.support import common
from benchmarks.training.outer_step import resident_bytes
from diloco_comm.asynchronous.link import read_status

# Models in fp32 that the syncer's memory may hold, journal and snapshots included.
MOST_MODELS = 5.0


def measure_messages(report: common.Report, options: argparse.Namespace) -> dict[str, Any]:
    """Learners without a pause, on many small fragments: the syncer has all the work."""
    seconds, fragments = options.seconds or 15.0, 64
    elements = options.elements or 64 * 1024
    results: dict[str, Any] = {"missed": []}
    report.print(f"# {fragments} fragments, {elements} elements, every step of a learner counts")
    report.print("#  learners   messages/s   commits/s   syncer's cores   messages a core second")
    for num_learners in (1, 2, 4):
        settings = {"fragments": fragments, "sync_every": 1, "receipt": "carry"}
        with running(num_learners, settings, elements=elements, step_s=0.0) as (server, learners):
            for learner in learners:
                learner.tell("join")
            time.sleep(1.0)
            process = psutil.Process(server.pid)
            num_before = sum(learner.tell("pace", 0.0) for learner in learners)
            begin, cpu_before = time.monotonic(), sum(process.cpu_times()[:2])
            time.sleep(seconds)
            end, cpu_after = time.monotonic(), sum(process.cpu_times()[:2])
            num_after = sum(learner.tell("pace", 0.0) for learner in learners)
            figures = [learner.figures() for learner in learners]
        wall_s, cpu_s = end - begin, cpu_after - cpu_before
        rate = (num_after - num_before) / wall_s
        inside = {(p, v) for each in figures for p, v, at in each["commits"] if begin <= at <= end}
        commits = len(inside) / wall_s
        cores = cpu_s / wall_s
        report.print(
            f"   {num_learners:8d} {rate:12.0f} {commits:11.0f} {cores:16.2f} {rate / cores:24.0f}"
        )
        results[f"{num_learners} learners"] = {
            "messages_per_s": rate, "commits_per_s": commits, "cores": cores,
        }  # fmt: skip
    return results


def measure_memory(report: common.Report, options: argparse.Namespace) -> dict[str, Any]:
    """Two learners, a journal and snapshots: the peak of resident memory over an idle syncer's."""
    elements = options.elements or 25_000_000
    results: dict[str, Any] = {"missed": []}
    report.print("#  wire   wire down   merges   peak MiB above an idle one   model sizes")
    for wire, down in (("int8", "fp32"), ("int8", "int4"), ("int4", "int4")):
        settings = {
            "fragments": 4, "sync_every": 2, "quorum": 2, "wire": wire, "wire_down": down,
            "receipt": "carry",
        }  # fmt: skip
        merges = options.rounds or 12
        with running(
            2, settings, elements=elements, step_s=0.05, is_kept=True, snapshot_every=4
        ) as (server, learners):
            idle = resident_bytes(pid=server.pid)
            for learner in learners:
                learner.tell("join")
            end = time.monotonic() + (options.seconds or 120.0)
            commits = 0
            while time.monotonic() < end and commits < merges:
                time.sleep(0.2)
                commits = read_status(server.address, timeout=60.0)["commits"]
            peak = resident_bytes("VmHWM", server.pid)
        sizes = (peak - idle) / (4 * elements)
        report.print(
            f"   {wire:5}  {down:9} {commits:8d} {(peak - idle) / 2**20:20.0f} {sizes:22.2f}"
        )
        results[f"{wire}, {down}"] = {"sizes": sizes, "commits": commits}
        if commits < merges:
            results["missed"].append(f"{wire}, {down}: {commits} merges in time, not {merges}")
        if sizes > MOST_MODELS:
            results["missed"].append(f"{wire}, {down}: {sizes:.2f} models, at most {MOST_MODELS}")
    return results
