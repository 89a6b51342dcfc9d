"""The work of the operators in plain PyTorch, as one would write it, eager or compiled.

Temporaries are allocated as PyTorch does by itself, so eager mode pays for fresh pages: on large
tensors that is most of its time.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK, SPARSE_BLOCK, KEPT = 256, 4096, 64


def pack(codes: Tensor, bits: int) -> Tensor:
    """Put integers of a few bits into bytes, the first into the lowest bits."""
    places = torch.arange(0, 8, bits, dtype=torch.int32, device=codes.device)
    return (codes.view(-1, 8 // bits) << places).sum(dim=1).to(torch.uint8)


def unpack(codes: Tensor, bits: int) -> Tensor:
    places = torch.arange(0, 8, bits, dtype=torch.int32, device=codes.device)
    return (codes.view(-1, 1) >> places) & ((1 << bits) - 1)


def encode(
    outer: Tensor, params: Tensor, residual: Tensor | None = None, bits: int = 8
) -> tuple[Tensor, ...]:
    """Return codes and scales, and with a residual the new one."""
    x = outer - params if residual is None else outer - params + residual
    most = (1 << bits - 1) - 1
    blocks = x.view(-1, BLOCK)
    scale = (blocks.abs().amax(dim=1, keepdim=True) / most).clamp(min=2.0**-126)
    rounded = (blocks / scale).round().clamp(-most, most)
    codes = rounded.to(torch.int8) if bits == 8 else pack(rounded.int() + most + 1, bits)
    return (codes, scale) if residual is None else (codes, scale, blocks - rounded * scale)


def decode(codes: Tensor, scale: Tensor, bits: int = 8) -> Tensor:
    integers = codes if bits == 8 else unpack(codes, bits) - (1 << bits - 1)
    return integers.view(-1, BLOCK).float() * scale


def reduce(codes: Tensor, scale: Tensor, bits: int = 8, num_runs: int = 4) -> tuple[Tensor, ...]:
    mean = decode(codes, scale, bits).view(num_runs, -1).mean(dim=0)
    return encode(mean, torch.zeros(()), bits=bits)


def outer_step(
    outer: Tensor, momentum: Tensor, params: Tensor | None, codes: Tensor, scale: Tensor
) -> None:
    g = decode(codes, scale).view(-1)
    momentum.mul_(0.9).add_(g)
    outer.sub_(0.7 * (g + 0.9 * momentum))
    if params is not None:
        params.copy_(outer)


def encode_rotated(outer: Tensor, params: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor]:
    """Code the rotated blocks in two bits: a sign, and one of two levels."""
    y = (outer - params).view(-1, BLOCK) @ rotation
    size = y.abs()
    is_large = size > 1.23 * size.mean(dim=1, keepdim=True)
    level = torch.where(is_large, 10.0, 3.0)
    scale = (y * y).sum(dim=1, keepdim=True) / (size * level).sum(dim=1, keepdim=True)
    return pack(2 * is_large.int() + (y < 0), 2), scale


def decode_rotated(codes: Tensor, scale: Tensor, rotation: Tensor) -> Tensor:
    bits = unpack(codes, 2).view(-1, BLOCK)
    level = torch.where(bits > 1, 10.0, 3.0) * (1 - 2 * (bits & 1))
    return (level @ rotation.T) * scale


def encode_sparse(outer: Tensor, params: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the indices, the signs and the mean magnitude of the largest elements of a block."""
    x = (outer - params).view(-1, SPARSE_BLOCK)
    indices = x.abs().topk(KEPT, dim=1).indices
    kept = x.gather(1, indices)
    return indices.to(torch.int16), kept < 0, kept.abs().mean(dim=1, keepdim=True)
