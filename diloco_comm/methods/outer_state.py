"""The outer parameters of one fragment with their optimizer's buffers, and one step on them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .. import _C
from ..ops.offload import CHUNK_ELEMENTS, Offloaded, chunks_of
from ..ops.wire import Layout


@dataclass
class Update:
    """One outer step: the encoded gradient, the parameters to write, and numbers of the round.

    Attributes:
        terms: Payloads (uint8, laid out as ``layout``) and their coefficients.
        params: The fragment's parameters, written in place.
        lr: Learning rate of this round.
        alpha: Weight of the local value in the merge.
        clip: Bound of the momentum's elements, for optimizers with a momentum.
        impl: Implementation of the operators; "" for the fastest.
        verdict: None, or int64 [1] on the device: unless it is 0 the step does nothing. Only for a
            state with ``takes_verdict``.
    """

    terms: list[tuple[Tensor, float]]
    params: list[Tensor]
    layout: Layout
    lr: float
    alpha: float = 0.0
    clip: float = math.inf
    impl: str = ""
    verdict: Tensor | None = None

    def payloads(self) -> dict[str, Any]:
        """Return the arguments that say where the encoded elements are."""
        return {
            "payloads": [payload for payload, _ in self.terms],
            "coefficients": [coefficient for _, coefficient in self.terms],
            "run_elements": self.layout.run_elements,
            "wire": self.layout.wire.name,
            "block_size": self.layout.wire.block_size,
            "impl": self.impl,
        }


class OuterState(ABC):
    """Outer parameters of one fragment, and the buffers that its optimizer keeps for them.

    Attributes:
        outer: fp32 ``[num_elements]``; the shared model.
        num_steps: Outer steps taken.
        last_lr: Learning rate of the last step; None where that is not known.
        takes_verdict: A step can be left to the device's decision.
    """

    takes_verdict = False
    num_steps: int
    last_lr: float | None = None
    _lr_before: float | None = None

    def count_step(self, lr: float) -> None:
        """Count an outer step with this learning rate."""
        self.num_steps += 1
        self._lr_before, self.last_lr = self.last_lr, lr

    def uncount_step(self) -> None:
        """Take back the count of the last outer step, which was not taken."""
        self.num_steps, self.last_lr = self.num_steps - 1, self._lr_before

    def __init__(self, outer: Tensor) -> None:
        self.outer = outer
        self.num_steps = 0
        self.offloaded: Offloaded | None = None

    def offload(self, loader: _C.ChunkLoader) -> None:
        """Keep the state in host memory, where its tensors are already, page-locked.

        Raises:
            ValueError: If this optimizer cannot.
        """
        if not self.takes_verdict:
            raise ValueError(
                "offload='cpu' goes with SGD, HeavyBall, Nesterov and Adam as outer optimizer, not "
                "with one of torch"
            )
        self.offloaded = Offloaded([self.outer, *self.tensors().values()], loader)

    def ranges(self, layout: Layout) -> Iterator[tuple[int, int, list[Tensor]]]:
        """Have outer parameters and buffers on the device, all at once or chunk by chunk.

        The tensors hold elements [begin, end) of the fragment.
        """
        if self.offloaded is None:
            yield 0, layout.num_elements, [self.outer, *self.tensors().values()]
            return
        for begin, end in chunks_of(layout):
            with self.offloaded.chunk(begin, end, is_written=True) as tensors:
                yield begin, end, tensors

    @abstractmethod
    def step(self, update: Update) -> None:
        """Take one outer step and merge the result into the parameters."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Return the buffers with one fp32 element for each parameter element."""

    def look_ahead(self) -> tuple[Tensor, float] | None:
        """Return a momentum and its factor, if ``outer`` is that much ahead, times the last lr."""
        return None

    def take_back_look_ahead(self, lr: float) -> None:
        """Add lr * factor * momentum to ``outer``; see ``look_ahead``."""
        ahead = self.look_ahead()
        if ahead is None:
            return
        momentum, factor = ahead
        for begin in range(0, self.outer.numel(), CHUNK_ELEMENTS):
            # A product of its own, so that all devices round alike.
            shift = momentum[begin : begin + CHUNK_ELEMENTS] * (lr * factor)
            self.outer[begin : begin + CHUNK_ELEMENTS] += shift

    def extra(self) -> dict[str, Any]:
        """Return the values to be saved that are not in ``tensors``."""
        return {}

    def load(self, tensors: dict[str, Tensor], extra: dict[str, Any]) -> None:
        """Copy saved buffers in; ``num_steps`` is already that of the save."""
        for name, tensor in self.tensors().items():
            if tensor is not tensors[name]:
                tensor.copy_(tensors[name])

    def check(self, names: set[str]) -> None:
        """Raise ValueError unless ``load`` can take buffers of these names."""
        own = set(self.tensors())
        if own != names:
            raise ValueError(
                f"the saved outer optimizer has buffers {sorted(names)}, this one {sorted(own)}"
            )
