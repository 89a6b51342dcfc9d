"""Exchanges that never leave the device: NCCL on streams of our own.

Everything is enqueued from the calling thread, in an order that (round, chunk) alone decides, so
that it is the same on all ranks. The fragment is encoded on the caller's stream, which may then
change the parameters; a side stream sends, reduces and votes. The host waits for nothing here. It
asks events later, and the verdict of the vote lies on the device for ``outer_step`` to read.

Small messages, which say what an exchange is about, travel over the engine's gloo groups meanwhile.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from . import _C, ops
from .memory import Ballot
from .pending import Round
from .slot import Slot

if TYPE_CHECKING:
    from .stream_jobs import StreamJob

# Enough to keep a link busy; the rest of the device stays with the training.
MAX_CTAS = 4
GROUP_DESCRIPTION = "diloco_comm.replica"


def make_group(
    store: dist.Store, rank: int, size: int, device: torch.device, timeout: float
) -> dist.ProcessGroup:
    """Build an NCCL group from a store alone, with few CTAs, named for the profiler."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout)
    options.config.max_ctas = MAX_CTAS
    backend = dist.ProcessGroupNCCL(store, rank, size, options)
    group = dist.ProcessGroup(store, rank, size)
    group._register_backend(device, dist.ProcessGroup.BackendType.NCCL, backend)
    group._set_default_backend(dist.ProcessGroup.BackendType.NCCL)
    group._set_group_desc(GROUP_DESCRIPTION)
    group.bound_device_id = device
    return group


@contextmanager
def current(stream: torch.Stream) -> Iterator[None]:
    """Make a stream the current one."""
    before = torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)


@dataclass
class Sending:
    """What is encoded, and how."""

    outer: Tensor | None
    params: list[Tensor]
    weights: list[float]
    stochastic: bool
    encode_key: int
    reduce_key: int
    loader: _C.ChunkLoader | None = None

    @contextmanager
    def outer_of(self, begin: int, end: int) -> Iterator[Tensor | None]:
        """Have the outer parameters of a range on the device."""
        if self.loader is None or self.outer is None:
            yield self.outer
            return
        yield self.loader.load([self.outer], begin, end)[0]
        self.loader.release([self.outer], begin, end, False)


class StreamDriver:
    """Enqueues the exchanges of one replica in one epoch.

    Args:
        group: Of the replicas; its collectives run on streams of its own (NCCL). None for one.
        timeout: Seconds that an exchange may take.

    Attributes:
        failure: Why no more exchanges are possible; "" while they are.
    """

    def __init__(
        self,
        device: torch.device,
        group: dist.ProcessGroup | None,
        rank: int,
        size: int,
        timeout: float,
        impl: str,
    ) -> None:
        self.device, self.group = device, group
        self.rank, self.size, self.timeout, self.impl = rank, size, timeout, impl
        self.failure = ""
        self.side = torch.Stream(device)
        self._encoded: list[torch.Event] = []
        self._staging = torch.empty(0, dtype=torch.uint8, device=device)
        self._works: dict[tuple[str, int], dist.Work] = {}
        self._jobs: weakref.WeakSet[StreamJob] = weakref.WeakSet()

    def reserve(self, num_bytes: int, num_chunks: int) -> None:
        """Allocate what a slot needs beside its own buffers; the first to need most pays."""
        if self._staging.numel() < num_bytes:
            # The old one may still be in use on the side stream: the allocator must see that.
            with current(self.side):
                self._staging = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        while len(self._encoded) < num_chunks:
            self._encoded.append(torch.Event(self.device))

    def connect(self) -> None:
        """Make the group's connections now, with a collective that the host waits for."""
        if self.group is None:
            return
        ballot = Ballot.make(self.size, self.device)
        self.group._allgather_base(ballot.counts, ballot.bad).wait()
        ballot.counts.cpu()

    def abort(self, reason: str) -> None:
        """End what is under way: the streams go on, and no vote of theirs is unanimous."""
        if self.failure or self.group is None:
            return
        for job in list(self._jobs):
            job.look()
        self.failure = reason
        self.group.abort()

    def close(self) -> None:
        """Give the connections up."""
        for job in list(self._jobs):
            job.look()
        if all(job.has_votes for job in self._jobs) and self.group is not None and not self.failure:
            self.failure = "this Exchange is closed"
            self.group.shutdown()
        self.abort("this Exchange is closed")
        self.group = None

    # ------------------------------------------------------------------------------ enqueueing

    def enqueue(self, slot: Slot, round: Round, sending: Sending) -> tuple[torch.Event, ...]:
        """Enqueue one exchange; returns the events of the encoding, all chunks and the verdict."""
        ballot = round.own.ballot
        assert ballot is not None
        here = torch.accelerator.current_stream(self.device)
        ballot.bad.zero_()
        ballot.bad_mean.zero_()
        self._encode(slot, round, sending, here)
        ballot.host_bad.copy_(ballot.bad, non_blocking=True)
        ballot.counts.fill_(1)
        ballot.verdict.fill_(1)
        ready = torch.Event(self.device)
        ready.record(here)
        data, done = torch.Event(self.device), torch.Event(self.device)
        phases = 0 if self.size == 1 else 1 if self.size == 2 else 2
        for action, chunk, _ in _C.make_schedule(slot.num_chunks, phases, 1, slot.window):
            with current(self.side):
                if action == "vote":
                    data.record(self.side)
                    self.side.wait_event(ready)
                    self._vote(ballot)
                else:
                    getattr(self, f"_{action}")(slot, round, sending, chunk)
        done.record(self.side)
        return ready, data, done

    def _encode(self, slot: Slot, round: Round, sending: Sending, here: torch.Stream) -> None:
        layout = slot.layout
        for chunk in range(slot.num_chunks):
            begin = layout.run_range(chunk * self.size)[0]
            end = layout.run_range((chunk + 1) * self.size - 1)[1]
            if begin < end:
                with sending.outer_of(begin, end) as outer:
                    self._encode_range(slot, round, sending, outer, begin, end)
            self._encoded[chunk].record(here)

    def _encode_range(
        self, slot: Slot, round: Round, sending: Sending, outer: Tensor | None, begin: int, end: int
    ) -> None:
        assert round.own.ballot is not None
        layout = slot.layout
        ops.encode(
            outer,
            sending.params,
            round.own.tensor,
            begin,
            end,
            layout.run_elements,
            layout.wire.name,
            layout.wire.block_size,
            stochastic=sending.stochastic,
            rng_key=sending.encode_key,
            residual=slot.residuals.added,
            new_residual=slot.residuals.new,
            nonfinite=round.own.ballot.bad,
            impl=self.impl,
        )

    def _chunk(self, slot: Slot, buffer: Tensor, chunk: int) -> Tensor:
        num_bytes = self.size * slot.layout.run_bytes
        return buffer[chunk * num_bytes : (chunk + 1) * num_bytes]

    def _received(self, slot: Slot, chunk: int) -> Tensor:
        return self._chunk(slot, self._staging, chunk % slot.window)

    def _run(self, slot: Slot, buffer: Tensor, chunk: int) -> Tensor:
        begin = (chunk * self.size + self.rank) * slot.layout.run_bytes
        return buffer[begin : begin + slot.layout.run_bytes]

    def _post_exchange(self, slot: Slot, round: Round, sending: Sending, chunk: int) -> None:
        assert self.group is not None and round.result is not None
        self.side.wait_event(self._encoded[chunk])
        own = self._chunk(slot, round.own.tensor, chunk)
        if self.size == 2:
            # The whole chunk for the only peer, and nothing for ourselves.
            splits = [0 if rank == self.rank else own.numel() for rank in range(2)]
            result = self._chunk(slot, round.result.tensor, chunk)
            work = self.group.alltoall_base(result, own, splits, splits)
        else:
            work = self.group.alltoall_base(self._received(slot, chunk), own, [], [])
        self._works["exchange", chunk] = work

    def _wait_exchange(self, slot: Slot, round: Round, sending: Sending, chunk: int) -> None:
        self._works.pop(("exchange", chunk)).wait()

    def _reduce(self, slot: Slot, round: Round, sending: Sending, chunk: int) -> None:
        assert round.result is not None and round.own.ballot is not None
        layout = slot.layout
        residual, new_residual = slot.residuals.reduction(round.header.round)
        begin, end = layout.run_range(chunk * self.size + self.rank)
        if begin == end:
            return

        def part(values: Tensor | None) -> Tensor | None:
            first = chunk * layout.run_elements
            return None if values is None else values[first : first + end - begin]

        ops.reduce(
            self._received(slot, chunk),
            self._run(slot, round.result.tensor, chunk),
            sending.weights,
            end - begin,
            layout.run_elements,
            layout.wire.name,
            layout.wire.block_size,
            stochastic=sending.stochastic,
            rng_key=sending.reduce_key,
            index_begin=begin,
            residual=part(residual),
            new_residual=part(new_residual),
            nonfinite=round.own.ballot.bad_mean,
            impl=self.impl,
        )

    def _post_publish(self, slot: Slot, round: Round, sending: Sending, chunk: int) -> None:
        assert self.group is not None and round.result is not None
        result = round.result.tensor
        own, everyone = self._run(slot, result, chunk), self._chunk(slot, result, chunk)
        self._works["publish", chunk] = self.group._allgather_base(everyone, own)

    def _wait_publish(self, slot: Slot, round: Round, sending: Sending, chunk: int) -> None:
        self._works.pop(("publish", chunk)).wait()

    def _vote(self, ballot: Ballot) -> None:
        ballot.bad.add_(ballot.bad_mean, alpha=1 << 32)
        if self.group is None:
            ballot.counts.copy_(ballot.bad)
        else:
            self.group._allgather_base(ballot.counts, ballot.bad).wait()
        torch.sum(ballot.counts, 0, keepdim=True, out=ballot.verdict)
        ballot.host_counts.copy_(ballot.counts, non_blocking=True)
