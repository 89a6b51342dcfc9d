"""The round log: the latest rounds that this replica has applied, for replicas that join.

A replica that joins has copied the outer state as it was some rounds ago. It takes the outer steps
of the rounds since then itself, from the payloads in a member's log. It uses the same operators
with the same arguments, so it gets the same bits.
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
        fragment, number: Index of the fragment, and number of the round.
        before, after: History of the fragment before and after the round; see ``rounds.history``.
        num_steps: Number of outer steps before this one.
        outer_lr: The outer learning rate.
        coefficients: The factor of each payload in the mean.
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
    """A logged round with its payloads, in host memory.

    Attributes:
        entry: The description of the round.
        payloads: The payloads, ``entry.num_bytes`` in all.
        buffers: The exchange's buffers in which the payloads lie; [] if the payloads are a copy.
    """

    entry: LoggedRound
    payloads: list[Tensor]
    buffers: list[Payload] = field(default_factory=list)


@dataclass(frozen=True)
class Standing:
    """The round at which a fragment's outer state is.

    Attributes:
        round: Number of the next round.
        history: History of the fragment; see ``rounds.history``.
        num_steps: Number of outer steps taken.
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
    """Keeps the payloads of the latest rounds in host memory, and guards the live outer state.

    Args:
        max_bytes: Most bytes of payloads. A new round replaces the oldest rounds of its fragment,
            and if these are too small, the oldest of other fragments. After a round that alone is
            larger than this, the log is empty.
        source: Sends outer state and rounds to replicas that join, on another thread. It must know
            when the state changes. None: nobody joins beside training.
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
        """Forget rounds until there is room for ``size`` bytes.

        Returns:
            The forgotten rounds of this fragment.
        """
        old = []
        while self._rounds and self.num_bytes + size > self.max_bytes:
            # The fragment's own rounds first, as the new round can use their memory.
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
        """Keep the payloads in the exchange's buffers, which get an old round's memory instead."""
        kept = _Kept(entry, [payload for payload, _ in mean.terms])
        if part.buffers is not None:
            kept.buffers.extend(part.buffers.take_out(kept.payloads))
            part.buffers.put_back([buffer for former in old for buffer in former.buffers])
        return kept

    def _copy_to_host(
        self, entry: LoggedRound, part: SyncedFragment, mean: Mean, old: Sequence[_Kept]
    ) -> _Kept:
        # Use the memory of an old round: new page-locked memory costs more than the copy.
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
    """Whether outer steps on these parts give the same bits when another replica takes them again.

    That is so with the fused outer optimizers, if their state is on the parameters' device.
    """
    fragments = [part for part in parts if isinstance(part, SyncedFragment)]
    return all(part.state.takes_verdict and part.loader is None for part in fragments)


def replay(part: SyncedFragment, entry: LoggedRound, payloads: Tensor, impl: str = "") -> None:
    """Take the outer step of a logged round on a fragment whose next round it is.

    The local parameters do not change.

    Args:
        part: The fragment.
        entry: The logged round.
        payloads: uint8 [``entry.num_bytes``], in host memory: all payloads, one after the other.

    Raises:
        ValueError: If the fragment is at another round, or the entry does not fit the fragment.
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
    # The operator must write parameters: give it the outer ones, which it then sets to themselves.
    part.state.step(Update(terms, [part.state.outer], layout, entry.outer_lr, impl=impl))
    # The caller may copy pieces that are at other rounds over the result, so this update cannot be
    # taken back.
    part.state.last_update = None
    part.round, part.history = entry.number + 1, entry.after
