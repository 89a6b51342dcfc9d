"""Exchanges that never leave the device: NCCL on a side stream.

The calling thread enqueues all work, in an order that follows from (round, chunk) alone and so is
the same on all ranks. The fragment is encoded on the caller's stream, which may then change the
parameters; a side stream sends, reduces and votes. The host waits for nothing here. It queries
events later, and ``outer_step`` reads the result of the vote on the device.

Meanwhile the headers of the round travel over the engine's gloo groups.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ... import _C, ops
from ...base.memory import Ballot, current, vote_token
from ...ops import finish_digest
from ...ops.wire import Layout
from ..buffers import ExchangeBuffers
from ..round import Round, Sending, shares
from ..waits import WaitLog
from .connections import Connections

_POLL_S = 2e-5
# Fields of ``_C.Failure`` about the other replicas, for a failure that blames none.
_NO_BLAME: dict[str, Any] = {"missing": [], "replicas": [], "cause": ""}


class StreamJob:
    """An exchange on streams; has the methods of ``round.Job``, as the engine's jobs have.

    Args:
        driver: Gets the events back at the end.
        control: The engine's job that exchanges and compares the headers.
        round: The round.
        events: Four events with times: all is encoded; the first chunk may be sent; all chunks
            have come; the result of the vote is known.
        presumed: The expected headers of all ranks: copies of the own one, with each rank's weight.
        members: Numbers of the replicas in rank order.
        sent_bytes: Bytes that this rank sends, and receives.
    """

    encode_seconds = 0.0

    def __init__(
        self,
        driver: Connections,
        control: _C.Job,
        round: Round,
        events: tuple[torch.Event, ...],
        presumed: list[_C.Header],
        members: Sequence[int],
        sent_bytes: int,
    ) -> None:
        assert round.own.ballot is not None
        self.driver, self.control = driver, control
        # No reference to the round, which refers to this job: such a cycle would keep the round's
        # payloads on the device until the next garbage collection.
        self._header, self._ballot = round.header, round.own.ballot
        num_payloads = len(members) if round.num_phases == 1 else 1
        self._digest_bytes = num_payloads * round.mean_layout.payload_bytes
        self.encoded, self.leaving, self.data, self.done = events
        # Events on the caller's stream, before and after it waits for the exchange.
        self._stops: list[torch.Event] = []
        self._presumed, self.members = presumed, members
        self.weights = shares([header.weight for header in presumed])
        self.failure: Any = None
        self.counters = {"sent_bytes": sent_bytes, "received_bytes": sent_bytes}
        self._headers: list[_C.Header] = []
        self.has_data = self.has_votes = False
        self._begin = time.monotonic()
        self.is_decided = False
        driver.add(self)

    @property
    def headers(self) -> list[_C.Header]:
        """The headers in rank order; the expected ones if the vote succeeded before these came."""
        return self._headers or self.control.headers

    @property
    def digest(self) -> int:
        """The digest of the payloads; valid once the host has the result of the vote."""
        product, total = self._ballot.host_digest.tolist()
        return finish_digest(product, total, self._digest_bytes)

    @property
    def seconds(self) -> dict[str, float]:
        """The device's time for the exchange, and the time for which the caller's stream waited."""
        return {"total": self.leaving.elapsed_time(self.done) / 1e3, "exposed": self._exposed_s()}

    @property
    def standing(self) -> str:
        """How far the vote of a failed exchange was: "none", "voted" or "rejected".

        "voted": others may have applied the round. "rejected": nobody applies it, as a rank, this
        one or another, has voted no.
        """
        assert self.failure is not None
        if self.failure.kind == "NonFiniteError":
            return "rejected"
        if self.failure.stage != "vote" or not self.weights:
            return "none"
        return "rejected" if bool(self._ballot.host_bad) else "voted"

    @property
    def waiting(self) -> str:
        """Words for the replica whose header has not come; "" once all headers have."""
        return self.control.waiting

    @property
    def num_bad_encoded(self) -> int | None:
        """Number of own elements that cannot be encoded; None until the host knows it."""
        return int(self._ballot.host_bad) if self.encoded.query() else None

    @property
    def is_done(self) -> bool:
        if not self.is_decided:
            self._decide()
        return self.is_decided

    def wait(self, seconds: float) -> bool:
        """Poll until the exchange has ended; the host sleeps between two polls."""
        self._expect_wait()
        deadline = time.monotonic() + seconds
        while not self.is_done:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL_S)
        return True

    def wait_landed(self, runs: int, seconds: float) -> int:
        """Return ``runs`` at once: the host cannot see parts of a result before all has come."""
        return runs

    def wait_for_headers(self) -> None:
        """Wait until the headers are compared, or the exchange has ended."""
        self._expect_wait()
        log = WaitLog()
        while not self.control.is_done and not self.is_done:
            self.control.wait(0.05)
            log.tick(lambda: self.waiting)

    def __del__(self) -> None:
        self.driver.give_back((self.encoded, self.leaving, self.data, self.done, *self._stops))

    def _expect_wait(self) -> None:
        """Record an event where the caller's stream begins to wait, to measure the exposed time."""
        if not self._stops:
            self._stop(torch.accelerator.current_stream(self.driver.device))

    def block_caller(self) -> None:
        stream = torch.accelerator.current_stream(self.driver.device)
        stream.wait_event(self.done)
        if len(self._stops) == 1:
            self._stop(stream)

    def _stop(self, stream: torch.Stream) -> None:
        self._stops.append(self.driver.take_event())
        self._stops[-1].record(stream)

    def _exposed_s(self) -> float:
        """Return for how long the caller's stream waited for the exchange, which has ended."""
        if len(self._stops) < 2 or not self._stops[0].query():
            return 0.0  # The stream begins its wait after the end of the exchange.
        first, last = self._stops
        while not last.query():
            pass  # This ends at once: the exchange, for which the stream waits, has ended.
        return first.elapsed_time(last) / 1e3

    def look(self) -> None:
        """Note how far the device is; not after an abort, which lets all events pass."""
        if not self.driver.failure:
            self.has_data = self.has_data or self.data.query()
            self.has_votes = self.has_votes or self.done.query()

    def _decide(self) -> None:
        self.look()
        if self.driver.failure and not self.has_votes:
            why = f"its group was given up: {self.driver.failure}"
            self._fail("SyncError", self._ended(why))
        elif self.control.is_done and self.control.failure is not None:
            self._fail_with_control(self.control.failure)
        elif self.control.is_done and self.has_votes:
            self._count_votes()
        elif time.monotonic() - self._begin > self.driver.timeout:
            self._fail("SyncError", f"not done after {self.driver.timeout:g} s")
        elif not self.has_votes and (failure := self.driver.engine.dead_failure) is not None:
            # The engine's epoch has ended: by a change of the group, or in another exchange.
            self._fail("SyncError", self._ended(failure.message), missing=failure.missing)

    def _count_votes(self) -> None:
        ballot = self._ballot
        if quitters := ballot.quitters():
            names = ", ".join(str(self.members[rank]) for rank in quitters)
            self._fail("SyncError", f"replica {names} gave the round up before its vote")
            return
        self.is_decided = True
        message, replicas = _C.find_bad_elements(ballot.numbers(), list(self.members))
        if message:
            is_of_some = len(replicas) < len(self.members)
            self._set_failure(
                "NonFiniteError",
                self._named(message),
                "vote",
                replicas=replicas,
                missing=replicas if is_of_some else [],
            )

    def _fail_with_control(self, failure: _C.Failure) -> None:
        # If all ranks have voted, the votes count although the headers failed, as when a rank left
        # afterwards. But they never count if the ranks' rounds differ.
        if self.has_votes and failure.kind != "ReplicaMismatch" and not self._ballot.quitters():
            self._headers = self._presumed
            self._count_votes()
            return
        names = tuple(_NO_BLAME)
        more = {name: getattr(failure, name) for name in names}
        self._fail(failure.kind, failure.message, stage=failure.stage, **more)

    def _fail(self, kind: str, why: str, stage: str = "", **more: Any) -> None:
        message = self._named(why)
        self.driver.abort(message)
        is_mismatch = kind == "ReplicaMismatch"
        # Headers are compared before the outer step is enqueued, so with a mismatch nothing is
        # applied.
        is_over = not is_mismatch and self._is_over()
        if is_over and not bool(self._ballot.host_verdict):
            # The device found the vote unanimous before the abort, and has taken the outer step.
            self._headers = self._presumed
            self._count_votes()
            return
        # If all chunks came before the abort, the own vote may have been sent, with or without the
        # headers of the others.
        has_data = self.has_data or (is_over and not bool(self._ballot.host_given_up))
        stage = "vote" if has_data and not is_mismatch else stage or "exchange"
        if stage == "vote":
            self._headers = self.control.headers or self._presumed
        self.is_decided = True
        self._set_failure(kind, message, stage, **more)

    def _named(self, why: str) -> str:
        header = self._header
        name = f"sync of fragment {header.fragment}, round {header.round}"
        return why if why.startswith(name) else f"{name}: {why}"

    def _ended(self, why: str) -> str:
        """Return the message of a failure, in the form that the engine's messages have."""
        where = f"round {self._header.round} failed at exchange"
        seconds = time.monotonic() - self._begin
        return f"sync of fragment {self._header.fragment}, {where} after {seconds:.1f} s: {why}"

    def _is_over(self) -> bool:
        """Wait until the device is past the vote; return whether it is.

        After an abort that takes almost no time: the abort ends the collectives.
        """
        deadline = time.monotonic() + self.driver.seconds_to_end()
        while not self.done.query() and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return self.done.query()

    def _set_failure(self, kind: str, message: str, stage: str, **more: Any) -> None:
        seconds = time.monotonic() - self._begin
        self.failure = SimpleNamespace(
            kind=kind, message=message, stage=stage, seconds=seconds, **{**_NO_BLAME, **more}
        )


# ------------------------------------------------------------------------------------------ streams


# Kernels on the side stream get three blocks for each four multiprocessors of a device. On an H200
# that is 99, at most one on each of the 132 multiprocessors, so that most registers stay free for
# the training's kernels. The CUDA reduce then still reads 360 GB/s of four int8 payloads, seven
# times the rate of a NIC of 400 Gbit/s, and slows memory-bound kernels of the training half as much
# as with a full grid. Triton's reduce slows them as much as with a full grid
# (docs/measurements/gpu-kernels.md).
SIDE_SHARE = 4
_REDUCE_BLOCKS = 3


def side_blocks(device: torch.device) -> int:
    """Return the most blocks of a kernel on the side stream; 0 (no bound) on devices but CUDA."""
    if device.type != "cuda":
        return 0
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    return max(1, multiprocessors * _REDUCE_BLOCKS // SIDE_SHARE)


def _grown(buffer: Tensor, size: int) -> Tensor:
    """Return ``buffer`` if it has at least ``size`` elements; else a new one, uninitialised."""
    return buffer if buffer.numel() >= size else buffer.new_empty(size)


class StreamDriver(Connections):
    """Enqueues the exchanges of one replica in one epoch.

    Attributes:
        max_blocks: Most blocks of each kernel on the side stream; Triton's ``encode`` and
            ``decode`` ignore it.
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
        super().__init__(device, group, rank, size, timeout, engine)
        self.impl = impl
        self.max_blocks = side_blocks(device)
        self._encoded: list[torch.Event] = []
        self._staging = torch.empty(0, dtype=torch.uint8, device=device)
        self._values = torch.empty(0, dtype=torch.float32, device=device)  # a decoded mean
        self._works: dict[tuple[str, int], dist.Work] = {}
        self._num_votes = 0

    def reserve(self, buffers: ExchangeBuffers) -> None:
        """Make the staging buffers, which all fragments share, large enough for this fragment."""
        num_values = buffers.layout.run_elements if buffers.reencodes else 0
        # The side stream may still use the old buffers, so free them there.
        with current(self.side):
            self._staging = _grown(self._staging, buffers.staging_bytes)
            self._values = _grown(self._values, num_values)
        while len(self._encoded) < buffers.num_chunks:
            self._encoded.append(torch.Event(self.device))

    # ------------------------------------------------------------------------------ enqueueing

    def enqueue(
        self, buffers: ExchangeBuffers, round: Round, sending: Sending
    ) -> tuple[torch.Event, ...]:
        """Enqueue one exchange; return its events, see ``StreamJob``."""
        return self.post(buffers, round, sending, self.encode(buffers, round, sending))

    def encode(self, buffers: ExchangeBuffers, round: Round, sending: Sending) -> torch.Event:
        """Enqueue the encoding of an exchange on the caller's stream; return its last event."""
        ballot = round.own.ballot
        assert ballot is not None
        here = torch.accelerator.current_stream(self.device)
        ballot.own.zero_()
        self._encode(buffers, round, sending, here)
        ballot.host_bad.copy_(ballot.bad, non_blocking=True)
        ballot.votes.zero_()
        ballot.verdict.fill_(1)
        ready = self.take_event()
        ready.record(here)
        return ready

    def mark(self, buffers: ExchangeBuffers) -> torch.Event:
        """Record on the caller's stream that all chunks are ready from here on; return the event.

        The caller may have changed the payload since ``encode``.
        """
        here = torch.accelerator.current_stream(self.device)
        ready = self.take_event()
        for event in (*self._encoded[: buffers.num_chunks], ready):
            event.record(here)
        return ready

    def post(
        self, buffers: ExchangeBuffers, round: Round, sending: Sending, ready: torch.Event
    ) -> tuple[torch.Event, ...]:
        """Enqueue an exchange after its encoding, which is done at ``ready``; return its events."""
        ballot = round.own.ballot
        assert ballot is not None
        leaving, data, done = (self.take_event() for _ in range(3))
        self.side.wait_event(self._encoded[0])
        leaving.record(self.side)
        plan = buffers.num_chunks, buffers.num_phases, 1, buffers.window
        for action, chunk, _ in _C.make_schedule(*plan):
            with current(self.side):
                if action == "vote":
                    self._digest(buffers, round)
                    data.record(self.side)
                    self.side.wait_event(ready)
                    self._vote(ballot)
                else:
                    getattr(self, f"_{action}")(buffers, round, sending, chunk)
        done.record(self.side)
        return ready, leaving, data, done

    def _encode(
        self, buffers: ExchangeBuffers, round: Round, sending: Sending, here: torch.Stream
    ) -> None:
        layout = buffers.layout
        for chunk in range(buffers.num_chunks):
            begin = layout.run_range(chunk * self.size)[0]
            end = layout.run_range((chunk + 1) * self.size - 1)[1]
            for first, last in sending.pieces(layout, begin, end):
                with sending.outer_of(first, last) as (outer, outer_begin):
                    self._encode_range(buffers, round, sending, outer, outer_begin, first, last)
            self._encoded[chunk].record(here)

    def _encode_range(
        self,
        buffers: ExchangeBuffers,
        round: Round,
        sending: Sending,
        outer: Tensor | None,
        outer_begin: int,
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
            outer_begin=outer_begin,
            impl=self.impl,
        )

    def _chunk(self, layout: Layout, buffer: Tensor, chunk: int) -> Tensor:
        num_bytes = self.size * layout.run_bytes
        return buffer[chunk * num_bytes : (chunk + 1) * num_bytes]

    def _received(self, buffers: ExchangeBuffers, chunk: int) -> Tensor:
        return self._chunk(buffers.layout, self._staging, chunk % buffers.window)

    def _own_run(self, layout: Layout, buffer: Tensor, chunk: int) -> Tensor:
        begin = (chunk * self.size + self.rank) * layout.run_bytes
        return buffer[begin : begin + layout.run_bytes]

    def _post_exchange(
        self, buffers: ExchangeBuffers, round: Round, sending: Sending, chunk: int
    ) -> None:
        assert self.group is not None and round.result is not None
        if chunk > 0:
            self.side.wait_event(self._encoded[chunk])
        own = self._chunk(buffers.layout, round.own.tensor, chunk)
        if buffers.num_phases == 1:
            parts = [self._chunk(buffers.layout, part, chunk) for part in round.received]
            work = self._send_to_all(self.group, parts, own)
        else:
            work = self._send_chunk(self.group, self._received(buffers, chunk), own)
        self._works["exchange", chunk] = work

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
        if buffers.reencodes:
            self._reencode(buffers, round, sending, chunk, end - begin)
            return

        def part(values: Tensor | None) -> Tensor | None:
            first = chunk * layout.run_elements
            return None if values is None else values[first : first + end - begin]

        ops.reduce(
            self._received(buffers, chunk),
            self._own_run(layout, round.result.tensor, chunk),
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

    def _reencode(
        self, buffers: ExchangeBuffers, round: Round, sending: Sending, chunk: int, length: int
    ) -> None:
        """Enqueue the reduction of a run whose mean is encoded on another wire."""
        assert round.result is not None and round.own.ballot is not None
        layout, mean = buffers.layout, buffers.mean_layout
        received = self._received(buffers, chunk)
        result = self._own_run(mean, round.result.tensor, chunk)
        values = self._values[:length]
        ops.decode(
            list(received.split(layout.run_bytes)),
            sending.weights,
            [values],
            0,
            length,
            layout.run_elements,
            layout.wire.name,
            layout.wire.block_size,
            max_blocks=self.max_blocks,
            impl=self.impl,
        )
        ops.encode(
            None,
            [values],
            result,
            0,
            length,
            mean.run_elements,
            mean.wire.name,
            mean.wire.block_size,
            rng_key=sending.reduce_key,
            nonfinite=round.own.ballot.bad_mean,
            max_blocks=self.max_blocks,
            impl=self.impl,
        )

    def _post_publish(
        self, buffers: ExchangeBuffers, round: Round, sending: Sending, chunk: int
    ) -> None:
        assert self.group is not None and round.result is not None
        result = round.result.tensor
        layout = buffers.mean_layout
        own, everyone = self._own_run(layout, result, chunk), self._chunk(layout, result, chunk)
        self._works["publish", chunk] = self.group._allgather_base(everyone, own)

    def _wait_publish(
        self, buffers: ExchangeBuffers, round: Round, sending: Sending, chunk: int
    ) -> None:
        self._works.pop(("publish", chunk)).synchronize()

    def _digest(self, buffers: ExchangeBuffers, round: Round) -> None:
        """Enqueue the digest of the payloads that make the mean, which have come by now."""
        assert round.own.ballot is not None
        if self.size == 1 or round.header.kind == "all_reduce":
            return
        payloads = round.received
        if buffers.num_phases == 1:
            payloads.insert(self.rank, round.own.tensor)
        ballot = round.own.ballot
        ballot.digest.zero_()
        for source, payload in enumerate(payloads):
            for begin, end in buffers.mean_layout.filled():
                first_word = (source * buffers.mean_layout.payload_bytes + begin) // 8
                ops.digest(
                    payload[begin:end],
                    ballot.digest,
                    first_word,
                    max_blocks=self.max_blocks,
                    impl=self.impl,
                )
        ballot.host_digest.copy_(ballot.digest, non_blocking=True)

    def _vote(self, ballot: Ballot) -> None:
        # All ranks vote in the same order, so a vote has the same number, and token, on all ranks.
        self._num_votes += 1
        ballot.token = vote_token(self._num_votes)
        ballot.given_up.copy_(self._given_up, non_blocking=True)
        ballot.host_given_up.copy_(ballot.given_up, non_blocking=True)
        ballot.own.add_(ballot.token).add_(ballot.given_up)
        if self.group is None:
            ballot.votes.copy_(ballot.own)
        else:
            self.group._allgather_base(ballot.votes, ballot.own).synchronize()
        torch.ne(ballot.votes, ballot.token, out=ballot.is_no)
        torch.sum(ballot.is_no, 0, keepdim=True, out=ballot.verdict)
        ballot.given_up.copy_(self._given_up, non_blocking=True)
        ballot.verdict.add_(ballot.given_up)
        ballot.host_votes.copy_(ballot.votes, non_blocking=True)
        ballot.host_verdict.copy_(ballot.verdict, non_blocking=True)
