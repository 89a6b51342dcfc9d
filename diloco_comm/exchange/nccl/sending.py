"""A round on streams, and what it encodes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from ... import _C
from ...ops.offload import chunks_of
from ...ops.wire import Layout
from ..round import Header, Mean, Round, shares
from .jobs import StreamJob


@dataclass
class Sending:
    """The arguments of an encoding on streams; ``offered`` are the weights of all ranks."""

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


@dataclass(eq=False)
class StreamRound(Round):
    """A round on streams: held at first, or enqueued.

    Attributes:
        sending: The arguments of the encoding; weights follow when the round is sent.
        encoded: The encoding is done.
    """

    sending: Sending | None = None
    encoded: torch.Event | None = None

    def _num_bad_encoded(self) -> int | None:
        assert self.own.ballot is not None and self.encoded is not None
        return int(self.own.ballot.host_bad) if self.encoded.query() else None

    def offer(self) -> Mean:
        if self.state != "started":
            return self.wait()
        job = self.job
        assert isinstance(job, StreamJob) and self.own.ballot is not None
        job.wait_for_headers()
        if job.is_done:
            return self.wait()
        job.block_caller()
        return Mean(
            terms=self.combine(job.weights),
            layout=self.mean_layout,
            headers=[Header.of(header) for header in job.headers],
            weights=list(job.weights),
            seconds={},
            sent_bytes=0,
            received_bytes=0,
            verdict=self.own.ballot.verdict,
        )
