"""The persistent buffers of one fragment, and the rounds that use them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import _C
from ..base.memory import CPU, Payload
from ..ops.residuals import Residuals
from ..ops.wire import Layout, WireFormat
from .headers import Header
from .membership.termination import Standing, State
from .work import ExchangeWork, Round, Terms

# Payload sizes up to which a chunk has so many bytes, measured by
# benchmarks/exchange/all_reduce.py --chunk
# at 100 Mbit/s, at 1 Gbit/s and on a loopback.
_CHUNKS = ((3 << 20, 3 << 20), (12 << 20, 768 << 10), (24 << 20, 1536 << 10))
_LARGE_CHUNK = 4 << 20
_MANY_ELEMENTS = 16 << 20
_CHUNK_OF_MANY = 8 << 20
# On streams a chunk costs a few launches and the link is fast; not measured.
_STREAM_CHUNK = 16 << 20


def auto_chunk_bytes(payload_bytes: int, num_elements: int) -> int:
    """Choose the chunk of a payload by a table (benchmarks/exchange/all_reduce.py --chunk).

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


class ExchangeBuffers:
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
            raise ValueError(f"buffers need at least one element, got {num_elements}")
        self.num_elements = num_elements
        self.device, self.is_streamed = device, is_streamed
        self.wire = wire
        self.error_feedback = error_feedback
        self.applied_epoch = 0
        self.num_under_way = num_under_way
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
        self._ended: dict[tuple[int, int], Standing] = {}
        self._works: list[ExchangeWork] = []

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

        Raises:
            ValueError: If chunk_bytes would make more chunks than an exchange may have.
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

    def add_round(self, round: Round, work: ExchangeWork) -> None:
        self.rounds.append(round)
        self._ended.pop(_key(round), None)
        self._works = [p for p in self._works if not p._outcome and not p._error]
        self._works.append(work)
        self.residuals.encoded()

    def adopt(self, header: Header, layout: Layout, own: Tensor, terms: Terms) -> None:
        """Take in a round of a saved state, agreed on and not applied."""
        round = Round(header, layout, Payload(own, own), None, "agreed", terms)
        self.rounds.append(round)

    def forget(self) -> None:
        """Drop all rounds and what is owed; no exchange of theirs may be under way."""
        self._resolve_done()
        self.rounds, self._owed, self._works = [], [], []
        self._ended = {}
        self.residuals.forget()

    def drop(self, round: Round, *, is_rejected: bool = False) -> None:
        """A round is voted down (``is_rejected``), or its group died before the vote.

        With ``carries`` nobody else has what it held: the payload stays until ``release``.
        """
        self.rounds.remove(round)
        if is_rejected:
            self._end(round, "rejected")
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
                self._end(round, "applied")
                return
        raise RuntimeError("commit: no round of these buffers has been agreed on; wait() first")

    def _end(self, round: Round, state: State) -> None:
        if round.header.kind == "all_reduce":
            return
        if state == "applied":
            self.applied_epoch = max(self.applied_epoch, round.epoch)
        self._ended.pop(_key(round), None)
        self._ended[_key(round)] = Standing(state, round.epoch)
        # As many as another replica may be behind.
        while len(self._ended) > self.num_under_way + 1:
            del self._ended[next(iter(self._ended))]

    @property
    def is_idle(self) -> bool:
        """Whether every exchange that was started has ended."""
        return all(work.done() for work in self._works)

    def standings(self) -> dict[tuple[int, int], Standing]:
        """Say how far this replica is with its latest rounds; see ``termination``.

        No exchange of theirs may be under way.

        Returns:
            By fragment and number; rounds that are not named have no vote, or ended before.
        """
        standings = dict(self._ended)
        for round in self._held():
            assert round.state != "started"
            standings[_key(round)] = Standing(round.state, round.epoch)
        return standings

    def held(self, fragment: int, number: int) -> Round | None:
        """Return a round that is not applied, but whose terms are complete, or None."""
        return next((r for r in self._held() if _key(r) == (fragment, number)), None)

    def _held(self) -> list[Round]:
        self._resolve_done()
        return [
            round
            for round in self.rounds
            if round.state != "started" and round.header.kind != "all_reduce"
        ]

    def settle(self, applied: Sequence[Round]) -> None:
        """End the rounds of a former group: those in ``applied`` count, the others never were.

        No exchange of theirs may be under way.
        """
        self._resolve_done()
        for round in self.rounds:
            # What encoding lost is owed to the next round if, and only if, this one is applied.
            if (round.state == "agreed") != (round in applied):
                self.residuals.turn(round.header.round)
            if round in applied:
                self._end(round, "applied")
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
        for work in self._works:
            if work._outcome is None and work._error is None and work.done():
                work._resolve(0.0)

    def _take(self, pool: list[Payload], busy: list[Payload | None]) -> Payload:
        for buffer in pool:
            if not any(buffer is other for other in busy):
                return buffer
        pool.append(self._new_payload())
        return pool[-1]

    def _new_payload(self) -> Payload:
        voters = self.world_size if self.is_streamed else 0
        return Payload.make(self.layout.payload_bytes, self.device, voters=voters)


def _key(round: Round) -> tuple[int, int]:
    return round.header.fragment, round.header.round
