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
    tiles = torch.nn.functional.pad(x, (0, -x.numel() % NORM_TILE))
    tiles = tiles.view(-1, NORM_TILE // NORM_LANES, NORM_LANES)
    lanes = torch.zeros(tiles.shape[0], NORM_LANES, dtype=torch.float64)
    for row in range(tiles.shape[1]):
        lanes = lanes + tiles[:, row]
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    total = 0.0
    for tile in lanes.flatten().tolist():
        total += tile
    return total
