"""What an exchange on streams encodes, and the stream that is current meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from ... import _C
from ...ops.offload import chunks_of
from ...ops.wire import Layout
from ..headers import shares


@dataclass
class Sending:
    """What is encoded, and how; ``offered`` are the weights of all ranks."""

    outer: Tensor | None
    params: list[Tensor]
    offered: list[float]
    stochastic: bool
    encode_key: int
    reduce_key: int
    loader: _C.ChunkLoader | None = None

    @property
    def weights(self) -> list[float]:
        """Normalised, in rank order."""
        return shares(self.offered)

    def pieces(self, layout: Layout, begin: int, end: int) -> list[tuple[int, int]]:
        """Cut the range of a chunk as far as outer parameters in host memory ask for that."""
        if self.loader is None:
            return [(begin, end)] if begin < end else []
        return chunks_of(layout, begin=begin, end=end)

    @contextmanager
    def outer_of(self, begin: int, end: int) -> Iterator[tuple[Tensor | None, int]]:
        """Have the outer parameters of a range on the device, and the element they begin with."""
        if self.loader is None or self.outer is None:
            yield self.outer, 0
            return
        yield self.loader.load([self.outer], begin, end)[0], begin
        self.loader.release([self.outer], begin, end, False)
