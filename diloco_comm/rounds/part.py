"""Parts: a *part* is exchanged as a whole: a fragment, or all averaged buffers of the model."""

from __future__ import annotations

import hashlib
import struct
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import isnan
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn

from .. import _C, ops
from ..base.memory import device_of, memory_order, page_locked, paired, persistent, round_as
from ..exchange.buffers import ExchangeBuffers
from ..exchange.exchange import Exchange
from ..exchange.membership.change import Repair
from ..exchange.round import Kind, Mean, Round, decode_terms
from ..methods.outer import FromTorch, OuterOptimizer, Update
from ..methods.overlap import Own
from ..ops.implementations import obstacle
from ..ops.offload import CHUNK_ELEMENTS, slices
from ..ops.wire import Layout, WireFormat
from ..replica.fragments import DTYPES, Fragment, is_dense, memory_of, refuse_change, unwrap_model


class NormReading(Protocol):
    """A norm whose value may still be on a device, or on its way between a replica's workers."""

    @property
    def is_there(self) -> bool:
        """Whether ``norm`` returns without a wait for other workers."""
        ...

    def norm(self) -> float: ...


# sent      the engine has the payload, and this replica has not asked for the result yet
# agreed    all replicas have voted for the round, and its mean has come
# pending   the outer step is enqueued on the device, which takes it only if all vote yes
# applied   the outer step is taken and counted
# lost      no replica applies the round: its mean counts as zero
State = Literal["sent", "agreed", "pending", "applied", "lost"]


@dataclass(eq=False)
class RoundInFlight:
    """One round of one part, from its send until it is applied or lost.

    The headers of its mean carry the numbers that all replicas share: the lowest replica's outer
    learning rate and gap, and all weights.

    Attributes:
        number: Number of the round.
        sent_step: Inner step of the send.
        apply_step: Inner step after which the result is due; -1 if it is due at a later send.
        weight: This replica's weight.
        lr: Outer learning rate, not multiplied by an inner one.
        own: This replica's payload, laid out as ``layout``; None after a resume that needs none.
        state: How far the round is; see ``State``.
        reading: The norm of the pseudo-gradient while it is not read; see ``measured_norm``.
        coefficient: The factor with which the own payload has gone into this replica's outer
            parameters before the round's result (``Eager``); 0 if it has not.
        is_local_kept: The local parameters were not set to the outer ones at the send, and so
            still contain the values that were sent.
        is_reset: The values could not be encoded: the own payload is zeros of weight 0.
        members: Numbers of the replicas in the group of the round, in rank order.
        work: The exchange; None if the round comes from a saved state.
        mean: The result once all replicas have agreed on the round; a round from a saved state has
            a single header, with the sum of the weights.
        saved_resets: Replicas that were reset in a round from a saved state.
        exposed_s: Seconds for which the training loop only waited for the result.
        outer_step_s: Seconds of the outer step.
    """

    part: SyncedPart
    number: int
    kind: Kind
    sent_step: int
    apply_step: int
    weight: float
    lr: float
    own: Tensor | None
    layout: Layout
    state: State = "sent"
    norm: float = float("nan")
    reading: NormReading | None = None
    coefficient: float = 0.0
    is_local_kept: bool = False
    is_reset: bool = False
    members: tuple[int, ...] = ()
    work: Round | None = None
    mean: Mean | None = None
    saved_resets: tuple[int, ...] = ()
    exposed_s: float = 0.0
    outer_step_s: float = 0.0

    @property
    def senders(self) -> tuple[int, ...]:
        """The replicas whose payloads are the terms of the mean, in order.

        () if the owners of runs have computed the mean. Only for a round whose mean has come.
        """
        assert self.mean is not None
        return self.members if len(self.members) == len(self.mean.terms) else ()

    def measured_norm(self) -> float:
        """Return the pseudo-gradient's norm, or NaN when it was not measured."""
        if self.reading is not None:
            self.norm, self.reading = self.reading.norm(), None
        return self.norm

    def reset_replicas(self) -> tuple[int, ...]:
        """Return the replicas that were reset in this round, as far as headers have come."""
        if self.work is None:
            return self.saved_resets
        headers = self.work.headers if self.mean is None else self.mean.headers
        found: tuple[int, ...] = ()
        for replica, header in zip(self.members, headers, strict=False):
            if header.is_reset:
                found += (replica,)
        return found

    def own_after(self, inner_step: int) -> Tensor | None:
        """Return the own payload if the local values have changed since it was sent."""
        return None if self.is_reset or self.sent_step == inner_step else self.own

    def own_share(self) -> list[Own]:
        """Return the own payload if ``coefficient`` of it goes into the outer parameters, or []."""
        if self.own is None or not self.coefficient:
            return []
        return [Own(self.own, self.coefficient, self.layout)]

    def wait(self, *, leaves_verdict: bool = False) -> Mean:
        """Wait for the vote; repeatable.

        Args:
            leaves_verdict: See ``exchange.round.Round.wait``.

        Raises:
            SyncError: If there is no result.
        """
        if self.mean is not None:
            return self.mean
        assert self.work is not None
        mean = self.work.wait(leaves_verdict=leaves_verdict)
        if mean.verdict is None:
            self.mean = mean
            if self.state == "sent":
                self.state = "agreed"
        return mean


def weight_sum(mean: Mean) -> float:
    """Return the sum of all replicas' weights in a round."""
    total = 0.0
    for header in mean.headers:
        total += header.weight
    return total


def mean_of(repair: Repair, flight: RoundInFlight | None) -> Mean:
    """Return the mean of a round that counts, and that this replica has yet to apply.

    Args:
        flight: The round, if this replica still has it in flight.
    """
    if flight is not None and flight.mean is not None:
        return flight.mean
    return Mean(
        terms=repair.terms,
        layout=repair.layout,
        headers=repair.headers,
        weights=[],
        seconds={},
        sent_bytes=0,
        received_bytes=0,
        digest=repair.digest,
    )


def mixed(*values: float) -> int:
    """Return a 64-bit hash of integers below 2^64 and floating-point numbers, in this order."""
    packed = b""
    for value in values:
        packed += struct.pack("<Q" if isinstance(value, int) else "<d", value)
    return hashed(packed)


def hashed(content: bytes) -> int:
    """Return a 64-bit hash of the content."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


@dataclass
class Owed:
    """The debts of a part, which its next rounds settle.

    Attributes:
        is_lost: The next round must send the values of a lost round again.
        is_ahead: The local parameters still contain values that were sent in earlier rounds.
        corrections: Own payloads of lost rounds that ``Eager`` has already put into the outer
            parameters, and that the next outer step takes out. They have the layout of the part's
            buffers.
    """

    is_lost: bool = False
    is_ahead: bool = False
    corrections: list[Own] = field(default_factory=list)


@dataclass
class StepNorms:
    """L2 norms of a part's outer steps, as far as they are measured.

    Attributes:
        last, largest: The norm of the last step, and the largest norm, among those read so far.
        readings: Norms that are not read yet, oldest first.
    """

    last: float = 0.0
    largest: float = 0.0
    readings: deque[NormReading] = field(default_factory=deque)

    def read(self) -> tuple[float, float]:
        """Read all norms that are known by now; return ``last`` and ``largest``."""
        # Norms over several workers are known only after the workers' block.
        while self.readings and self.readings[0].is_there:
            norm = self.readings.popleft().norm()
            # NaN: a worker could not take that step, and all workers keep the norm before.
            if not isnan(norm):
                self.last, self.largest = norm, max(self.largest, norm)
        return self.last, self.largest


# Takes the squared norm of an outer step, and returns its reading.
Measure = Callable[[Tensor], NormReading]


class SyncedPart(ABC):
    """A fragment or the averaged buffers: local tensors, exchange buffers, and rounds in flight.

    Attributes:
        index: Number of the part in headers; averaged buffers come after the last fragment.
        num_elements: Elements that are exchanged.
        round: Number of the next round to be applied.
        last_sent: The last inner step whose training is applied; under ``SendTimed``, or whose
            training is in flight or owed.
        in_flight: Rounds that are sent or agreed, oldest first.
        owed: The debts that earlier rounds have left to the next ones.
        step_norms: Norms of the outer steps, where the overlap policy measures them.
        weight_sum: Sum of all replicas' weights in the last round that was applied; 0 before.
        history: Digest of the outer state and of the rounds applied to it; see ``rounds.history``.
        buffers: Buffers of the exchange; None before ``open_buffers``, and for a part of no
            elements.
        loader: Copies outer parameters from host memory to the device; None if they are on the
            device.
        has_outer: Whether the part has outer parameters, and takes an outer step in each round; the
            workers of a replica then hold different elements. False for averaged buffers.
        takes_verdict: Whether the device can decide by the votes whether it takes an outer step.
    """

    device: torch.device
    loader: _C.ChunkLoader | None = None
    has_outer: ClassVar[bool] = False
    takes_verdict = False

    def __init__(self, index: int, num_elements: int) -> None:
        self.index = index
        self.num_elements = num_elements
        self.round = self.last_sent = self.history = 0
        self.weight_sum = 0.0
        self.in_flight: deque[RoundInFlight] = deque()
        self.owed = Owed()
        self.step_norms = StepNorms()
        self.buffers: ExchangeBuffers | None = None

    @property
    def outer(self) -> Tensor | None:
        """The outer parameters; None for averaged buffers."""
        return None

    def applied(self, number: int, mean: Mean) -> None:
        """Count a round as applied; mix its digest, numbers and coefficients into the history."""
        lowest, total = mean.headers[0], weight_sum(mean)
        self.round, self.weight_sum = number + 1, total
        values = [self.history, number, mean.digest, lowest.outer_lr, lowest.gap, total]
        for _, coefficient in mean.terms:
            values.append(coefficient)
        self.history = mixed(*values)

    def forget(self) -> None:
        """Forget the rounds in flight, and all debts."""
        self.in_flight.clear()
        self.owed = Owed()
        if self.buffers is not None:
            self.buffers.forget()

    @abstractmethod
    def named(self) -> dict[str, Tensor]:
        """Return the local tensors, detached, under their names in the model."""

    @abstractmethod
    def refuse_changes(self) -> None:
        """Raise ValueError if a local tensor does not lie in memory as it did at first."""

    def tensors(self) -> list[Tensor]:
        """Return what is exchanged: the local tensors, detached."""
        return list(self.named().values())

    @abstractmethod
    def open_buffers(self, exchange: Exchange) -> None:
        """Allocate the buffers of the exchange for the group's size."""

    @abstractmethod
    def squared_norm(self, impl: str) -> Tensor:
        """Return the squared norm of the pseudo-gradient, fp64 [2] on the device.

        See ``ops.norms``; the outer values are rounded to the parameters' dtypes first.
        """

    @abstractmethod
    def apply(
        self, update: Update, *, own: Tensor | None = None, measure: Measure | None = None
    ) -> None:
        """Take an outer step, and write the local tensors.

        Args:
            update: The step: its ``params`` are the local tensors. Without terms, only the local
                tensors are written.
            own: This replica's payload, if it was sent at an earlier inner step.
            measure: Called with the squared norm of the step; None if the norm is not wanted.
        """

    def uncount_step(self) -> None:  # noqa: B027
        """Take back the count of an outer step that the replicas have voted down."""

    def write_local(self, impl: str) -> None:  # noqa: B027
        """Set the local parameters to the outer ones, where there are any."""

    def owe_progress(self) -> None:  # noqa: B027
        """Let the next round also send the pseudo-gradient that the local parameters hold now."""

    def owe_round(self, flight: RoundInFlight, impl: str) -> None:  # noqa: B027
        """Let the next round send the values of this round again."""

    def keep_local(self, flight: RoundInFlight, impl: str) -> None:  # noqa: B027
        """Keep the local parameters after a send, and subtract the sent values from the next send.

        Else the next encoding, which starts from these parameters, would send the values again.
        """


class SyncedFragment(SyncedPart):
    """A fragment's parameters, its outer parameters, and their optimizer's buffers.

    Attributes:
        counted: Ranges of elements that count in this replica's norms; None: all of them. Another
            worker counts the other elements.
    """

    has_outer = True

    def __init__(
        self,
        fragment: Fragment,
        optimizer: OuterOptimizer,
        wire: WireFormat,
        error_feedback: bool,
        *,
        carries: bool,
        must_gather: bool = False,
        feedback_decay: float | None = None,
        loader: _C.ChunkLoader | None = None,
    ) -> None:
        super().__init__(fragment.index, fragment.num_elements)
        self.loader = loader
        self.fragment = fragment
        self.wire, self.error_feedback, self.carries = wire, error_feedback, carries
        self.must_gather, self.feedback_decay = must_gather, feedback_decay
        self._padding = fragment.padding()
        self.device = device_of(self.tensors())
        if loader is None:
            pages = persistent((self.num_elements,), torch.float32, self.device)
        else:
            pages = page_locked((self.num_elements,), torch.float32)
        if isinstance(optimizer, FromTorch):
            self.state = optimizer.make_state(pages, fragment.cut)
        else:
            self.state = optimizer.make_state(pages)
        self.takes_verdict = self.state.takes_verdict
        self.counted: list[tuple[int, int]] | None = None
        if loader is not None:
            self.state.offload(loader)

    @property
    def outer(self) -> Tensor:
        if self.loader is not None:
            self.loader.finish()
        return self.state.outer

    def count(self, is_counted: Sequence[bool]) -> None:
        """Set ``counted``: for each parameter, whether it counts in this replica's norms."""
        if all(is_counted):
            return
        self.counted, begin = [], 0
        counts = dict(zip(self.fragment.names, is_counted, strict=True))
        for name, piece in self.fragment.pieces():
            end = begin + piece.numel()
            if counts.get(name):
                self.counted.append((begin, end))
            begin = end

    def read_local(self) -> None:
        """Set the outer parameters to the local ones."""
        for outer, flat in paired(self.outer, self.tensors()):
            outer.copy_(flat)

    def differs_from_local(self) -> bool:
        """Whether any outer parameter, rounded to the local dtype, differs from the local one."""
        offset = 0
        for _, piece in self.fragment.pieces():
            flat = memory_order(piece)
            outer = self.outer[offset : offset + flat.numel()]
            if not torch.equal(outer.to(flat.device, flat.dtype), flat):
                return True
            offset += flat.numel()
        return False

    def named(self) -> dict[str, Tensor]:
        return self.fragment.named()

    def refuse_changes(self) -> None:
        self.fragment.refuse_changes()

    def tensors(self) -> list[Tensor]:
        return self.fragment.tensors()

    def open_buffers(self, exchange: Exchange) -> None:
        if self.num_elements:
            self.buffers = exchange.buffers(
                self.num_elements,
                self.wire,
                error_feedback=self.error_feedback,
                carries=self.carries,
                must_gather=self.must_gather,
                device=self.device,
            )
            if self.feedback_decay is not None:
                self.buffers.residuals.decay = self.feedback_decay

    def apply(
        self, update: Update, *, own: Tensor | None = None, measure: Measure | None = None
    ) -> None:
        if not update.terms:
            self.write_local(update.impl)
            return
        before = self.on_device(copy=True) if measure else None
        self.state.step(update)
        if self._padding:
            self._clear_padding()
        if before is not None and measure is not None:
            squared = self._squared_norm(before, [self.on_device()], update.impl)
            self.step_norms.readings.append(measure(squared))

    def _clear_padding(self) -> None:
        """Set the elements of padding to zero: a rotated wire has added noise to them."""
        residuals = None if self.buffers is None else self.buffers.residuals
        kept = [] if residuals is None else [residuals.value, residuals.new, residuals.owed]
        for begin, end in self._padding:
            for flat in (self.outer, *self.state.tensors().values(), *kept):
                if flat is not None:
                    flat[begin:end].zero_()
        for name, piece in self.fragment.pieces():
            if not name:
                piece.zero_()

    def uncount_step(self) -> None:
        self.state.uncount_step()

    def forget(self) -> None:
        super().forget()
        self.state.equal_at, self.state.last_update = -1, None

    def end(self, lr: float, momentum: float | None, impl: str, *, is_mean: bool) -> None:
        """End training on the mean of the last round, or by taking back the look-ahead.

        Args:
            lr, momentum: The outer learning rate and momentum of the last outer step.
            is_mean: End on the mean of the last round.
        """
        if is_mean:
            self.state.take_mean(self.tensors())
            if self._padding:
                self._clear_padding()
        else:
            if self.loader is not None:
                self.loader.finish()
            self.state.take_back_look_ahead(lr, momentum)
            self.write_local(impl)
        self.state.ended_at, self.state.is_mean = self.state.num_steps, is_mean
        # Under ``Eager`` the replicas' outer parameters still differ: they must be made equal.
        self.state.equal_at = -1

    def squared_norm(self, impl: str) -> Tensor:
        return self._squared_norm(self.on_device(), self.tensors(), impl)

    def _squared_norm(self, outer: Tensor, tensors: list[Tensor], impl: str) -> Tensor:
        if self.counted is None:
            return squared_norm(outer, tensors, impl)
        total = torch.zeros(2, dtype=torch.float64, device=self.device)
        for begin, end in self.counted:
            total += squared_norm(outer[begin:end], slices(tensors, begin, end), impl)
        return total

    def decode(self, payload: Tensor, layout: Layout, impl: str) -> Tensor:
        """Decode a payload to fp32 [num_elements]."""
        values = torch.empty(self.num_elements, dtype=torch.float32, device=self.device)
        decode_terms([(payload, 1.0)], layout, [values], impl=impl)
        return values

    def on_device(self, *, copy: bool = False) -> Tensor:
        """Return all outer parameters on the fragment's device."""
        return self.outer.to(self.device, copy=copy)

    def progress(self) -> Tensor:
        """Return the pseudo-gradient as ``ops.encode`` computes it, fp32 [num_elements]."""
        tensors = self.tensors()
        values = round_as(self.on_device(copy=True), tensors)
        for value, flat in paired(values, tensors):
            value -= flat
        return values

    def owe_progress(self) -> None:
        assert self.buffers is not None
        self.buffers.residuals.owe(self.progress())
        self.owed.is_ahead = False

    def owe_round(self, flight: RoundInFlight, impl: str) -> None:
        assert self.buffers is not None and flight.own is not None
        self.buffers.residuals.owe(self.decode(flight.own, flight.layout, impl))

    def keep_local(self, flight: RoundInFlight, impl: str) -> None:
        assert self.buffers is not None and flight.own is not None
        self.owed.is_ahead = True
        self.buffers.residuals.rewind()
        self.buffers.residuals.owe(self.decode(flight.own, flight.layout, impl).neg_())

    def write_local(self, impl: str) -> None:
        offloaded = self.state.offloaded
        if offloaded is None:
            ops.merge(self.outer, self.tensors(), impl=impl)
            return
        tensors = self.tensors()
        for begin in range(0, self.num_elements, CHUNK_ELEMENTS):
            end = min(begin + CHUNK_ELEMENTS, self.num_elements)
            with offloaded.chunk(begin, end, is_written=False) as (outer, *_):
                ops.merge(outer, slices(tensors, begin, end), impl=impl)


def squared_norm(outer: Tensor | None, tensors: list[Tensor], impl: str) -> Tensor:
    """Return the squared norm of ``outer`` minus ``tensors``, fp64 [2]: see ``ops.norms``."""
    squared = torch.zeros(2, dtype=torch.float64, device=device_of(tensors))
    ops.norms(outer, tensors, squared, impl=impl)
    return squared


@dataclass
class _Buffer:
    name: str
    owner: nn.Module = field(repr=False)
    attribute: str = ""


class SyncedBuffers(SyncedPart):
    """Floating-point buffers, such as BatchNorm's statistics: averaged in fp32, unquantised."""

    def __init__(self, index: int, model: nn.Module) -> None:
        self._buffers = _floating_buffers(model)
        super().__init__(index, sum(tensor.numel() for tensor in self.tensors()))
        self.device = device_of(self.tensors())
        self._memory = {name: memory_of(tensor) for name, tensor in self.named().items()}

    def named(self) -> dict[str, Tensor]:
        return {b.name: getattr(b.owner, b.attribute).detach() for b in self._buffers}

    def refuse_changes(self) -> None:
        for name, tensor in self.named().items():
            refuse_change(f"buffer {name!r}", tensor, self._memory[name])

    def open_buffers(self, exchange: Exchange) -> None:
        if self.num_elements:
            self.buffers = exchange.buffers(
                self.num_elements, WireFormat("fp32"), device=self.device
            )

    def squared_norm(self, impl: str) -> Tensor:
        return squared_norm(None, self.tensors(), impl)

    def apply(
        self, update: Update, *, own: Tensor | None = None, measure: Measure | None = None
    ) -> None:
        if not update.terms:
            return
        if own is None:
            decode_terms(update.terms, update.layout, update.params, impl=update.impl)
            return
        # Keep the change that the inner steps since the send have made to the buffers.
        change = torch.empty(self.num_elements, dtype=torch.float32, device=self.device)
        decode_terms([*update.terms, (own, -1.0)], update.layout, [change], impl=update.impl)
        for here, flat in paired(change, update.params):
            flat += here


def _floating_buffers(model: nn.Module) -> Sequence[_Buffer]:
    """Return each floating-point buffer of the model, as the module that owns it and its name.

    A program may replace a buffer's tensor, so tensors are not kept. Buffers with infinities or NaN
    at the start, such as attention masks, are constants and no statistics: they are left out.
    """
    found, seen = [], set()
    for prefix, module in unwrap_model(model).named_modules():
        for attribute, buffer in module.named_buffers(recurse=False):
            if buffer.dtype not in DTYPES or id(buffer) in seen:
                continue
            seen.add(id(buffer))
            name = f"{prefix}.{attribute}" if prefix else attribute
            _check_buffer(name, buffer)
            if bool(torch.isfinite(buffer).all()):
                found.append(_Buffer(name, module, attribute))
    return found


def _check_buffer(name: str, buffer: Tensor) -> None:
    if reason := obstacle(buffer.device):
        raise TypeError(f"buffer {name!r} is {reason}")
    if not is_dense(buffer):
        raise ValueError(
            f"buffer {name!r} of shape {list(buffer.shape)} and strides {list(buffer.stride())} "
            "is not dense in memory: make it contiguous, or leave average_buffers off"
        )
