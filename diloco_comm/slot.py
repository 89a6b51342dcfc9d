"""The persistent buffers of one fragment, and the rounds that use them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, cast

import torch
from torch import Tensor

from . import _C
from .errors import ERRORS, NonFiniteError, PeerLeft, SyncError
from .memory import CPU, Payload
from .residuals import Residuals
from .wire import Layout, WireFormat

if TYPE_CHECKING:
    from .stream_jobs import StreamJob

Kind = Literal["sync", "flush", "all_reduce"]
Terms = list[tuple[Tensor, float]]


# Payload sizes up to which a chunk has so many bytes, as measured by benchmarks/exchange.py --chunk
# at 100 Mbit/s, at 1 Gbit/s and on a loopback.
_CHUNKS = ((3 << 20, 3 << 20), (12 << 20, 512 << 10), (24 << 20, 2 << 20))
_LARGE_CHUNK = 4 << 20
_MANY_ELEMENTS = 16 << 20
_CHUNK_OF_MANY = 16 << 20
_POLL_S = 2e-5
# On streams a chunk costs a few launches and the link is fast; not measured.
_STREAM_CHUNK = 16 << 20


def auto_chunk_bytes(payload_bytes: int, num_elements: int) -> int:
    """Choose the chunk of a payload by a table (benchmarks/exchange.py --chunk).

    Each message wakes a few threads, which costs fast links time; but with large chunks a slow
    link idles while the last is reduced, and the ranks' flows crowd each other out. Work on the
    processors goes by elements, not bytes: many of them make large chunks worth while.
    """
    if num_elements > _MANY_ELEMENTS:
        return _CHUNK_OF_MANY
    for limit, chunk_bytes in _CHUNKS:
        if payload_bytes <= limit:
            return chunk_bytes
    return _LARGE_CHUNK


@dataclass
class Header:
    """What a replica tells the others before an exchange.

    ``weight``, ``inner_step`` and ``gap`` may differ between replicas; everything else, and the
    slot's wire, block size and number of elements, must be equal on all of them.
    """

    kind: Kind = "sync"
    layout_hash: int = 0
    fragment: int = 0
    round: int = 0
    sync_every: int = 0
    num_fragments: int = 1
    weight: float = 1.0
    outer_lr: float = 0.0
    inner_step: int = 0
    gap: float = 1.0


@dataclass
class Outcome:
    """What an exchange gave.

    Attributes:
        terms: (payload uint8 laid out as ``layout``, coefficient): their sum is the weighted mean.
            They are the slot's buffers: a ``start`` after ``commit`` writes into them.
        headers: One a rank.
        weights: Normalised, one a rank, as used.
        verdict: None; or, from ``Pending.offer``, int64 [1] on the device: the round counts if it
            is 0, and until then nobody knows.
        seconds: encode, header, exchange (waiting for messages), reduce, vote, wait (of ``wait()``)
            and total (on the engine thread).
        sent_bytes, received_bytes: Everything this rank sent to and got from its peers.
        counters: Minor page faults of the calling and the engine thread.
    """

    terms: Terms
    layout: Layout
    headers: list[Header]
    weights: list[float]
    seconds: dict[str, float]
    sent_bytes: int
    received_bytes: int
    counters: dict[str, int] = field(default_factory=dict)
    verdict: Tensor | None = None


@dataclass(eq=False)
class Round:
    """One exchange of a slot that is not applied yet: buffers, and how far it is.

    "voted": it failed after this rank's vote, so the terms are complete, and peers that got all
    votes may have applied them.
    """

    header: Header
    layout: Layout
    own: Payload
    result: Payload | None
    state: Literal["started", "agreed", "voted"] = "started"
    terms: Terms = field(default_factory=list)
    epoch: int = 0


class Pending:
    """An exchange under way.

    Attributes:
        payload: Our own encoded values; complete as soon as ``start`` has returned.
        layout: Of the payload.
    """

    def __init__(self, slot: Slot, round: Round, job: _C.Job | StreamJob) -> None:
        self.payload = round.own.tensor
        self.layout = round.layout
        self._slot = slot
        self._round = round
        self._job = job
        self._outcome: Outcome | None = None
        self._error: SyncError | None = None

    @property
    def headers(self) -> list[Header]:
        """Headers of all ranks, in rank order; empty until they have been exchanged."""
        return [from_native(header) for header in self._job.headers]

    def has_bad_values(self) -> bool:
        """Whether our own values were such that no wire carries them.

        On a device, the host asks until it has encoded them.
        """
        while (count := self._job.num_bad_encoded) is None:
            time.sleep(_POLL_S)
        return count > 0

    def done(self) -> bool:
        """Whether ``wait()`` would return, or raise, at once."""
        return self._job.is_done

    def wait(self, timeout: float | None = None) -> Outcome:
        """Wait for the vote and return what the exchange gave.

        On a device, the caller's stream is made to wait until it is there; the host does not.

        Raises:
            ReplicaMismatch, PeerLeft, NonFiniteError, SyncError: There is no result, on no replica
                (after a SyncError at the vote some may have one; ``change_group`` settles it).
            TimeoutError: After ``timeout`` seconds; the exchange goes on.
        """
        if self._error is not None:
            raise self._error
        if self._outcome is None:
            begin = time.perf_counter()
            deadline = None if timeout is None else begin + timeout
            while not self._job.wait(3600.0 if deadline is None else timeout or 0.0):
                if deadline is not None and time.perf_counter() >= deadline:
                    raise TimeoutError(f"the exchange was not done after {timeout} s")
            self._resolve(time.perf_counter() - begin)
        if self._error is not None:
            raise self._error
        assert self._outcome is not None
        self._job.block_caller()
        return self._outcome

    def offer(self) -> Outcome:
        """Return the outcome, with the verdict still open where it is found on the device.

        Who applies it passes the verdict on to the operator, and asks ``wait`` later.

        Raises:
            SyncError: As ``wait``, if it is known by now.
        """
        job = self._job
        if isinstance(job, _C.Job) or self._outcome is not None or self._error is not None:
            return self.wait()
        job.wait_for_headers()
        if job.is_done:
            return self.wait()
        job.block_caller()
        assert self._round.own.ballot is not None
        return Outcome(
            terms=self._slot.terms_of(self._round, job.weights),
            layout=self._round.layout,
            headers=[from_native(header) for header in job.headers],
            weights=list(job.weights),
            seconds={},
            sent_bytes=0,
            received_bytes=0,
            verdict=self._round.own.ballot.verdict,
        )

    def _resolve(self, wait_s: float) -> None:
        job, round = self._job, self._round
        job.block_caller()
        if job.failure is not None:
            self._error = error_from(job.failure, round.header)
            if _has_voted(job):
                round.state = "voted"
                round.terms = self._slot.terms_of(round, job.weights)
            else:
                self._slot.drop(round)
            return
        round.state = "agreed"
        round.terms = self._slot.terms_of(round, job.weights)
        self._slot.residuals.turn(round.header.round)
        counters = dict(job.counters)
        self._outcome = Outcome(
            terms=round.terms,
            layout=round.layout,
            headers=[from_native(header) for header in job.headers],
            weights=list(job.weights),
            seconds={**job.seconds, "encode": job.encode_seconds, "wait": wait_s},
            sent_bytes=counters.pop("sent_bytes"),
            received_bytes=counters.pop("received_bytes"),
            counters=counters,
        )


def _has_voted(job: _C.Job | StreamJob) -> bool:
    """Whether a failed exchange may be applied elsewhere; a job never begun has no weights."""
    failure = job.failure
    assert failure is not None
    return failure.stage == "vote" and failure.kind != "NonFiniteError" and bool(job.weights)


class Slot:
    """Buffers of one fragment, allocated once and reused for ever.

    A round's payloads are free as soon as it is applied or voted down. What a round that failed at
    the vote has left stays as it is until ``settle``.

    Attributes:
        device: Of the fragment. The engine's own buffers are in host memory, page-locked then.
        is_streamed: Its exchanges stay on the device; see ``streams``.
        layout: How payloads are laid out in the current group.
        residuals: What encoding loses; the reduction's have [num_chunks * run_elements]: the runs
            that this rank owns, one after the other, with three ranks and more.
    """

    def __init__(
        self,
        num_elements: int,
        wire: WireFormat,
        *,
        error_feedback: bool = False,
        residual_dtype: torch.dtype = torch.float32,
        carries: bool = False,
        num_under_way: int = 1,
        device: torch.device = CPU,
        is_streamed: bool = False,
    ) -> None:
        if num_elements < 1:
            raise ValueError(f"a slot needs at least one element, got {num_elements}")
        self.num_elements = num_elements
        self.device, self.is_streamed = device, is_streamed
        self.wire = wire
        self.error_feedback = error_feedback
        self.applied_epoch = 0
        self.residuals = Residuals(
            num_elements,
            error_feedback=error_feedback,
            dtype=residual_dtype,
            carries=carries,
            num_under_way=num_under_way,
            device=device,
            reduces_on=device if is_streamed else CPU,
        )
        self._owner: tuple[int, Layout] | None = None
        self._owns: list[Payload] = []
        self._results: list[Payload] = []
        self.rounds: list[Round] = []
        self._owed: list[Round] = []
        self._pendings: list[Pending] = []

    def plan(
        self,
        rank: int,
        world_size: int,
        chunk_bytes: int | None,
        lanes: int,
        window: int,
        impl: str,
    ) -> None:
        """Lay the fragment out for a group.

        Residuals of reductions go on if this rank owns the same runs as before, else they are zero.
        """
        block, wire = self.wire.block_size, self.wire
        payload = Layout.plan(self.num_elements, world_size, 1, wire).payload_bytes
        most = -(-self.num_elements // (world_size * block))
        if self.is_streamed:
            chunk_bytes = chunk_bytes or _STREAM_CHUNK
        chunk_bytes = chunk_bytes or auto_chunk_bytes(payload, self.num_elements)
        num_chunks = max(1, min(round(payload / chunk_bytes), most))
        self.rank, self.world_size, self.num_chunks = rank, world_size, num_chunks
        self.layout = Layout.plan(self.num_elements, world_size, num_chunks, wire)
        layout = self.layout
        # Two ranks send whole payloads, which need no staging: the link gets all there is.
        window = min(window * lanes, num_chunks) if world_size > 2 else num_chunks
        self.window = window
        self.native = _C.Plan(
            layout.num_elements,
            layout.num_runs,
            layout.run_elements,
            layout.run_bytes,
            wire.name,
            block,
            wire.code_offset(layout.run_elements),
            wire.code_bits,
            world_size,
            lanes,
            window,
            impl,
        )
        self.staging_bytes = window * world_size * layout.run_bytes if world_size > 2 else 0
        self._owns = [self._new_payload()]
        self._results = [self._new_payload()] if world_size > 1 else []
        if self._owner == (rank, layout):
            return
        self._owner = (rank, layout)
        self.residuals.plan_reduction(num_chunks * layout.run_elements if world_size > 2 else 0)

    @property
    def residual(self) -> Tensor | None:
        return self.residuals.value

    def open_round(self, header: Header) -> Round:
        """Choose buffers for a new round: none that an earlier round still needs.

        Raises:
            RuntimeError: If error feedback would need the verdict of the round before.
        """
        self._resolve_done()
        is_unsure = self.error_feedback and not self.residuals.carries
        if is_unsure and any(r.state == "started" for r in self.rounds):
            raise RuntimeError("with error feedback, wait() for a round before the next start()")
        own = self._take(self._owns, [r.own for r in (*self.rounds, *self._owed)])
        result = None
        if self.world_size > 1:
            result = self._take(self._results, [r.result for r in self.rounds])
        return Round(header, self.layout, own, result)

    def add_round(self, round: Round, pending: Pending) -> None:
        self.rounds.append(round)
        self._pendings = [p for p in self._pendings if not p._outcome and not p._error]
        self._pendings.append(pending)
        self.residuals.encoded()

    def adopt(self, header: Header, layout: Layout, own: Tensor, terms: Terms) -> None:
        """Take in a round of a saved state, agreed on and not applied."""
        round = Round(header, layout, Payload(own, own), None, "agreed", terms)
        self.rounds.append(round)

    def forget(self) -> None:
        """Drop all rounds and what is owed; no exchange of theirs may be under way."""
        self._resolve_done()
        self.rounds, self._owed, self._pendings = [], [], []
        self.residuals.forget()

    def drop(self, round: Round) -> None:
        """A round is voted down, or its group died before the vote.

        With ``carries`` nobody else has what it held: the payload stays until ``release``.
        """
        self.rounds.remove(round)
        if self.residuals.carries:
            self._owed.append(round)

    def release(self, own: Tensor) -> None:
        """Say that what the own payload of a dropped round held is owed: its buffer is free."""
        self._owed = [round for round in self._owed if round.own.tensor is not own]

    def commit(self) -> None:
        """Say that the oldest round agreed on is applied: its buffers are free.

        Raises:
            RuntimeError: If no round has been agreed on.
        """
        self._resolve_done()
        for round in self.rounds:
            if round.state == "agreed":
                self.rounds.remove(round)
                self.applied_epoch = max(self.applied_epoch, round.epoch)
                return
        raise RuntimeError("commit: no round of this slot has been agreed on; wait() first")

    @property
    def voted_epoch(self) -> int:
        """The newest epoch where a round of ours was applied, or may have been by others."""
        self._resolve_done()
        voted = [round.epoch for round in self.rounds if round.state != "started"]
        return max([self.applied_epoch, *voted])

    def held(self, fragment: int, number: int) -> Round | None:
        """Return a round that is not applied, but whose terms are complete, or None."""
        self._resolve_done()
        for round in self.rounds:
            here = (round.header.fragment, round.header.round)
            if here == (fragment, number) and round.state != "started":
                return round
        return None

    def settle(self, applied: Sequence[Round]) -> None:
        """End the rounds of a former group: those in ``applied`` count, the others never were.

        No exchange of theirs may be under way.
        """
        self._resolve_done()
        for round in self.rounds:
            # What encoding lost is owed to the next round if, and only if, this one is applied.
            if (round.state == "agreed") != (round in applied):
                self.residuals.turn(round.header.round)
        self.rounds, self._owed = [], []

    def terms_of(self, round: Round, weights: list[float]) -> Terms:
        own = round.own.tensor
        if round.result is None:
            return [(own, 1.0)]
        result = round.result.tensor
        if len(weights) > 2:
            return [(result, 1.0)]
        payloads = [own, result] if self.rank == 0 else [result, own]
        return list(zip(payloads, weights, strict=True))

    def _resolve_done(self) -> None:
        for pending in self._pendings:
            if pending._outcome is None and pending._error is None and pending.done():
                pending._resolve(0.0)

    def _take(self, pool: list[Payload], busy: list[Payload | None]) -> Payload:
        for buffer in pool:
            if not any(buffer is other for other in busy):
                return buffer
        pool.append(self._new_payload())
        return pool[-1]

    def _new_payload(self) -> Payload:
        voters = self.world_size if self.is_streamed else 0
        return Payload.make(self.layout.payload_bytes, self.device, voters=voters)


def to_native(header: Header, slot: Slot, stochastic: bool) -> _C.Header:
    native = _C.Header(header.kind)
    for name in ("fragment", "round", "sync_every", "num_fragments", "inner_step"):
        setattr(native, name, getattr(header, name))
    native.layout_hash = header.layout_hash & (1 << 64) - 1
    native.weight, native.outer_lr = float(header.weight), float(header.outer_lr)
    native.gap = float(header.gap)
    native.wire, native.block_size = slot.wire.name, slot.wire.block_size
    native.num_elements, native.num_chunks = slot.num_elements, slot.num_chunks
    native.flags = int(stochastic)
    return native


def from_native(native: _C.Header | Header) -> Header:
    return Header(
        kind=cast(Kind, native.kind),
        layout_hash=native.layout_hash,
        fragment=native.fragment,
        round=native.round,
        sync_every=native.sync_every,
        num_fragments=native.num_fragments,
        weight=native.weight,
        outer_lr=native.outer_lr,
        inner_step=native.inner_step,
        gap=native.gap,
    )


def error_from(failure: _C.Failure, header: Header | None = None) -> SyncError:
    """Make the exception that a failed job stands for."""
    error = ERRORS[failure.kind](
        failure.message,
        fragment=-1 if header is None or header.kind == "all_reduce" else header.fragment,
        round=-1 if header is None or header.kind == "all_reduce" else header.round,
        stage=failure.stage,
        seconds=failure.seconds,
        missing=failure.missing,
    )
    if isinstance(error, PeerLeft | NonFiniteError):
        error.replicas = tuple(failure.replicas)
    if isinstance(error, PeerLeft):
        error.inner_steps = tuple(failure.inner_steps)
    return error
