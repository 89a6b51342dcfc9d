"""The latency of a commit: from the last report of the quorum to the commit at all learners."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.asynchronous.syncer.processes import running
from benchmarks.support import common

_LEARNERS = 2
Times = dict[tuple[int, int], list[float]]


def measure(report: common.Report, options: argparse.Namespace) -> dict[str, Any]:
    step_s, seconds = options.step_ms / 1e3, options.seconds or 30.0
    results: dict[str, Any] = {"missed": []}
    report.print(f"# {_LEARNERS} learners, a quorum of both, no grace window, 4 fragments")
    report.print(
        "#                        COMMIT at all learners, ms    values at all learners, ms"
    )
    report.print(f"# journals in a folder of {file_system(options.folder)}")
    report.print(
        "#  elements   journal   commits     p50      p99               p50      p99   skipped"
    )
    rows = [(100_000, False), (100_000, True), (4_000_000, True)]
    if options.elements:
        rows = [(options.elements, False), (options.elements, True)]
    for elements, is_kept in rows:
        settings = {
            "fragments": 4, "sync_every": 8, "quorum": _LEARNERS, "gamma": 0.0, "wire": "int8",
            "wire_down": "int4", "receipt": "carry",
        }  # fmt: skip
        server = {"is_kept": is_kept, "folder": str(options.folder)}
        with running(_LEARNERS, settings, elements=elements, step_s=step_s, **server) as (
            _,
            learners,
        ):
            for learner in learners:
                learner.tell("join")
            time.sleep(seconds)
            figures = [learner.figures() for learner in learners]
        told, here = (latencies(figures, name) for name in ("commits", "arrivals"))
        num_skipped = len(told) - len(here)
        cells = [1e3 * common.percentile(x, p) for x in (told, here) for p in (50, 99)]
        report.print(
            f"   {elements:8d}   {'fsync' if is_kept else 'none':7} {len(told):9d}"
            f" {cells[0]:7.2f} {cells[1]:8.2f} {cells[2]:17.2f} {cells[3]:8.2f} {num_skipped:9d}"
        )
        results[f"{elements} elements, {'fsync' if is_kept else 'no journal'}"] = {
            "commit_s": spread(told), "values_s": spread(here), "skipped": num_skipped,
        }  # fmt: skip
    return results


def spread(seconds: list[float]) -> dict[str, float]:
    """Return the number of samples, and their percentiles."""
    shares = {f"p{share}": common.percentile(seconds, share) for share in (10, 50, 90, 99)}
    return {"samples": len(seconds), **shares}


def file_system(folder: Path) -> str:
    """Return the kind of file system on which a folder is, as the kernel names it."""
    mounts = psutil.disk_partitions(all=True)
    above = [each for each in mounts if folder.resolve().is_relative_to(each.mountpoint)]
    return max(above, key=lambda each: len(each.mountpoint)).fstype if above else "unknown kind"


def latencies(figures: list[dict[str, Any]], name: str) -> list[float]:
    """Return the seconds from the last report to the last learner that has what it led to.

    Versions that a learner skipped, or to which not all have reported, are left out: a learner
    whose values come late takes a newer version.
    """
    pushed, heard = _by_version(figures, "pushes"), _by_version(figures, name)
    found = []
    for (fragment, base), times in pushed.items():
        ends = heard.get((fragment, base + 1), [])
        if len(times) == len(ends) == len(figures):
            found.append(max(ends) - max(times))
    return found


def _by_version(figures: list[dict[str, Any]], name: str) -> Times:
    """Return the times of all learners, by fragment and version; of each learner the first."""
    found: Times = {}
    for each in figures:
        first: dict[tuple[int, int], float] = {}
        for fragment, version, at in each[name]:
            first.setdefault((fragment, version), at)
        for key, at in first.items():
            found.setdefault(key, []).append(at)
    return found
