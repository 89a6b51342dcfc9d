"""Exchanges that never leave the device: NCCL on streams of our own.

Everything is enqueued from the calling thread, in an order that (round, chunk) alone decides, so
that it is the same on all ranks. The fragment is encoded on the caller's stream, which may then
change the parameters; a side stream sends, reduces and votes. The host waits for nothing here. It
asks events later, and the verdict of the vote lies on the device for ``outer_step`` to read.

Small messages, which say what an exchange is about, travel over the engine's gloo groups meanwhile.
"""

from __future__ import annotations

import logging
import math
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from ... import _C, ops
from ...base.errors import SyncError
from ...base.memory import GIVEN_UP, Ballot, page_locked, vote_token
from ...ops.offload import chunks_of
from ...ops.wire import Layout
from ..buffers import ExchangeBuffers
from ..headers import shares
from ..round import Round
from .group import HelperThread

if TYPE_CHECKING:
    from .jobs import StreamJob

# Bytes of the collectives that make the connections: a chunk, as ``slot`` cuts them by default.
# NCCL chooses how a collective travels by its size, and connects each way when it is first taken.
CONNECT_BYTES = 16 << 20
_POLL_S = 1e-3
# Kernels on the side stream get a quarter of the blocks of ``reduce`` that a device runs at a time
# (its registers allow three on a multiprocessor). On an H200 these are 99, at most one on each of
# the 132 multiprocessors, where two thirds of the registers stay free for the training's kernels.
# Calculated as in docs/gpu-kernels.md, reduce then reads about 1000 GB/s of four int8 payloads: 20
# times what a NIC of 400 Gbit/s brings (50 GB/s), and twice what NVLink does (450 GB/s), so that
# the link is the limit, not the reduction. No GPU has measured any of this.
SIDE_SHARE = 4
_REDUCE_BLOCKS = 3
# How long the host waits for NCCL to end a group, and for the device to be past an aborted vote.
END_S = 5.0
# The share of the time for closing that stays for ending the group.
_END_SHARE = 0.25

_log = logging.getLogger(__name__)


@contextmanager
def current(stream: torch.Stream) -> Iterator[None]:
    """Make a stream the current one, and its device; then both as before."""
    module = torch.get_device_module(stream.device)
    device = module.current_device()
    before = torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)
        # Streams are set together with their device, which need not be the caller's.
        module.set_device(device)


def side_blocks(device: torch.device) -> int:
    """Return the most blocks of a kernel on the side stream; 0, no bound, for other than CUDA."""
    if device.type != "cuda":
        return 0
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, multiprocessors * _REDUCE_BLOCKS // SIDE_SHARE)


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
        engine: Exchanges small messages meanwhile, and looks after the other replicas.

    Attributes:
        failure: Why no more exchanges are possible; "" while they are. After a seal the last ones
            have ended, after an abort they were given up.
        max_blocks: Of the grid of each kernel on the side stream.
    """

    def __init__(
        self,
        device: torch.device,
        group: dist.ProcessGroup | None,
        rank: int,
        size: int,
        timeout: float,
        impl: str,
        engine: _C.Engine,
    ) -> None:
        self.engine = engine
        self.device, self.group = device, group
        self.rank, self.size, self.timeout, self.impl = rank, size, timeout, impl
        self.failure = ""
        self.max_blocks = side_blocks(device)
        self._is_aborted = False
        self._deadline = math.inf  # of closing
        self._helper = None if group is None else HelperThread(device)
        self._own_stream = _C.OwnStream(device)
        self.side = self._own_stream.stream
        self._encoded: list[torch.Event] = []
        self._staging = torch.empty(0, dtype=torch.uint8, device=device)
        self._works: dict[tuple[str, int], dist.Work] = {}
        self._jobs: weakref.WeakSet[StreamJob] = weakref.WeakSet()
        self._num_votes = 0
        # A flag that the device reads before and after each vote. An aborted collective ends after
        # the flag is set, so whatever that collective leaves behind is never taken for a result.
        self._given_up = page_locked(1, torch.int64)

    def reserve(self, num_bytes: int, num_chunks: int) -> None:
        """Allocate what a slot needs beside its own buffers; the first to need most pays."""
        if self._staging.numel() < num_bytes:
            # The old one may still be in use on the side stream: the allocator must see that.
            with current(self.side):
                self._staging = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        while len(self._encoded) < num_chunks:
            self._encoded.append(torch.Event(self.device))

    def connect(self, timeout: float) -> None:
        """Make each kind of collective once: connections are made by the first one.

        The host waits for the connections here, so that the first exchange does not. The helper
        thread makes them: nothing else bounds the time in which NCCL meets the other replicas.

        Args:
            timeout: Seconds that the connecting may take.

        Raises:
            SyncError: If the collectives do not come about within the timeout, or fail.
        """
        if self.group is None:
            return
        assert self._helper is not None
        begin, group = time.monotonic(), self.group
        call = self._helper.begin(lambda: self._make_connections(group))
        has_ended = call.join(timeout)
        if has_ended and call.error is None:
            while not call.result.query() and time.monotonic() - begin < timeout:
                time.sleep(_POLL_S)
            if call.result.query():
                return
        why = f"the replicas' devices did not connect within {timeout:g} s"
        if call.error is not None:
            why = f"the replicas' devices did not connect: {' '.join(str(call.error).split())}"
        if has_ended:
            self.abort(why)
        else:
            # NCCL may never return: the group is left to its thread.
            self.failure, self.group = why, None
        raise SyncError(why, stage="connect", seconds=time.monotonic() - begin) from call.error

    def _make_connections(self, group: dist.ProcessGroup) -> torch.Event:
        """Enqueue a collective of each kind; returns when all of them are done on the device."""
        with current(self.side):
            run_bytes = max(1, CONNECT_BYTES // self.size)
            own, received = torch.zeros(
                2, self.size * run_bytes, dtype=torch.uint8, device=self.device
            ).unbind()
            votes = torch.zeros(self.size + 1, dtype=torch.int64, device=self.device)
            try:
                self._send_chunk(group, received, own).synchronize()
                if self.size > 2:
                    group._allgather_base(received, own[:run_bytes]).synchronize()
                group._allgather_base(votes[1:], votes[:1]).synchronize()
            finally:
                if self.group is None:
                    group.abort()  # This thread was left behind.
            done = torch.Event(self.device)
            done.record(self.side)
        return done

    def abort(self, reason: str) -> None:
        """End what is under way: the streams go on, and no vote on the streams is unanimous.

        NCCL ends its group when the device has done everything that was enqueued before. The host
        waits ``END_S`` seconds for that at most, or what is left of the time for closing: no vote
        depends on when the group ends.
        """
        if self._is_aborted or self.group is None:
            return
        for job in list(self._jobs):
            job.look()
        self.failure, self._is_aborted = self.failure or reason, True
        self._given_up.fill_(GIVEN_UP)
        self.engine.watch_streams(False)
        self._end(self.group.abort)

    def _end(self, function: Callable[[], None]) -> None:
        assert self._helper is not None
        begin, call = time.monotonic(), self._helper.begin(function)
        if not call.join(self.seconds_to_end()):
            seconds = time.monotonic() - begin
            _log.warning(
                "the replicas' NCCL group has not ended after %.3g s: left behind", seconds
            )
        elif call.error is not None:
            _log.warning("the replicas' NCCL group did not end well: %s", call.error)

    def seconds_to_end(self) -> float:
        """Return how long the host may wait for something to end."""
        return max(0.0, min(END_S, self._deadline - time.monotonic()))

    def seal(self, reason: str) -> None:
        """Let nothing more be enqueued, and end what is under way.

        Where all votes are here the connections stay as they are until ``abort``: what this replica
        has sent may still be on its way to others.
        """
        for job in list(self._jobs):
            job.look()
        if not all(job.has_votes for job in self._jobs):
            self.abort(reason)
        elif self.group is not None:
            self.failure = self.failure or reason

    def close(self, patience: float = END_S) -> None:
        """Give the connections up.

        Args:
            patience: Seconds that the host may wait in all. What is under way has most of them;
                a share stays for ending the group, which is left behind after that.
        """
        begin = time.monotonic()
        self._deadline = begin + patience
        settled_by = begin + (1 - _END_SHARE) * patience
        while not self._is_settled() and time.monotonic() < settled_by:
            time.sleep(_POLL_S)
        if self._is_settled() and self.group is not None and not self.failure:
            self.failure, self._is_aborted = "this DiLoCo is closed", True
            self._end(self.group.shutdown)
        self.abort("this DiLoCo is closed")
        self.group = None

    def _is_settled(self) -> bool:
        """Whether no exchange still needs the connections: all have ended, or the group has."""
        if self.failure or self.group is None:
            return True
        # A job whose peer is lost finds that out when it is asked, and aborts.
        return all(job.is_done or job.has_votes for job in list(self._jobs))

    # ------------------------------------------------------------------------------ enqueueing

    def enqueue(
        self, buffers: ExchangeBuffers, round: Round, sending: Sending
    ) -> tuple[torch.Event, ...]:
        """Enqueue one exchange; returns the events of the encoding, all chunks and the verdict."""
        return self.post(buffers, round, sending, self.encode(buffers, round, sending))

    def encode(self, buffers: ExchangeBuffers, round: Round, sending: Sending) -> torch.Event:
        """Enqueue the encoding of an exchange; returns when it is done."""
        ballot = round.own.ballot
        assert ballot is not None
        here = torch.accelerator.current_stream(self.device)
        ballot.bad.zero_()
        ballot.bad_mean.zero_()
        self._encode(buffers, round, sending, here)
        ballot.host_bad.copy_(ballot.bad, non_blocking=True)
        ballot.votes.zero_()
        ballot.verdict.fill_(1)
        ready = torch.Event(self.device)
        ready.record(here)
        return ready

    def mark(self, buffers: ExchangeBuffers) -> torch.Event:
        """Say that a payload is ready when all that the caller has enqueued by now is done."""
        here = torch.accelerator.current_stream(self.device)
        ready = torch.Event(self.device)
        for event in (*self._encoded[: buffers.num_chunks], ready):
            event.record(here)
        return ready

    def post(
        self, buffers: ExchangeBuffers, round: Round, sending: Sending, ready: torch.Event
    ) -> tuple[torch.Event, ...]:
        """Enqueue the rest of an exchange whose encoding is done at ``ready``; as ``enqueue``."""
        ballot = round.own.ballot
        assert ballot is not None
        data, done = torch.Event(self.device), torch.Event(self.device)
        phases = 0 if self.size == 1 else 1 if self.size == 2 else 2
        for action, chunk, _ in _C.make_schedule(buffers.num_chunks, phases, 1, buffers.window):
            with current(self.side):
                if action == "vote":
                    self._digest(buffers, round)
                    data.record(self.side)
                    self.side.wait_event(ready)
                    self._vote(ballot)
                else:
                    getattr(self, f"_{action}")(buffers, round, sending, chunk)
        done.record(self.side)
        return ready, data, done

    def _encode(
        self, buffers: ExchangeBuffers, round: Round, sending: Sending, here: torch.Stream
    ) -> None:
        layout = buffers.layout
        for chunk in range(buffers.num_chunks):
            begin = layout.run_range(chunk * self.size)[0]
            end = layout.run_range((chunk + 1) * self.size - 1)[1]
            for first, last in sending.pieces(layout, begin, end):
                with sending.outer_of(first, last) as outer:
                    self._encode_range(buffers, round, sending, outer, first, last)
            self._encoded[chunk].record(here)

    def _encode_range(
        self,
        buffers: ExchangeBuffers,
        round: Round,
        sending: Sending,
        outer: Tensor | None,
        begin: int,
        end: int,
    ) -> None:
        assert round.own.ballot is not None
        layout = buffers.layout
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
            residual=buffers.residuals.added,
            new_residual=buffers.residuals.new,
            nonfinite=round.own.ballot.bad,
            impl=self.impl,
        )

    def _chunk(self, buffers: ExchangeBuffers, buffer: Tensor, chunk: int) -> Tensor:
        num_bytes = self.size * buffers.layout.run_bytes
        return buffer[chunk * num_bytes : (chunk + 1) * num_bytes]

    def _received(self, buffers: ExchangeBuffers, chunk: int) -> Tensor:
        return self._chunk(buffers, self._staging, chunk % buffers.window)

    def _run(self, buffers: ExchangeBuffers, buffer: Tensor, chunk: int) -> Tensor:
        begin = (chunk * self.size + self.rank) * buffers.layout.run_bytes
        return buffer[begin : begin + buffers.layout.run_bytes]

    def _post_exchange(
        self, buffers: ExchangeBuffers, round: Round, sending: Sending, chunk: int
    ) -> None:
        assert self.group is not None and round.result is not None
        self.side.wait_event(self._encoded[chunk])
        own = self._chunk(buffers, round.own.tensor, chunk)
        received = (
            self._chunk(buffers, round.result.tensor, chunk)
            if self.size == 2
            else self._received(buffers, chunk)
        )
        self._works["exchange", chunk] = self._send_chunk(self.group, received, own)

    def _send_chunk(self, group: dist.ProcessGroup, received: Tensor, own: Tensor) -> dist.Work:
        """Send every rank its run of a chunk; with two ranks, the whole chunk to the other one."""
        splits: list[int] = []
        if self.size == 2:
            splits = [0 if rank == self.rank else own.numel() for rank in range(2)]
        return group.alltoall_base(received, own, splits, splits)

    def _wait_exchange(
        self, buffers: ExchangeBuffers, round: Round, sending: Sending, chunk: int
    ) -> None:
        self._works.pop(("exchange", chunk)).synchronize()

    def _reduce(self, buffers: ExchangeBuffers, round: Round, sending: Sending, chunk: int) -> None:
        assert round.result is not None and round.own.ballot is not None
        layout = buffers.layout
        residual, new_residual = buffers.residuals.reduction(round.header.round)
        begin, end = layout.run_range(chunk * self.size + self.rank)
        if begin == end:
            return

        def part(values: Tensor | None) -> Tensor | None:
            first = chunk * layout.run_elements
            return None if values is None else values[first : first + end - begin]

        ops.reduce(
            self._received(buffers, chunk),
            self._run(buffers, round.result.tensor, chunk),
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
            max_blocks=self.max_blocks,
            impl=self.impl,
        )

    def _post_publish(
        self, buffers: ExchangeBuffers, round: Round, sending: Sending, chunk: int
    ) -> None:
        assert self.group is not None and round.result is not None
        result = round.result.tensor
        own, everyone = self._run(buffers, result, chunk), self._chunk(buffers, result, chunk)
        self._works["publish", chunk] = self.group._allgather_base(everyone, own)

    def _wait_publish(
        self, buffers: ExchangeBuffers, round: Round, sending: Sending, chunk: int
    ) -> None:
        self._works.pop(("publish", chunk)).synchronize()

    def _digest(self, buffers: ExchangeBuffers, round: Round) -> None:
        """Add up the digest of the payloads that make the mean; they are complete here."""
        assert round.own.ballot is not None
        if self.size == 1 or round.header.kind == "all_reduce":
            return
        assert round.result is not None
        payloads = [round.result.tensor]
        if self.size == 2:
            payloads.insert(self.rank, round.own.tensor)
        ballot = round.own.ballot
        ballot.digest.zero_()
        for source, payload in enumerate(payloads):
            for begin, end in buffers.layout.filled():
                first_word = (source * buffers.layout.payload_bytes + begin) // 8
                ops.digest(
                    payload[begin:end],
                    ballot.digest,
                    first_word,
                    max_blocks=self.max_blocks,
                    impl=self.impl,
                )
        ballot.host_digest.copy_(ballot.digest, non_blocking=True)

    def _vote(self, ballot: Ballot) -> None:
        # All ranks vote in the same order, so the numbers of a vote are equal.
        self._num_votes += 1
        ballot.token = vote_token(self._num_votes)
        ballot.given_up.copy_(self._given_up, non_blocking=True)
        ballot.host_given_up.copy_(ballot.given_up, non_blocking=True)
        ballot.bad.add_(ballot.bad_mean, alpha=1 << 32).add_(ballot.token).add_(ballot.given_up)
        if self.group is None:
            ballot.votes.copy_(ballot.bad)
        else:
            self.group._allgather_base(ballot.votes, ballot.bad).synchronize()
        torch.ne(ballot.votes, ballot.token, out=ballot.is_no)
        torch.sum(ballot.is_no, 0, keepdim=True, out=ballot.verdict)
        ballot.given_up.copy_(self._given_up, non_blocking=True)
        ballot.verdict.add_(ballot.given_up)
        ballot.host_votes.copy_(ballot.votes, non_blocking=True)
        ballot.host_verdict.copy_(ballot.verdict, non_blocking=True)
