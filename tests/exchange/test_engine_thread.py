"""The engine thread waits for the encoder before it votes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from diloco_comm import DiLoCo, Link, NonFiniteError


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
    with DiLoCo(Holder(param), optimizer, sync_every=1, link=Link(chunk_bytes=1 << 18)) as diloco:
        with torch.no_grad():
            param[-1] = float("nan")
        with pytest.raises(NonFiniteError, match="1 on replica 0"):
            optimizer.step()
        assert diloco.totals().num_syncs == 0
