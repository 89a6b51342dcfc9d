"""Sums of fp64 values in an order that does not depend on threads or vector widths.

Imports torch, nothing else.
"""

from __future__ import annotations

import torch
from torch import Tensor

NORM_TILE = 65536
NORM_LANES = 16


def ordered_sum(x: Tensor) -> float:
    """Return the sum of 1-D fp64 values.

    Tiles of 65536 elements are added one after the other; in a tile sixteen partial sums take every
    sixteenth element, then the upper half is added to the lower half until one is left.
    """
    return _one_after_the_other(_lane_sums(x, NORM_TILE))


def sum_by_blocks(x: Tensor, block_size: int) -> float:
    """Return the sum of 1-D fp64 values.

    Blocks are summed as the tiles of ``ordered_sum``, and added one after the other in each tile of
    65536 elements; then tiles are added one after the other.
    """
    blocks = _lane_sums(x, block_size).split(NORM_TILE // block_size)
    return _one_after_the_other([_one_after_the_other(tile) for tile in blocks])


def _one_after_the_other(values: Tensor | list[float]) -> float:
    total = 0.0
    for value in values if isinstance(values, list) else values.tolist():
        total += value
    return total


def _lane_sums(x: Tensor, size: int) -> Tensor:
    """Return the sum of each ``size`` elements, in sixteen lanes."""
    parts = torch.nn.functional.pad(x, (0, -x.numel() % size)).view(
        -1, size // NORM_LANES, NORM_LANES
    )
    lanes = torch.zeros(parts.shape[0], NORM_LANES, dtype=torch.float64)
    for row in range(parts.shape[1]):
        lanes = lanes + parts[:, row]
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes.flatten()
