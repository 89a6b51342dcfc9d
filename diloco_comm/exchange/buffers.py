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

# Payload sizes up to which a chunk has so many bytes, measured by
# benchmarks/exchange/all_reduce.py --chunk at 100 Mbit/s, at 1 Gbit/s and on a loopback.
_CHUNKS = ((3 << 20, 3 << 20), (12 << 20, 768 << 10), (24 << 20, 1536 << 10))
_LARGE_CHUNK = 4 << 20
_MANY_ELEMENTS = 16 << 20
_CHUNK_OF_MANY = 8 << 20
# Elements of a chunk on a wire below four bits. Its payload is short: a chunk by bytes would hold
# all elements, and encoding, reducing and decoding would come before and after what travels.
_ELEMENTS_OF_SHORT = 1 << 20
_SHORT_BITS = 4
# On streams a chunk costs a few launches and the link is fast; not measured.
_STREAM_CHUNK = 16 << 20


class ExchangeBuffers:
    """Buffers of one fragment: ``plan`` makes them for a group, whose rounds reuse them.

    A round's payloads are free once the round is applied or rejected. After this replica's vote
    they stay as they are until the other votes, or ``settle``, end the round.

    Attributes:
        device: The fragment's. On a GPU, the engine's own buffers are in page-locked host memory.
        is_streamed: Its exchanges stay on the device; see ``streams``.
        layout: How payloads are laid out in the current group.
        mean_layout: How the payloads of a mean are: as ``layout``, but where owners of runs encode
            the mean on a wire of its own (``phases``).
        num_phases: 0 for one rank; 1: all payloads go to all ranks; 2: runs are reduced by their
            owners, then gathered.
        residuals: Values that encoding loses. With two phases, the residuals of the reduction have
            [num_chunks * run_elements]: the runs that this rank owns, in order.
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
        """Lay the fragment out for a group.

        Residuals of reductions go on if this rank owns the same runs as before, else they are zero.

        Raises:
            ValueError: If chunk_bytes would make more chunks than an exchange may have.
        """
        wire = self.wire
        self.num_phases = num_phases(wire, world_size, must_gather=self._must_gather)
        reduces = self.num_phases == 2
        whole = Layout.plan(self.num_elements, world_size, 1, wire)
        # The mean of short payloads may be longer than these are.
        payload = mean_layout(whole, world_size, must_gather=self._must_gather).payload_bytes
        most = -(-self.num_elements // (world_size * wire.block_size))
        chunk_bytes = chunk_bytes or _auto_chunk_bytes(payload, self.num_elements, self.is_streamed)
        num_chunks = max(1, min(round(payload / chunk_bytes), most))
        self.rank, self.world_size, self.num_chunks = rank, world_size, num_chunks
        self.layout = Layout.plan(self.num_elements, world_size, num_chunks, wire)
        layout = self.layout
        self.mean_layout = mean_layout(layout, world_size, must_gather=self._must_gather)
        # Whole payloads need no staging: the link gets all there is.
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
        # Groups of other sizes may have equal layouts, with other owners.
        owner = rank, world_size, layout
        if self._owner == owner:
            return
        self._owner = owner
        # Where owners encode the mean on another wire than the payloads, the rounding errors of
        # that encoding are not kept.
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
        """Choose buffers for a new round that no earlier round still needs.

        Raises:
            RuntimeError: If error feedback would need the verdict of the round before.
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
        """Take in a round whose payload is encoded, or is being encoded."""
        self.rounds.append(round)
        self._ended.pop(round.key, None)
        if self.residuals.is_kept:
            self.residuals.encoded()

    def adopt(
        self, header: Header, layout: Layout, own: Tensor, mean_layout: Layout, terms: Terms
    ) -> None:
        """Take in a round of a saved state, which is agreed and not applied."""
        lost, payload = self.residuals, Payload(own, own)
        round = Round(header, layout, mean_layout, 0, payload, None, lost, "agreed", terms)
        self.rounds.append(round)

    def forget(self) -> None:
        """Forget all rounds, and the lost values that residuals have yet to add.

        No exchange of these rounds may be under way.
        """
        self._sweep()
        self.rounds, self._owed = [], []
        self._ended = {}
        self.residuals.forget()

    def _sweep(self) -> None:
        """Take over how exchanges that are done have ended; drop rounds that no replica applies.

        With ``carries`` the payload of a dropped round alone holds what was sent: it stays until
        ``release``.
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
        """Free the own payload of a dropped round: the residuals have its values now."""
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
        """Use buffers that ``take_out`` gave away for later rounds, if they still fit."""
        sizes = {self.layout.payload_bytes, self._result_bytes}
        self._spares += [payload for payload in payloads if payload.tensor.numel() in sizes]

    def _end(self, round: Round, state: Literal["applied", "rejected"]) -> None:
        """End a round, and remember how, for replicas that are behind."""
        if round.state != state:
            round.advance(state)
        if round.header.kind == "all_reduce":
            return
        self._ended.pop(round.key, None)
        self._ended[round.key] = Standing(state, round.epoch)
        # As many as another replica may be behind.
        while len(self._ended) > self.num_under_way + 1:
            del self._ended[next(iter(self._ended))]

    @property
    def is_idle(self) -> bool:
        """Whether every exchange that was started has ended."""
        return all(round.done() for round in self.rounds)

    def standings(self) -> dict[tuple[int, int], Standing]:
        """Say how far this replica is with its latest rounds; see ``termination``.

        No exchange of these rounds may be under way.

        Returns:
            By fragment and number; rounds that are not named have no vote, or ended before.
        """
        held = self._held()
        standings = dict(self._ended)
        for round in held:
            assert round.state == "voted" or round.state == "agreed"
            standings[round.key] = Standing(round.state, round.epoch)
        return standings

    def held(self, fragment: int, number: int) -> Round | None:
        """Return a round that is not applied, but whose terms are complete, or None."""
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
            # The next round adds what encoding lost if, and only if, this round is applied.
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
    """Choose the chunk of a payload by a table (benchmarks/exchange/all_reduce.py --chunk).

    Each message wakes a few threads, which costs fast links time; but with large chunks a slow
    link idles while the last is reduced, and the ranks' flows crowd each other out. Work on the
    processors goes by elements, not bytes: many of them make large chunks worth while.
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
