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
    places: dict[torch.device, list[int]] = {}
    for i, tensor in enumerate(tensors):
        places.setdefault(tensor.device, []).append(i)
    digests = [0] * len(tensors)
    for device, indices in places.items():
        sums = torch.zeros(len(indices), 2, dtype=torch.int64, device=device)
        for row, i in zip(sums, indices, strict=True):
            ops.digest(tensors[i].detach(), row, impl=impl)
        for (product, total), i in zip(sums.tolist(), indices, strict=True):
            digests[i] = ops.finish_digest(product, total, tensors[i].nbytes)
    return digests


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
    return chained(each_digest(tensors, impl=impl), len(tensors))
