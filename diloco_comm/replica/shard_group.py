"""Workers of one replica that hold the same parameters (DDP, ZeRO-1/2) and share its outer state.

Worker s of S owns the s-th range of each fragment's elements. The worker exchanges that range with
worker s of the other replicas, and keeps outer parameters and momentum for that range alone. The
parameters that it has written are given to the other workers of its replica.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..base.memory import memory_order
from .fragments import Fragment
from .sharding import is_sharded
from .workers import ReplicaWorkers


class ShardGroup(ReplicaWorkers):
    """The workers of one replica.

    Args:
        group: A process group, or a one-dimensional DeviceMesh.
        timeout: Seconds; see ``WorkerMessages``.

    Raises:
        TypeError: If it is neither, or this process is not in it.
    """

    def __init__(self, group: Any, timeout: float) -> None:
        group = group.get_group() if hasattr(group, "get_group") else group
        if not isinstance(group, dist.ProcessGroup):
            raise TypeError(
                "shard_group must be a ProcessGroup or a one-dimensional DeviceMesh of which this "
                f"worker is a member, got {group!r}"
            )
        super().__init__(group, timeout)

    @property
    def worker(self) -> str:
        """This worker's name among the replica's workers, see ``sharding.worker``."""
        return f"{self.rank}of{self.size}" if self.size > 1 else ""

    def share(self, fragment: Fragment, block_size: int) -> SharedFragment:
        """Return the fragment as this worker has it.

        Raises:
            ValueError: If its parameters are sharded already.
        """
        if any(is_sharded(param) for param in fragment.params):
            raise ValueError(
                "shard_group is for workers that hold the same parameters, but these are DTensors: "
                "leave it away, their shards are exchanged as they are"
            )
        return SharedFragment(
            fragment.index,
            fragment.names,
            fragment.params,
            alignment=fragment.alignment,
            group=self,
            block_size=block_size,
        )

    def broadcast(self, tensors: Sequence[Tensor], owner: int) -> None:
        """Give the 1-D tensors of one worker to all, in place, one message for each dtype."""
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            same = [tensor for tensor in tensors if tensor.dtype == dtype]
            flat = same[0] if len(same) == 1 else torch.cat(same)
            dist.broadcast(flat, group=self.group, group_src=owner)
            if len(same) > 1 and owner != self.rank:
                torch._foreach_copy_(same, list(flat.split([t.numel() for t in same])))

    def hand_out(self, fragments: Sequence[Fragment]) -> None:
        for fragment in fragments:
            assert isinstance(fragment, SharedFragment)
            fragment.give()


@dataclass(frozen=True)
class SharedFragment(Fragment):
    """A fragment of which this worker exchanges one range of elements, of whole blocks."""

    group: ShardGroup = None  # type: ignore[assignment]
    block_size: int = 256

    def _needs_filler(self) -> bool:
        begin, end = self.range_of(self.group.rank)
        return begin == end and self.whole_elements > 0

    @property
    def whole_elements(self) -> int:
        gaps = sum(gap.numel() for gap in self.gaps.values())
        return gaps + sum(param.numel() for param in self.params)

    @property
    def placement(self) -> str:
        begin, end = self.range_of(self.group.rank)
        return f"elements {begin} to {end} of {self.whole_elements}"

    def range_of(self, worker: int) -> tuple[int, int]:
        """Return the first element that a worker owns, and the one after its last."""
        num_blocks = -(-self.whole_elements // self.block_size)
        share = -(-num_blocks // self.group.size) * self.block_size
        begin = min(worker * share, self.whole_elements)
        return begin, min(begin + share, self.whole_elements)

    def named(self) -> dict[str, Tensor]:
        return {name: piece for name, piece in self.pieces() if name}

    def pieces(self) -> list[tuple[str, Tensor]]:
        return self._cut(super().named(), self.group.rank)

    def local(self) -> list[Tensor]:
        return list(super().named().values())

    def _cut(self, tensors: Mapping[str, Tensor], worker: int) -> list[tuple[str, Tensor]]:
        """Return a worker's pieces of tensors like the parameters, 1-D, in memory order."""
        begin, end = self.range_of(worker)
        pieces, offset = [], 0
        for name, tensor in self._padded(tensors):
            first, last = max(begin - offset, 0), min(end - offset, tensor.numel())
            if first < last:
                pieces.append((name, memory_order(tensor)[first:last]))
            offset += tensor.numel()
        return pieces

    def give(self) -> None:
        """Give each worker's ranges of the parameters to all; a collective call."""
        whole = super().named()
        for worker in range(self.group.size):
            pieces = [piece for name, piece in self._cut(whole, worker) if name]
            self.group.broadcast(pieces, worker)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Gather all workers' ``flat``, and cut it like the parameters; a collective call."""
        whole = flat.new_empty(self.whole_elements)
        begin, end = self.range_of(self.group.rank)
        whole[begin:end].copy_(flat[: end - begin])
        for worker in range(self.group.size):
            begin, end = self.range_of(worker)
            if begin < end:
                self.group.broadcast([whole[begin:end]], worker)
        return super().views(whole)

    def load(self, flat: Tensor, saved: Mapping[str, Tensor]) -> None:
        laid_out = {
            name: torch.empty_like(param, dtype=flat.dtype).copy_(saved[name])
            for name, param in zip(self.names, self.params, strict=True)
        }
        offset = 0
        for _, piece in self._cut(laid_out, self.group.rank):
            flat[offset : offset + piece.numel()].copy_(piece)
            offset += piece.numel()

    # Values of one worker alone are saved as they are: other workers may not have such values.

    def own_views(self, flat: Tensor) -> dict[str, Tensor]:
        return {self._own_key: flat}

    def has_own(self, saved: Mapping[str, Any]) -> bool:
        return self._own_key in saved

    def check_own(self, saved: Any) -> None:
        key, count = self._own_key, self.num_elements
        if not isinstance(saved, Mapping) or key not in saved or saved[key].numel() != count:
            raise ValueError(
                f"the saved state lacks what worker {self.group.worker} of the replica had for "
                "itself: it was saved by another number of workers"
            )

    def load_own(self, flat: Tensor, saved: Mapping[str, Tensor]) -> None:
        flat.copy_(saved[self._own_key])

    @property
    def _own_key(self) -> str:
        return f"{self.index}@{self.group.rank}of{self.group.size}"
