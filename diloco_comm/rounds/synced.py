"""What is exchanged as one: a fragment's parameters against its outer ones, or the buffers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass, field
from math import inf, isnan
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from .. import _C, ops
from ..base.memory import Reading, device_of, memory_order, page_locked, persistent
from ..exchange.buffers import ExchangeBuffers
from ..exchange.exchange import Exchange
from ..exchange.work import Terms, decode_terms
from ..methods.outer import OuterOptimizer, Update
from ..methods.overlap import Own
from ..ops.dispatch import is_served
from ..ops.offload import CHUNK_ELEMENTS, slices
from ..ops.wire import Layout, WireFormat
from ..replica import sharding
from ..replica.fragments import (
    DTYPES,
    Fragment,
    is_dense,
    memory_of,
    refuse_change,
    unwrap_model,
)
from .flights import RoundInFlight

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .norms import SharedReading


@dataclass
class OuterStep:
    """What a part is given when a round is applied.

    Attributes:
        terms: Payloads and coefficients; none means that no step is taken.
        own: This replica's payload, when it was sent at an earlier step than this one.
        alpha, clip: See ``outer.Update``.
        measured: Takes the squared norm of the step, if it is to be measured.
        verdict: See ``outer.Update``.
    """

    terms: Terms
    layout: Layout
    lr: float
    impl: str
    alpha: float = 0.0
    clip: float = inf
    own: Tensor | None = None
    measured: Callable[[Tensor], Reading | SharedReading] | None = None
    verdict: Tensor | None = None


class SyncedPart(ABC):
    """One schedule entry: its slot in the engine, its rounds, and what is in flight.

    Attributes:
        index: Number of the fragment in headers; the buffers come after the last fragment.
        round: Number of the next round to be applied.
        last_sent: Inner step up to which the outer parameters have, or will have by what is in
            flight or owed, what was learned.
        in_flight: Rounds sent and neither applied nor lost, oldest first.
        owes: A lost round is to be sent again, with the next one.
        is_ahead: The local parameters still hold rounds that were sent.
        equal_at: Number of outer steps at which all replicas had the same outer parameters.
        corrections: Own payloads of lost rounds, in the slot's layout, that ``Eager`` has applied
            and the next outer step takes back.
        weight_sum: Of all replicas in the last round that was applied; 0 before.
        history: Digest of the outer state and of the rounds applied to it; see ``history``.
        step_norm, largest_norm: L2 norm of the last and of the largest outer step, if measured.
    """

    def __init__(self, index: int, num_elements: int) -> None:
        self.index = index
        self.num_elements = num_elements
        self.round = 0
        self.last_sent = 0
        self.in_flight: deque[RoundInFlight] = deque()
        self.owes = False
        self.is_ahead = False
        self.equal_at = 0
        self.corrections: list[Own] = []
        self.weight_sum = 0.0
        self.history = 0
        self._step_norm = 0.0
        self._readings: deque[Reading | SharedReading] = deque()
        self._largest_norm = 0.0
        self.buffers: ExchangeBuffers | None = None

    @property
    def step_norm(self) -> float:
        self._read_norms()
        return self._step_norm

    @step_norm.setter
    def step_norm(self, value: float) -> None:
        self._step_norm = value
        self._readings.clear()

    @property
    def largest_norm(self) -> float:
        self._read_norms()
        return self._largest_norm

    @largest_norm.setter
    def largest_norm(self, value: float) -> None:
        self._largest_norm = value

    def _read_norms(self) -> None:
        # In the middle of a block of the replica's workers nobody has the norms of its steps yet.
        while self._readings and self._readings[0].is_there:
            norm = self._readings.popleft().norm()
            # A worker of the replica could not take that step: all go on with what they had.
            if not isnan(norm):
                self._step_norm, self._largest_norm = norm, max(self._largest_norm, norm)

    @property
    def takes_verdict(self) -> bool:
        """Whether a round can be applied on the device's decision."""
        return False

    @property
    def next_round(self) -> int:
        """Number of the next round to be sent."""
        return self.in_flight[-1].number + 1 if self.in_flight else self.round

    @property
    @abstractmethod
    def outer(self) -> Tensor | None:
        """What the local values are subtracted from before they are encoded."""

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
    def apply(self, step: OuterStep) -> None:
        """Use the mean of a round."""


class SyncedFragment(SyncedPart):
    """A fragment's parameters, its outer parameters, and their optimizer's buffers.

    Attributes:
        counted: Ranges of elements that count in norms of the replica; None: all of them. Others
            are counted by another worker, who has them too.
    """

    def __init__(
        self,
        fragment: Fragment,
        optimizer: OuterOptimizer,
        wire: WireFormat,
        error_feedback: bool,
        *,
        carries: bool,
        loader: _C.ChunkLoader | None = None,
    ) -> None:
        super().__init__(fragment.index, fragment.num_elements)
        self.loader = loader
        self.fragment = fragment
        self.wire, self.error_feedback, self.carries = wire, error_feedback, carries
        self.device = device_of(self.tensors())
        if loader is None:
            pages = persistent((self.num_elements,), torch.float32, self.device)
        else:
            pages = page_locked((self.num_elements,), torch.float32)
        self.state = optimizer.make_state(pages)
        self.counted: list[tuple[int, int]] | None = None
        if loader is not None:
            self.state.offload(loader)

    @property
    def outer(self) -> Tensor:
        if self.loader is not None:
            self.loader.finish()
        return self.state.outer

    @property
    def takes_verdict(self) -> bool:
        return self.state.takes_verdict

    def count(self, is_counted: Sequence[bool]) -> None:
        """Say which of the parameters count in norms of the replica."""
        if all(is_counted):
            return
        self.counted, begin = [], 0
        for param, counts in zip(self.fragment.params, is_counted, strict=True):
            end = begin + sharding.local(param).numel()
            if counts:
                self.counted.append((begin, end))
            begin = end

    def read_local(self) -> None:
        """Set the outer parameters to the local ones."""
        offset = 0
        for tensor in self.tensors():
            flat = memory_order(tensor)
            self.outer[offset : offset + flat.numel()].copy_(flat)
            offset += flat.numel()

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
                device=self.device,
            )

    def apply(self, step: OuterStep) -> None:
        if not step.terms:
            self.write_local(step.impl)
            return
        before = self.on_device(copy=True) if step.measured else None
        self.state.step(
            Update(
                step.terms,
                self.tensors(),
                step.layout,
                step.lr,
                step.alpha,
                step.clip,
                impl=step.impl,
                verdict=step.verdict,
            )
        )
        if before is not None and step.measured is not None:
            squared = self._squared_norm(before, [self.on_device()], step.impl)
            self._readings.append(step.measured(squared))

    def squared_norm(self, impl: str) -> Tensor:
        """Return fp64 [2] on the device: of outer minus local parameters, see ``ops.norms``."""
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
        values = torch.empty(self.num_elements, device=self.device)
        decode_terms([(payload, 1.0)], layout, [values], impl=impl)
        return values

    def on_device(self, *, copy: bool = False) -> Tensor:
        """Return the outer parameters on the fragment's device; all of them, at once."""
        return self.outer.to(self.device, copy=copy)

    def progress(self) -> Tensor:
        """Return outer minus local parameters, fp32 [num_elements]."""
        values = self.on_device(copy=True)
        offset = 0
        for tensor in self.tensors():
            values[offset : offset + tensor.numel()] -= memory_order(tensor)
            offset += tensor.numel()
        return values

    def write_local(self, impl: str) -> None:
        """Set the local parameters to the outer ones."""
        offloaded = self.state.offloaded
        if offloaded is None:
            ops.merge(self.outer, self.tensors(), impl=impl)
            return
        tensors = self.tensors()
        for begin in range(0, self.num_elements, CHUNK_ELEMENTS):
            end = min(begin + CHUNK_ELEMENTS, self.num_elements)
            with offloaded.chunk(begin, end, is_written=False) as (outer, *_):
                ops.merge(outer[begin:end], slices(tensors, begin, end), impl=impl)


@dataclass
class _Buffer:
    name: str
    owner: nn.Module = field(repr=False)
    attribute: str = ""


class SyncedBuffers(SyncedPart):
    """Floating-point buffers, such as BatchNorm's statistics: averaged, exactly, in fp32."""

    def __init__(self, index: int, model: nn.Module) -> None:
        self._buffers = _floating_buffers(model)
        super().__init__(index, sum(tensor.numel() for tensor in self.tensors()))
        self.device = device_of(self.tensors())
        self._memory = {name: memory_of(tensor) for name, tensor in self.named().items()}

    @property
    def outer(self) -> None:
        return None

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

    def apply(self, step: OuterStep) -> None:
        if not step.terms:
            return
        if step.own is None:
            decode_terms(step.terms, step.layout, self.tensors(), impl=step.impl)
            return
        # What the buffers have seen since the send stays in them.
        change = torch.empty(self.num_elements, device=self.device)
        decode_terms([*step.terms, (step.own, -1.0)], step.layout, [change], impl=step.impl)
        offset = 0
        for tensor in self.tensors():
            flat = memory_order(tensor)
            flat += change[offset : offset + flat.numel()]
            offset += flat.numel()


def squared_norm(outer: Tensor | None, tensors: list[Tensor], impl: str) -> Tensor:
    """Return fp64 [2] on the tensors' device: see ``ops.norms``."""
    squared = torch.zeros(2, dtype=torch.float64, device=device_of(tensors))
    ops.norms(outer, tensors, squared, impl=impl)
    return squared


def _floating_buffers(model: nn.Module) -> Sequence[_Buffer]:
    """List each buffer once, with the module that owns it: buffers may be replaced by new ones.

    Buffers that hold infinities or NaN from the start, such as attention masks, are constants of
    the model, not statistics: they are left out.
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
    if not is_served(buffer.device):
        raise TypeError(
            f"buffer {name!r} is on {buffer.device}: only buffers on a GPU or in CPU memory can be "
            "averaged"
        )
    if not is_dense(buffer):
        raise ValueError(
            f"buffer {name!r} of shape {list(buffer.shape)} and strides {list(buffer.stride())} "
            "is not dense in memory: make it contiguous, or leave average_buffers off"
        )
