"""The work of the int8 operators in plain PyTorch, as one would write it, eager or compiled.

Temporaries are allocated as PyTorch does by itself, so eager mode pays for fresh pages: on large
tensors that is most of its time.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 256


def encode(outer: Tensor, params: Tensor) -> tuple[Tensor, Tensor]:
    blocks = (outer - params).view(-1, BLOCK)
    scale = (blocks.abs().amax(dim=1, keepdim=True) / 127).clamp(min=2.0**-126)
    return (blocks / scale).round().clamp(-127, 127).to(torch.int8), scale


def decode(codes: Tensor, scale: Tensor) -> Tensor:
    return codes.view(-1, BLOCK).float() * scale


def reduce(codes: Tensor, scale: Tensor, num_runs: int = 4) -> tuple[Tensor, Tensor]:
    shards = decode(codes, scale).view(num_runs, -1)
    mean = shards.mean(dim=0)
    return encode(mean, torch.zeros(()))


def outer_step(
    outer: Tensor, momentum: Tensor, params: Tensor, codes: Tensor, scale: Tensor
) -> None:
    g = decode(codes, scale).view(-1)
    momentum.mul_(0.9).add_(g)
    outer.sub_(0.7 * (g + 0.9 * momentum))
    params.copy_(outer)
