"""64-bit digests of tensors: the same for equal bytes on every device, in any number of threads.

``docs/developers/wire-formats.md`` defines the digest of one tensor; digests of several tensors
are chained. Digests are for comparing replicas. They are no protection against an adversary, who
can make two tensors with one digest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from .. import _C, ops
from ..base.memory import Reading


def each_digest(tensors: Sequence[Tensor], *, impl: str = "") -> list[int]:
    """Return the digest of the bytes of each tensor, in memory order.

    Device tensors stay where they are: 16 bytes for each come to the host, all of one device at
    once.

    Args:
        tensors: Dense, of any dtypes and shapes, on any devices.
        impl: Implementation of the operator, or "" for the default.

    Raises:
        ValueError: If a tensor does not fill its memory without gaps.
    """
    return DigestReading(tensors, impl=impl).each()


class DigestReading:
    """Digests of tensors that a device works out while the host goes on.

    Args:
        tensors, impl: As in ``each_digest``, with the same errors.
    """

    def __init__(self, tensors: Sequence[Tensor], *, impl: str = "") -> None:
        self._sizes = [tensor.nbytes for tensor in tensors]
        places: dict[torch.device, list[int]] = {}
        for i, tensor in enumerate(tensors):
            places.setdefault(tensor.device, []).append(i)
        self._readings: list[tuple[list[int], Reading]] = []
        for device, indices in places.items():
            sums = torch.zeros(len(indices), 2, dtype=torch.int64, device=device)
            for row, i in zip(sums, indices, strict=True):
                ops.digest(tensors[i].detach(), row, impl=impl)
            self._readings.append((indices, Reading(sums.view(-1))))

    @property
    def is_done(self) -> bool:
        """Whether ``each`` would return without waiting for a device."""
        return all(reading.is_copied for _, reading in self._readings)

    def each(self) -> list[int]:
        """Return the digest of each tensor; waits for the devices."""
        digests = [0] * len(self._sizes)
        for indices, reading in self._readings:
            sums = reading.values()
            for i, product, total in zip(indices, sums[::2], sums[1::2], strict=True):
                digests[i] = ops.finish_digest(product, total, self._sizes[i])
        return digests

    def digest(self) -> int:
        """Return the digest of all tensors, see ``digest_of``; waits for the devices."""
        return chained(self.each(), len(self._sizes))


def chained(digests: Iterable[int], start: int = 0) -> int:
    """Return one digest of several, in [0, 2^64): h = mix64(h ^ digest) for one after the other."""
    h = start
    for digest in digests:
        h = _C.mix64(h ^ digest)
    return h


def digest_of(tensors: Sequence[Tensor], *, impl: str = "") -> int:
    """Return one digest of several tensors, in [0, 2^64).

    The digests of the tensors' bytes, in memory order, are chained from the number of tensors. So
    the digest depends on the order of the tensors and on where each ends, but not on their shapes
    and dtypes.

    Args:
        tensors, impl: As in ``each_digest``, with the same errors.
    """
    return DigestReading(tensors, impl=impl).digest()
