"""Five hundred outer steps of four processes leave no memory, thread or descriptor behind.

One DiLoCo lives from beginning to end; beside it others come and go, each with random fragments,
sizes, wire, lanes and error feedback, the same on all ranks.
"""

from __future__ import annotations

import ctypes
import gc
import os
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from diloco_comm import DiLoCo, Link, Nesterov, Wire
from diloco_comm.ops.wire import ELEMENT_WIRES

CYCLES = 20
STEPS = 25  # outer steps a cycle, of the lasting DiLoCo and of the passing one together
WARM_STEPS = 50


def resident_bytes() -> int:
    """The resident set, without what the allocator merely keeps."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def threads() -> list[str]:
    names = []
    for task in Path("/proc/self/task").iterdir():
        try:
            names.append((task / "comm").read_text().strip())
        except OSError:
            continue
    return sorted(names)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def left_behind(before: tuple[list[str], int]) -> tuple[list[str], int]:
    """Threads and descriptors that were not there before; waits ten seconds for them to end.

    A joined thread takes a moment, and a call on the store has a thread as long as it lasts: one
    that was there before and is gone is none of ours.
    """
    deadline = time.monotonic() + 10
    while True:
        names = Counter(threads()) - Counter(before[0])
        more = max(0, descriptors() - before[1])
        if not (names or more) or time.monotonic() > deadline:
            return sorted(names), more
        time.sleep(0.01)


class Run:
    """A model of random tensors that trains under DiLoCo without gradients."""

    def __init__(self, choice: random.Random) -> None:
        sizes = [
            choice.choice([0, 1, 7, 255, 257, 4096, choice.randrange(1, 60_000)]) for _ in "1234"
        ]
        tensors = [nn.Parameter(torch.randn(size)) for size in (3, *sizes)]
        self.model = nn.ParameterList(tensors)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.diloco = DiLoCo(
            self.model,
            optimizer,
            sync_every=1,
            outer=Nesterov(lr=0.7, momentum=0.9),
            wire=Wire(
                choice.choice(ELEMENT_WIRES),
                block_size=choice.choice([32, 256, 1024]),
                rounding=choice.choice(["nearest", "stochastic"]),
                error_feedback=choice.random() < 0.5,
            ),
            link=Link(lanes=choice.choice([1, 2]), chunk_bytes=choice.choice([None, 4096])),
            attach=False,
        )

    def step(self) -> None:
        with torch.no_grad():
            for tensor in self.model.parameters():
                tensor.mul_(0.99)
        self.diloco.step()


def soak(rank: int, world: int, seed: int) -> dict[str, Any]:
    choice = random.Random(seed)
    torch.manual_seed(rank)
    lasting = Run(choice)
    steps, history, hashes = 0, [], []
    for cycle in range(CYCLES):
        before = (threads(), descriptors())
        passing = Run(choice)
        while steps < (cycle + 1) * STEPS:
            (lasting if steps % 2 else passing).step()
            steps += 1
        hashes.append((passing.diloco.outer_hash(), lasting.diloco.outer_hash()))
        dist.barrier()
        passing.diloco.close()
        del passing
        dist.barrier()
        left = left_behind(before)
        history.append({"steps": steps, "bytes": resident_bytes(), "left": left})
    lasting.diloco.close()
    return {"history": history, "hashes": hashes, "steps": steps}


@pytest.mark.nightly("30 s; test_lifetime counts what a DiLoCo leaves behind")
@pytest.mark.slow
@pytest.mark.timeout(420)
def test_500_outer_steps_leave_nothing_behind(workers: Callable[[int], Any]) -> None:
    seed = 20_240_611
    results = workers(4).run(soak, seed, timeout=400)
    for result in results:
        assert result["steps"] == 500
        for entry in result["history"]:
            assert entry["left"] == ([], 0), entry["steps"]
        warm = [e["bytes"] for e in result["history"] if e["steps"] <= WARM_STEPS]
        late = [e["bytes"] for e in result["history"] if e["steps"] > WARM_STEPS]
        growth = [(size - max(warm)) / 2**20 for size in late]
        # The middle of the last five cycles against the peak of the first fifty steps. A lost
        # payload or tensor a step, of tens of kilobytes, would be more than ten megabytes.
        assert sorted(growth[-5:])[2] < 4, [round(mib, 2) for mib in growth]
    assert all(result["hashes"] == results[0]["hashes"] for result in results)
