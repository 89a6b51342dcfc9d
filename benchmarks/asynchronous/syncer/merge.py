"""A merge over the floor of memory: reading the payloads, and writing the outer state."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.support import common
from diloco_comm.asynchronous.decoupled.merges import Gathered, Piece, SharedFragment
from diloco_comm.asynchronous.decoupled.model import ServedModel
from diloco_comm.asynchronous.decoupled.settings import DecoupledSettings
from diloco_comm.asynchronous.decoupled.syncer import Commit, Merge
from diloco_comm.asynchronous.decoupled.tape import digests
from diloco_comm.asynchronous.model import layout_of
from diloco_comm.base.memory import empty_pages
from diloco_comm.methods.outer import Nesterov
from diloco_comm.ops.wire import Layout, WireFormat

REPORTS = 8
# The least speed of a merge, as a share of the floor's.
LEAST_SHARE = 0.6
_WIRE = WireFormat("int8")


def measure(report: common.Report, options: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    # The loops of the floor take whole runs.
    num_elements = (options.elements or 25_000_000) // 262_144 * 262_144
    layout = layout_of(num_elements, _WIRE)
    payloads = [_payload(layout, seed) for seed in range(REPORTS)]
    names = [f"w{i}" for i in range(REPORTS)]
    shares = [1.0 + i for i in range(REPORTS)]
    fragments = {
        merge: SharedFragment(
            [torch.zeros(num_elements)],
            [Piece((0,), num_elements, merge)],
            _WIRE,
            Nesterov(0.7, 0.9),
        )
        for merge in ("mean", "rda")
    }
    gathered = {
        merge: Gathered(fragment.pieces, fragment.layouts) for merge, fragment in fragments.items()
    }

    def gather(merge: str) -> None:
        gathered[merge].clear()
        for name, payload in zip(names, payloads, strict=True):
            assert not gathered[merge].add(name, [payload])

    def step(merge: str) -> None:
        factors = gathered[merge].factors(names, shares)
        fragments[merge].merge(gathered[merge].payloads(names), shares, factors)

    calls: dict[str, Callable[[], object]] = {"floor": _floor(num_elements, payloads)}
    for merge in fragments:
        calls[f"{merge}: {REPORTS} reports arrive"] = lambda merge=merge: gather(merge)
        calls[f"{merge}: merge"] = lambda merge=merge: step(merge)
    calls["copy for the learners"] = fragments["mean"].copy_values
    model, commit = _coded(num_elements)
    calls["commit coded in int4"] = lambda: model._code(commit, model.published[0])
    hashed = [*payloads, *commit.values]
    calls["hashes for the tape"] = lambda: digests([[each] for each in hashed])
    times = common.interleave(calls, rounds=options.rounds or 9)
    whole = [name for name in calls if name != "floor" and not name.startswith("mean")]
    rows = zip(*(times[name] for name in whole), strict=True)
    times["rda: all of it, coded"] = [sum(row) for row in rows]
    report.print(f"# {REPORTS} reports in int8 of {num_elements} elements, Nesterov, one thread")
    report.print("#  what                          median ms   speed over the floor's")
    results: dict[str, Any] = {"times_s": times, "shares": {}, "missed": []}
    for name, seconds in times.items():
        share = common.median_ratio(times["floor"], seconds)
        report.print(f"   {name:28} {1e3 * statistics.median(seconds):10.1f} {100 * share:14.1f} %")
        results["shares"][name] = share
        if name.endswith(": merge") and share < LEAST_SHARE:
            results["missed"].append(f"{name}: {share:.2f} of the floor, at least {LEAST_SHARE}")
    return results


def _coded(num_elements: int) -> tuple[ServedModel, Commit]:
    """Return a model whose commits are coded, and a commit of random values."""
    settings = DecoupledSettings(fragments=["0"], wire="int8", wire_down="int4")
    pieces = [[Piece((0,), num_elements, "mean")]]
    flats = [[torch.zeros(num_elements)]]
    model = ServedModel(pieces, flats, settings, Nesterov(0.7, 0.9), 1)
    values = [torch.randn(num_elements, generator=torch.Generator().manual_seed(0))]
    return model, Commit(0, 1, {}, values, Merge(0, (), ()), [])


def _payload(layout: Layout, seed: int) -> Tensor:
    """Return random codes with scales of 1/128."""
    payload = empty_pages((layout.payload_bytes,), torch.uint8)
    payload.random_(0, 255, generator=torch.Generator().manual_seed(seed))
    blocks = layout.run_elements // _WIRE.block_size
    runs = payload.view(layout.num_runs, layout.run_bytes)
    runs[:, : 2 * blocks].view(torch.bfloat16).fill_(1 / 128)
    return payload


def _floor(num_elements: int, payloads: list[Tensor]) -> Callable[[], None]:
    """Return a loop that reads as many bytes, and reads and writes values and momentum."""
    buffers = [empty_pages((num_elements,), torch.float32) for _ in range(2)]
    buffers.append(empty_pages((num_elements,), torch.int8))
    words = (len(payloads) - 1) * num_elements // 8
    rest = [empty_pages((words,), torch.float32) for _ in range(2)]

    def run() -> None:
        torch.ops.diloco_comm._floor("arrival", buffers)
        torch.ops.diloco_comm._floor("read2", rest)

    return run
