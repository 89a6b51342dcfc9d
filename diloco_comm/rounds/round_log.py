"""The latest rounds that this replica has applied, for replicas that join.

A replica that joins has copied the outer state as it was some rounds ago. It takes the outer steps
of these rounds again, from the payloads in this log. The operators and their arguments are the same
as on the other replicas, so the bits are the same.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field

import torch
from torch import Tensor

from .. import _C
from ..base.memory import Payload
from ..exchange.round import Mean
from ..methods.outer import Update
from ..ops.wire import Layout, WireFormat
from .part import SyncedFragment, SyncedPart


@dataclass(frozen=True)
class LoggedRound:
    """The inputs of one outer step, besides the state before the step.

    Attributes:
        before, after: History of the fragment before and after the round; see ``history``.
        num_steps: Outer steps before this one.
        coefficients: One for each payload.
        num_runs, run_elements, wire, block_size: The layout of the payloads.
        num_bytes: Bytes of all payloads together.
    """

    fragment: int
    number: int
    before: int
    after: int
    num_steps: int
    outer_lr: float
    coefficients: tuple[float, ...]
    num_runs: int
    run_elements: int
    wire: str
    block_size: int
    num_bytes: int


@dataclass(frozen=True, eq=False)
class _Kept:
    """A round with its payloads in host memory, which are ``entry.num_bytes`` together.

    Attributes:
        buffers: The exchange's buffers that hold the payloads; none if they are a copy.
    """

    entry: LoggedRound
    payloads: list[Tensor]
    buffers: list[Payload] = field(default_factory=list)


@dataclass(frozen=True)
class Standing:
    """Where a fragment's outer state is.

    Attributes:
        round: Number of the next round.
        history: See ``history``.
        num_steps: Outer steps taken.
    """

    round: int
    history: int
    num_steps: int

    @classmethod
    def of(cls, part: SyncedFragment) -> Standing:
        return cls(part.round, part.history, part.state.num_steps)

    def numbers(self) -> tuple[int, int, int]:
        return self.round, self.history, self.num_steps


class RoundLog:
    """The payloads of the latest rounds, in host memory, and a guard of the live outer state.

    Args:
        max_bytes: Most bytes of payloads. The oldest rounds of a fragment give way to its new ones.
            After a round that is larger than this by itself, the log is empty.
        source: Hands state and rounds to replicas that join, on another thread.
    """

    def __init__(self, max_bytes: int, source: _C.StateSource | None = None) -> None:
        self.max_bytes, self._source = max_bytes, source
        self.num_bytes = 0
        self._rounds: OrderedDict[tuple[int, int], _Kept] = OrderedDict()

    @contextmanager
    def writing(self, part: SyncedPart) -> Iterator[None]:
        """Run a block that changes the outer state of a part, or its numbers."""
        if self._source is None or not isinstance(part, SyncedFragment):
            yield
            return
        self._source.begin_write(part.index)
        try:
            yield
        finally:
            self._source.end_write(part.index, Standing.of(part).numbers())

    def add(self, part: SyncedPart, number: int, before: int, mean: Mean) -> None:
        """Keep a round that was just applied; ``before`` is the history before the round."""
        if not isinstance(part, SyncedFragment):
            return
        size = sum(payload.numel() for payload, _ in mean.terms)
        entry = LoggedRound(
            part.index,
            number,
            before,
            part.history,
            part.state.num_steps - 1,
            mean.headers[0].outer_lr,
            tuple(coefficient for _, coefficient in mean.terms),
            mean.layout.num_runs,
            mean.layout.run_elements,
            mean.layout.wire.name,
            mean.layout.wire.block_size,
            size,
        )
        old = self._make_room(part.index, size)
        if size > self.max_bytes:
            return
        keep = self._copy_to_host if part.device.type == "cuda" else self._take_over
        kept = self._rounds[part.index, number] = keep(entry, part, mean, old)
        self.num_bytes += size
        if self._source is not None:
            self._source.add(part.index, number, json.dumps(astuple(entry)), kept.payloads)

    def _make_room(self, fragment: int, size: int) -> list[_Kept]:
        """Forget rounds until ``size`` bytes have room; return this fragment's."""
        old = []
        while self._rounds and self.num_bytes + size > self.max_bytes:
            # A fragment's own rounds first: their memory has the size of the new round.
            key = next(
                (key for key in self._rounds if key[0] == fragment), next(iter(self._rounds))
            )
            kept = self._rounds.pop(key)
            if self._source is not None:
                self._source.remove(*key)
            self.num_bytes -= kept.entry.num_bytes
            if key[0] == fragment:
                old.append(kept)
        return old

    def _take_over(
        self, entry: LoggedRound, part: SyncedFragment, mean: Mean, old: Sequence[_Kept]
    ) -> _Kept:
        """Keep the payloads where they are; the next exchange writes into an old round's."""
        kept = _Kept(entry, [payload for payload, _ in mean.terms])
        if part.buffers is not None:
            kept.buffers.extend(part.buffers.take_out(kept.payloads))
            part.buffers.put_back([buffer for former in old for buffer in former.buffers])
        return kept

    def _copy_to_host(
        self, entry: LoggedRound, part: SyncedFragment, mean: Mean, old: Sequence[_Kept]
    ) -> _Kept:
        # New pages cost more than the copy.
        spare = (kept.payloads[0] for kept in old if kept.entry.num_bytes == entry.num_bytes)
        host = next(spare, None)
        if host is None:
            host = torch.empty(entry.num_bytes, dtype=torch.uint8, pin_memory=True)
        offset = 0
        for payload, _ in mean.terms:
            host[offset : offset + payload.numel()].copy_(payload, non_blocking=True)
            offset += payload.numel()
        return _Kept(entry, [host])

    def rounds(self) -> list[LoggedRound]:
        """Return the rounds that the log holds, oldest first."""
        return [kept.entry for kept in self._rounds.values()]

    def payloads(self, fragment: int, number: int) -> list[Tensor]:
        """Return the payloads of a round, uint8; their memory is used again later."""
        return self._rounds[fragment, number].payloads


def state_tensors(part: SyncedFragment) -> list[Tensor]:
    """Return outer parameters and buffers of a fragment, fp32 [num_elements] each, in order."""
    return [part.state.outer, *(tensor for _, tensor in sorted(part.state.tensors().items()))]


def can_replay(parts: Sequence[SyncedPart]) -> bool:
    """Whether outer steps on these parts give the same bits when they are taken again.

    The fused optimizers do, with their state where the parameters are.
    """
    fragments = [part for part in parts if isinstance(part, SyncedFragment)]
    return all(part.state.takes_verdict and part.loader is None for part in fragments)


def replay(part: SyncedFragment, entry: LoggedRound, payloads: Tensor, impl: str = "") -> None:
    """Take the outer step of a logged round on a fragment that stands right before the round.

    The local parameters stay as they are.

    Args:
        payloads: uint8 [``entry.num_bytes``], in host memory: all payloads, one after the other.

    Raises:
        ValueError: If the fragment stands elsewhere, or the entry does not fit the fragment.
    """
    standing = Standing.of(part)
    if standing != Standing(entry.number, entry.before, entry.num_steps):
        raise ValueError(
            f"round {entry.number} of fragment {entry.fragment} does not follow {standing}"
        )
    wire = WireFormat(entry.wire, entry.block_size)
    layout = Layout(part.num_elements, entry.num_runs, entry.run_elements, wire)
    if payloads.numel() != layout.payload_bytes * len(entry.coefficients):
        raise ValueError(
            f"round {entry.number} of fragment {entry.fragment} has {payloads.numel()} bytes, "
            f"expected {layout.payload_bytes * len(entry.coefficients)}"
        )
    there = payloads.to(part.device).split(layout.payload_bytes)
    terms = list(zip(there, entry.coefficients, strict=True))
    # The operator wants parameters to write: without a merge, outer ones become what they are.
    part.state.step(Update(terms, [part.state.outer], layout, entry.outer_lr, impl=impl))
    # Pieces of later rounds may be copied over the values that this step led to.
    part.state.last_update = None
    part.round, part.history = entry.number + 1, entry.after
