"""What is exchanged as one: a fragment's parameters against its outer ones, or the buffers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from . import ops
from .exchange import Exchange, Pending, Slot, empty_pages
from .fragments import DTYPES, Fragment, is_dense, memory_order, unwrap_model
from .outer import OuterOptimizer, Update
from .wire import Layout, WireFormat

if TYPE_CHECKING:
    from collections.abc import Sequence

Terms = list[tuple[Tensor, float]]


@dataclass
class Flight:
    """An exchange on its way."""

    pending: Pending
    kind: str
    sent_step: int
    apply_step: int
    weight: float
    norm: float


class Part(ABC):
    """One schedule entry: its slot in the engine, its rounds, and what is in flight.

    Attributes:
        index: Number of the fragment in headers; the buffers come after the last fragment.
        round: Rounds applied, which is the number of the next one.
        last_sent: Inner step after which the last round that was applied was sent.
    """

    def __init__(self, index: int, num_elements: int) -> None:
        self.index = index
        self.num_elements = num_elements
        self.round = 0
        self.last_sent = 0
        self.in_flight: deque[Flight] = deque()
        self.slot: Slot | None = None

    @property
    @abstractmethod
    def outer(self) -> Tensor | None:
        """What the local values are subtracted from before they are encoded."""

    @abstractmethod
    def named(self) -> dict[str, Tensor]:
        """Return the local tensors, detached, under their names in the model."""

    def tensors(self) -> list[Tensor]:
        """Return the local tensors, detached."""
        return list(self.named().values())

    @abstractmethod
    def open_slot(self, exchange: Exchange) -> None:
        """Allocate the buffers of the exchange for the group's size."""

    @abstractmethod
    def apply(self, terms: Terms, layout: Layout, *, lr: float, alpha: float, impl: str) -> None:
        """Use the mean of a round."""


class ParameterPart(Part):
    """A fragment's parameters, its outer parameters, and their optimizer's buffers."""

    def __init__(
        self,
        fragment: Fragment,
        optimizer: OuterOptimizer,
        wire: WireFormat,
        error_feedback: bool,
    ) -> None:
        super().__init__(fragment.index, fragment.num_elements)
        self.fragment = fragment
        self.wire, self.error_feedback = wire, error_feedback
        self.state = optimizer.make_state(empty_pages((self.num_elements,), torch.float32))

    @property
    def outer(self) -> Tensor:
        return self.state.outer

    def read_local(self) -> None:
        """Set the outer parameters to the local ones."""
        offset = 0
        for tensor in self.tensors():
            flat = memory_order(tensor)
            self.outer[offset : offset + flat.numel()].copy_(flat)
            offset += flat.numel()

    def named(self) -> dict[str, Tensor]:
        return dict(zip(self.fragment.names, self.fragment.tensors(), strict=True))

    def open_slot(self, exchange: Exchange) -> None:
        if self.num_elements:
            self.slot = exchange.slot(
                self.num_elements, self.wire, error_feedback=self.error_feedback
            )

    def apply(self, terms: Terms, layout: Layout, *, lr: float, alpha: float, impl: str) -> None:
        self.state.step(Update(terms, self.tensors(), layout, lr, alpha, impl=impl))

    def write_local(self, impl: str) -> None:
        """Set the local parameters to the outer ones."""
        ops.merge(self.outer, self.tensors(), impl=impl)


@dataclass
class _Buffer:
    name: str
    owner: nn.Module = field(repr=False)
    attribute: str = ""


class BufferPart(Part):
    """Floating-point buffers, such as BatchNorm's statistics: averaged, exactly, in fp32."""

    def __init__(self, index: int, model: nn.Module) -> None:
        self._buffers = _floating_buffers(model)
        super().__init__(index, sum(tensor.numel() for tensor in self.tensors()))

    @property
    def outer(self) -> None:
        return None

    def named(self) -> dict[str, Tensor]:
        return {b.name: getattr(b.owner, b.attribute).detach() for b in self._buffers}

    def open_slot(self, exchange: Exchange) -> None:
        if self.num_elements:
            self.slot = exchange.slot(self.num_elements, WireFormat("fp32"))

    def apply(self, terms: Terms, layout: Layout, *, lr: float, alpha: float, impl: str) -> None:
        ops.decode(
            [payload for payload, _ in terms],
            [coefficient for _, coefficient in terms],
            self.tensors(),
            0,
            layout.num_elements,
            layout.run_elements,
            layout.wire.name,
            layout.wire.block_size,
            impl=impl,
        )


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
    if buffer.device.type != "cpu":
        raise TypeError(
            f"buffer {name!r} is on {buffer.device}: only buffers in CPU memory can be averaged"
        )
    if not is_dense(buffer):
        raise ValueError(
            f"buffer {name!r} of shape {list(buffer.shape)} and strides {list(buffer.stride())} "
            "is not dense in memory: make it contiguous, or leave average_buffers off"
        )
