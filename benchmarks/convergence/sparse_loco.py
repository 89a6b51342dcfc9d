"""SparseLoCo's compression, from its paper (arXiv 2508.15706), to compare the topk wires with.

Each tensor is cut into chunks: a matrix into tiles of up to 64 x 64 elements, any other tensor into
pieces of up to 4096. The k largest elements of a chunk are sent: an index of 12 bits and a value of
2 bits each. The values of a tensor share a table of four: a value goes to the nearest of four
levels that are 1.5 standard deviations apart, and is decoded as the mean of its level's values.
What is not sent stays in the residual, which is multiplied by 0.95 in each round.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

NUM_KEPT = 64
DECAY = 0.95
INDEX_BITS, VALUE_BITS, TABLE_BITS = 12, 2, 4 * 32
_TILE, _CHUNK = 64, 4096
_LEVELS, _LEVEL_DISTANCE = 4, 1.5


class SparseLoCo:
    """The compression of one replica: its residual, fp32, for each of its tensors."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        self._residuals = [torch.zeros_like(p, dtype=torch.float32) for p in params]
        self.sent_bits = 0

    def encode(self, differences: Sequence[Tensor]) -> list[Tensor]:
        """Return what the receivers decode for outer - local of each tensor, and count its bits."""
        decoded = []
        for residual, difference in zip(self._residuals, differences, strict=True):
            residual.mul_(DECAY).add_(difference)
            sent, num_values = compress(residual)
            self.sent_bits += num_values * (INDEX_BITS + VALUE_BITS) + TABLE_BITS
            residual.sub_(sent)
            decoded.append(sent)
        return decoded


def compress(x: Tensor) -> tuple[Tensor, int]:
    """Return ``x`` as it is decoded, with zeros where nothing was sent, and how many were sent."""
    chunks = _chunks(x)
    count = min(NUM_KEPT, chunks.shape[1])
    places = chunks.abs().topk(count, dim=1).indices
    values = quantised(chunks.gather(1, places))
    sent = torch.zeros_like(chunks).scatter_(1, places, values)
    return _joined(sent, x.shape), places.numel()


def quantised(values: Tensor) -> Tensor:
    """Replace each value by the mean of those in its level; one table for all values."""
    mean = values.mean()
    centred = values - mean
    deviation = centred.std() if values.numel() > 1 else torch.zeros(())
    step = _LEVEL_DISTANCE * deviation if deviation > 0 else torch.ones(())
    level = (centred / step).round().add_(_LEVELS // 2).clamp_(0, _LEVELS - 1).long()
    counts = torch.bincount(level.flatten(), minlength=_LEVELS)
    sums = torch.zeros(_LEVELS).index_add_(0, level.flatten(), centred.flatten())
    return (sums / counts.clamp(min=1))[level] + mean


def _divisor(length: int, limit: int) -> int:
    """Return the largest divisor of ``length`` up to ``limit``."""
    return next(n for n in range(min(length, limit), 0, -1) if length % n == 0)


def _chunks(x: Tensor) -> Tensor:
    """Cut a tensor into its chunks, [chunks, elements]."""
    if x.dim() != 2:
        return x.reshape(-1, _divisor(x.numel(), _CHUNK)).clone()
    rows, columns = (_divisor(length, _TILE) for length in x.shape)
    tiles = x.unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).transpose(1, 2)
    return tiles.reshape(-1, rows * columns)


def _joined(chunks: Tensor, shape: torch.Size) -> Tensor:
    """Put chunks together to a tensor; the inverse of ``_chunks``."""
    if len(shape) != 2:
        return chunks.reshape(shape)
    rows, columns = (_divisor(length, _TILE) for length in shape)
    tiles = chunks.view(shape[0] // rows, shape[1] // columns, rows, columns)
    return tiles.transpose(1, 2).reshape(shape)
