"""What the engine thread may not do: vote before all is encoded, or start a thread pool."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from torch import nn
from workers import Pool

from diloco_comm import DiLoCo, NonFiniteError


def make(num_elements: int) -> tuple[nn.Parameter, torch.optim.Optimizer]:
    param = nn.Parameter(torch.zeros(num_elements))
    param.grad = torch.ones_like(param)
    return param, torch.optim.SGD([param], lr=0.5)


class Holder(nn.Module):
    def __init__(self, param: nn.Parameter) -> None:
        super().__init__()
        self.param = param


def test_single_replica_votes_after_its_last_chunk() -> None:
    param, optimizer = make(3_000_000)
    with DiLoCo(Holder(param), optimizer, sync_every=1, chunk_bytes=1 << 18) as diloco:
        with torch.no_grad():
            param[-1] = float("nan")
        with pytest.raises(NonFiniteError, match="1 on replica 0"):
            optimizer.step()
        assert diloco.totals().num_syncs == 0


def count_threads(rank: int, world: int) -> tuple[int, int]:
    torch.set_num_threads(2)
    try:
        param, optimizer = make(4_000_000)
        with DiLoCo(Holder(param), optimizer, sync_every=1):
            torch.ones(1 << 22).add_(1)  # the pool of this thread exists from here on
            before = len(os.listdir("/proc/self/task"))
            optimizer.step()
            return before, len(os.listdir("/proc/self/task"))
    finally:
        torch.set_num_threads(1)


def test_engine_thread_has_no_pool_of_its_own(workers: Callable[[int], Pool]) -> None:
    for before, after in workers(3).run(count_threads):
        assert after == before
