"""Put the outer parameters into the model for a while, and the local ones back, bit by bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from torch import Tensor

from .. import ops
from ..base.interrupts import Uninterruptible
from ..rounds.part import SyncedFragment


@contextmanager
def swapped_in(
    parts: Sequence[SyncedFragment],
    outers: Sequence[Tensor],
    *,
    impl: str,
    writing: AbstractContextManager[None],
    uninterruptible: Uninterruptible,
) -> Iterator[None]:
    """Have ``outers`` in the parts' parameters inside the block.

    Args:
        outers: fp32 [num_elements] of each part.
        writing: Entered while the parameters are written; gives them to the replica's workers.
        uninterruptible: Guards the return to the local parameters; see ``RoundRunner``.
    """
    local = [[tensor.clone() for tensor in part.fragment.local()] for part in parts]
    try:
        with writing:
            for part, outer in zip(parts, outers, strict=True):
                ops.merge(outer.to(part.device), part.tensors(), impl=impl)
        yield
    finally:
        with uninterruptible():
            for part, saved in zip(parts, local, strict=True):
                for tensor, value in zip(part.fragment.local(), saved, strict=True):
                    tensor.copy_(value)
