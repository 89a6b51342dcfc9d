"""The persistent buffers of one fragment, and the rounds that use them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from .. import _C
from ..base.memory import CPU, Payload
from ..ops.residuals import Residuals
from ..ops.wire import Layout, WireFormat, mean_layout, num_phases
from ..ops.wire_options import check_options
from .round import Header, Round, Standing, Terms

# Pairs: for payloads up to the first number of bytes, a chunk has the second number. Measured by
# benchmarks/exchange/all_reduce.py --chunk at 100 Mbit/s, at 1 Gbit/s and on a loopback.
_CHUNKS = ((3 << 20, 3 << 20), (12 << 20, 768 << 10), (24 << 20, 1536 << 10))
_LARGE_CHUNK = 4 << 20
_MANY_ELEMENTS = 16 << 20
_CHUNK_OF_MANY = 8 << 20
# Elements of a chunk on a wire of less than four bits. Payloads are so short there that one chunk,
# sized by bytes, could hold all elements. Then no work would overlap with the transfer.
_ELEMENTS_OF_SHORT = 1 << 20
_SHORT_BITS = 4
# Bytes of a chunk on streams (NCCL): many, as each chunk costs a few launches of kernels, and the
# link is fast. Not measured.
_STREAM_CHUNK = 16 << 20


class ExchangeBuffers:
    """Buffers of one fragment: ``plan`` makes them for a group, whose rounds reuse them.

    A round's payloads are free once the round is applied or rejected; with ``carries``, the own
    payload of a rejected round only after ``release``. After this replica's vote payloads stay
    unchanged until the other votes, or ``settle``, end the round.

    Attributes:
        device: The fragment's device. For a GPU, the engine's own buffers are in page-locked host
            memory.
        is_streamed: The exchanges of this fragment stay on the device; see ``nccl.streams``.
        layout: The layout of payloads in the current group.
        mean_layout: The layout of a mean's payloads. It differs from ``layout`` only where the
            owners of runs encode the mean on another wire (``ops.wire.mean_layout``).
        num_phases: 0 for one rank; 1: all payloads go to all ranks; 2: the owner of each run
            reduces it, and the results are gathered.
        residuals: Rounding errors, which later rounds add. With two phases, the residuals of the
            reduction have [num_chunks * run_elements]: the runs that this rank owns, in order.
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
        must_gather: bool = False,
        device: torch.device = CPU,
        is_streamed: bool = False,
    ) -> None:
        if num_elements < 1:
            raise ValueError(f"buffers need at least one element, got {num_elements}")
        check_options(wire, error_feedback=error_feedback)
        self.num_elements = num_elements
        self.device, self.is_streamed = device, is_streamed
        self.wire = wire
        self.error_feedback = error_feedback
        self.num_under_way, self._must_gather = num_under_way, must_gather
        self.residuals = Residuals(
            num_elements,
            error_feedback=error_feedback,
            dtype=residual_dtype,
            carries=carries,
            decay=wire.feedback_decay,
            num_under_way=num_under_way,
            device=device,
            reduces_on=device if is_streamed else CPU,
        )
        self._owner: tuple[int, int, Layout] | None = None
        self._owns: list[Payload] = []
        self._results: list[Payload] = []
        self._spares: list[Payload] = []
        self.rounds: list[Round] = []
        self._owed: list[Round] = []
        self._ended: dict[tuple[int, int], Standing] = {}

    def plan(
        self,
        rank: int,
        world_size: int,
        chunk_bytes: int | None,
        lanes: int,
        window: int,
        impl: str,
    ) -> None:
        """Choose layouts and make buffers for a group; the arguments are as for ``Exchange``.

        Residuals of reductions are kept if this rank owns the same runs as before; else they are
        set to zero.

        Raises:
            ValueError: If chunk_bytes would make more chunks than an exchange may have.
        """
        wire = self.wire
        self.num_phases = num_phases(wire, world_size, must_gather=self._must_gather)
        reduces = self.num_phases == 2
        whole = Layout.plan(self.num_elements, world_size, 1, wire)
        # On a sparse wire the mean may be longer than a replica's payload.
        payload = mean_layout(whole, world_size, must_gather=self._must_gather).payload_bytes
        most = -(-self.num_elements // (world_size * wire.block_size))
        chunk_bytes = chunk_bytes or _auto_chunk_bytes(payload, self.num_elements, self.is_streamed)
        num_chunks = max(1, min(round(payload / chunk_bytes), most))
        self.rank, self.world_size, self.num_chunks = rank, world_size, num_chunks
        self.layout = Layout.plan(self.num_elements, world_size, num_chunks, wire)
        layout = self.layout
        self.mean_layout = mean_layout(layout, world_size, must_gather=self._must_gather)
        # With one phase, payloads need no staging: all chunks may travel at once.
        window = min(window * lanes, num_chunks) if reduces else num_chunks
        self.window = window
        self.native = _C.Plan(
            _native(layout),
            _native(self.mean_layout),
            world_size,
            self.num_phases,
            lanes,
            window,
            impl,
        )
        self.staging_bytes = window * world_size * layout.run_bytes if reduces else 0
        # The own payload is not received; a mean is one payload.
        num_received = min(world_size - 1, 1) if reduces else world_size - 1
        self._result_bytes = num_received * self.mean_layout.payload_bytes
        self._spares = []
        self._owns = [self._make(layout.payload_bytes)]
        self._results = [self._make(self._result_bytes)] if world_size > 1 else []
        # Compare rank and size, too: an equal layout may divide the runs among other owners.
        owner = rank, world_size, layout
        if self._owner == owner:
            return
        self._owner = owner
        # If owners encode the mean on another wire, the errors of this encoding are not kept.
        keeps_errors = reduces and not self.reencodes
        self.residuals.plan_reduction(num_chunks * layout.run_elements if keeps_errors else 0)

    @property
    def residual(self) -> Tensor | None:
        return self.residuals.value

    @property
    def reencodes(self) -> bool:
        """Whether owners of runs encode the mean on another wire than the payloads."""
        return self.mean_layout != self.layout

    def open_round(self, header: Header) -> Round:
        """Return a new round, with buffers that no earlier round still needs.

        Raises:
            RuntimeError: If error feedback is on without ``carries``, and an earlier round has not
                ended: its residual is not known.
        """
        self._sweep()
        is_unsure = self.error_feedback and not self.residuals.carries
        if is_unsure and any(r.state == "started" for r in self.rounds):
            raise RuntimeError("with error feedback, wait() for a round before the next start()")
        busy: list[Payload | None] = [r.own for r in self._owed]
        for r in self.rounds:
            busy += r.own, r.result
        own = self._take(self._owns, busy, self.layout.payload_bytes)
        result = None
        if self.world_size > 1:
            result = self._take(self._results, busy, self._result_bytes)
        layouts = self.layout, self.mean_layout
        return Round(header, *layouts, self.num_phases, own, result, self.residuals, rank=self.rank)

    def add_round(self, round: Round) -> None:
        """Keep a round, whose encoding has begun, among the rounds of this fragment."""
        self.rounds.append(round)
        self._ended.pop(round.key, None)
        if self.residuals.is_kept:
            self.residuals.encoded()

    def adopt(
        self, header: Header, layout: Layout, own: Tensor, mean_layout: Layout, terms: Terms
    ) -> None:
        """Keep a round from a checkpoint that was agreed on, and has yet to be applied."""
        lost, payload = self.residuals, Payload(own, own)
        round = Round(header, layout, mean_layout, 0, payload, None, lost, "agreed", terms)
        self.rounds.append(round)

    def forget(self) -> None:
        """Forget all rounds, and what is owed; no exchange of these rounds may be under way."""
        self._sweep()
        self.rounds, self._owed = [], []
        self._ended = {}
        self.residuals.forget()

    def _sweep(self) -> None:
        """Resolve rounds whose exchanges are done, and drop rounds that no replica applies.

        With ``carries``, the values of a dropped round are in its payload alone, so this payload
        stays until ``release``.
        """
        for round in self.rounds[:]:
            if round.state == "started" and round.done():
                round.resolve()
            if round.state == "rejected" or round.state == "failed":
                self.rounds.remove(round)
                if round.state == "rejected":
                    self._end(round, "rejected")
                if self.residuals.carries:
                    self._owed.append(round)

    def release(self, own: Tensor) -> None:
        """Free ``own``, the payload of a dropped round, as the residuals have its values now."""
        self._sweep()
        self._owed = [round for round in self._owed if round.own.tensor is not own]

    def commit(self) -> None:
        """Note that the oldest agreed round is applied: its buffers are free.

        Raises:
            RuntimeError: If no round has been agreed on.
        """
        self._sweep()
        for round in self.rounds:
            if round.state == "agreed":
                self.rounds.remove(round)
                self._end(round, "applied")
                return
        raise RuntimeError("commit: no round of these buffers has been agreed on; wait() first")

    def take_out(self, tensors: Sequence[Tensor]) -> list[Payload]:
        """Give the caller the buffers in which these payloads lie; later rounds use others.

        No round that is under way may hold these payloads.
        """
        wanted = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        taken: list[Payload] = []
        for pool in (self._owns, self._results):
            for payload in list(pool):
                if payload.tensor.untyped_storage().data_ptr() in wanted:
                    pool.remove(payload)
                    taken.append(payload)
        return taken

    def put_back(self, payloads: Sequence[Payload]) -> None:
        """Take back buffers that ``take_out`` gave away; later rounds use those that still fit."""
        sizes = {self.layout.payload_bytes, self._result_bytes}
        self._spares += [payload for payload in payloads if payload.tensor.numel() in sizes]

    def _end(self, round: Round, state: Literal["applied", "rejected"]) -> None:
        """End a round, and remember how it ended, for the next change of the group."""
        if round.state != state:
            round.advance(state)
        if round.header.kind == "all_reduce":
            return
        self._ended.pop(round.key, None)
        self._ended[round.key] = Standing(state, round.epoch)
        # Another replica is at most so many rounds behind.
        while len(self._ended) > self.num_under_way + 1:
            del self._ended[next(iter(self._ended))]

    @property
    def is_idle(self) -> bool:
        """Whether every exchange that was started has ended."""
        return all(round.done() for round in self.rounds)

    def standings(self) -> dict[tuple[int, int], Standing]:
        """Return how far this replica is with its latest rounds, for a change of the group.

        No exchange of these rounds may be under way.

        Returns:
            By fragment and number of the round. A round that is missing here has no vote of this
            replica, or ended long before.
        """
        held = self._held()
        standings = dict(self._ended)
        for round in held:
            assert round.state == "voted" or round.state == "agreed"
            standings[round.key] = Standing(round.state, round.epoch)
        return standings

    def held(self, fragment: int, number: int) -> Round | None:
        """Return a round that is agreed or voted and not applied, by its number; else None."""
        return next((r for r in self._held() if r.key == (fragment, number)), None)

    def _held(self) -> list[Round]:
        self._sweep()
        return [
            round
            for round in self.rounds
            if round.state != "started" and round.header.kind != "all_reduce"
        ]

    def settle(self, applied: Sequence[Round]) -> None:
        """End the rounds of a former group: ``applied`` count, all others are forgotten.

        No exchange of these rounds may be under way.
        """
        self._sweep()
        for round in self.rounds:
            # Only an agreed round has swapped the residuals. Swap them now for a voted round that
            # is applied, and back for an agreed round that is forgotten.
            if (round.state == "agreed") != (round in applied):
                self.residuals.turn(round.header.round)
            if round in applied:
                self._end(round, "applied")
        self.rounds, self._owed = [], []

    def _take(self, pool: list[Payload], busy: Sequence[Payload | None], size: int) -> Payload:
        for buffer in pool:
            if buffer not in busy:
                return buffer
        pool.append(self._spare(size) or self._make(size))
        return pool[-1]

    def _spare(self, size: int) -> Payload | None:
        for index, spare in enumerate(self._spares):
            if spare.tensor.numel() == size:
                return self._spares.pop(index)
        return None

    def _make(self, size: int) -> Payload:
        voters = self.world_size if self.is_streamed else 0
        return Payload.make(size, self.device, voters=voters)


def _native(layout: Layout) -> _C.Layout:
    wire = layout.wire
    return _C.Layout(
        layout.num_elements,
        layout.num_runs,
        layout.run_elements,
        layout.run_bytes,
        wire.name,
        wire.block_size,
        wire.code_offset(layout.run_elements),
        wire.code_unit,
    )


def _auto_chunk_bytes(payload_bytes: int, num_elements: int, is_streamed: bool) -> int:
    """Return the chunk's bytes for a payload, from measured tables.

    Each message wakes a few threads, so small chunks cost time on a fast link. With large chunks a
    slow link idles while the last one is reduced, and the ranks' flows crowd each other out. The
    processors' work grows with elements, not bytes: fragments of many elements use large chunks.
    """
    if is_streamed:
        return _STREAM_CHUNK
    if 8 * payload_bytes < _SHORT_BITS * num_elements:
        return max(1, payload_bytes * _ELEMENTS_OF_SHORT // num_elements)
    if num_elements > _MANY_ELEMENTS:
        return _CHUNK_OF_MANY
    for limit, chunk_bytes in _CHUNKS:
        if payload_bytes <= limit:
            return chunk_bytes
    return _LARGE_CHUNK
