"""The latest rounds that this replica has applied, for replicas that join.

A replica that joins has copied the outer state as it was some rounds ago. It takes the outer steps
of these rounds again, from the payloads in this log. The operators and their arguments are the same
as on the other replicas, so the bits are the same.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

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
        copied: Event of the copy from a device.
    """

    entry: LoggedRound
    payloads: list[Tensor]
    buffers: list[Payload] = field(default_factory=list)
    copied: Any = None


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


class RoundLog:
    """The payloads of the latest rounds, in host memory, and a guard of the live outer state.

    The training thread writes; one other thread may read at the same time.

    Args:
        max_bytes: Most bytes of payloads. The oldest rounds of a fragment give way to its new ones.
            After a round that is larger than this by itself, the log is empty.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._lock = threading.Lock()
        self._rounds: OrderedDict[tuple[int, int], _Kept] = OrderedDict()
        self._writes: dict[int, int] = {}
        self._written: dict[int, Any] = {}

    # ------------------------------------------------------------------- the training thread

    @contextmanager
    def writing(self, part: SyncedPart) -> Iterator[None]:
        """Run a block that changes the outer state of a part, and its numbers."""
        index = part.index
        # Odd while the block runs: a reader sees that the state has changed meanwhile.
        self._writes[index] = self._writes.get(index, 0) + 1
        try:
            yield
        finally:
            if part.device.type == "cuda":
                self._written[index] = torch.cuda.current_stream(part.device).record_event()
            self._writes[index] += 1

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
        with self._lock:
            old = self._make_room(part.index, size)
            if size <= self.max_bytes:
                keep = self._copy_to_host if part.device.type == "cuda" else self._take_over
                self._rounds[part.index, number] = keep(entry, part, mean, old)
                self.num_bytes += size

    def _make_room(self, fragment: int, size: int) -> list[_Kept]:
        """Forget rounds until ``size`` bytes have room; return this fragment's."""
        old = []
        while self._rounds and self.num_bytes + size > self.max_bytes:
            # A fragment's own rounds first: their memory has the size of the new round.
            key = next(
                (key for key in self._rounds if key[0] == fragment), next(iter(self._rounds))
            )
            kept = self._rounds.pop(key)
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
        stream = torch.cuda.current_stream(part.device)
        return _Kept(entry, [host], copied=stream.record_event())

    # --------------------------------------------------------------------------- any thread

    def rounds(self) -> list[LoggedRound]:
        """Return the rounds that the log holds, oldest first."""
        with self._lock:
            return [kept.entry for kept in self._rounds.values()]

    def read(self, fragment: int, number: int, begin: int, end: int) -> Tensor | None:
        """Return a copy of bytes [begin, end) of a round's payloads; None if they are not here."""
        with self._lock:
            kept = self._rounds.get((fragment, number))
            if kept is None or not 0 <= begin < end <= kept.entry.num_bytes:
                return None
            if kept.copied is not None:
                kept.copied.synchronize()
            return torch.cat(list(_pieces(kept.payloads, begin, end)))

    def read_state(
        self, part: SyncedFragment, begin: int, end: int
    ) -> tuple[Standing, Tensor] | None:
        """Return elements [begin, end) of a fragment's outer state, as they are after one round.

        Returns:
            The round; and fp32 [number of tensors, end - begin] in host memory, in the order of
            ``state_tensors``. None if an outer step was taken meanwhile: ask again.
        """
        writes = self._writes.get(part.index, 0)
        if writes % 2:
            return None
        standing = Standing.of(part)
        values = self._copy(part, begin, end)
        return None if self._writes.get(part.index, 0) != writes else (standing, values)

    def standing(self, part: SyncedFragment) -> Standing | None:
        """Return where a fragment's outer state is; None while an outer step is taken."""
        writes = self._writes.get(part.index, 0)
        standing = Standing.of(part)
        is_steady = writes % 2 == 0 and self._writes.get(part.index, 0) == writes
        return standing if is_steady else None

    def _copy(self, part: SyncedFragment, begin: int, end: int) -> Tensor:
        pieces = [tensor[begin:end] for tensor in state_tensors(part)]
        if part.device.type != "cuda":
            return torch.stack(pieces)
        stream = torch.cuda.Stream(part.device)
        if part.index in self._written:
            stream.wait_event(self._written[part.index])
        with torch.cuda.stream(stream):
            return torch.stack(pieces).cpu()


def _pieces(tensors: Sequence[Tensor], begin: int, end: int) -> Iterator[Tensor]:
    """Yield the parts that make up elements [begin, end) of all tensors, one after the other."""
    offset = 0
    for tensor in tensors:
        first, last = max(begin - offset, 0), min(end - offset, tensor.numel())
        if first < last:
            yield tensor[first:last]
        offset += tensor.numel()


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
