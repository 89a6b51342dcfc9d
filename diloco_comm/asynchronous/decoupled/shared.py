"""A fragment of the shared model: its outer parameters, and the outer step on a merge."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ... import ops
from ...base.memory import empty_pages, memory_order
from ...methods.outer import OuterOptimizer, make_outer
from ...ops.wire import WireFormat
from ..model.rules import fused_numbers
from ..model.shared import layout_of
from .merging import merge_coefficients
from .pieces import Piece

# Copies of at least this many bytes use huge pages.
_LARGE_BYTES = 1 << 22


class SharedFragment:
    """The shared parameters of one fragment, by piece.

    Args:
        tensors: The fragment's tensors with their first values, fp32, bf16 or fp16, on the CPU.
        pieces: How the fragment is divided, from ``pieces_of``.
        wire: Format of the payloads.
        outer: SGD, HeavyBall or Nesterov, or such a name.
        impl: Force an implementation of the operators.

    Attributes:
        values: The shared parameters, fp32 [num_elements] for each piece.
        num_merges: Outer steps begun; a merge that raises in its step leaves half of it.

    Raises:
        ValueError: If the outer optimizer is another.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        pieces: Sequence[Piece],
        wire: WireFormat,
        outer: OuterOptimizer,
        impl: str = "",
    ) -> None:
        self.pieces, self.impl = tuple(pieces), ops.resolve_impl(impl)
        self.outer = make_outer(outer)
        numbers = fused_numbers(self.outer)
        if numbers is None:
            raise ValueError(
                "a decoupled merge takes SGD, HeavyBall or Nesterov as the outer optimizer, got "
                f"{type(self.outer).__name__}"
            )
        self._mu, self._direct, self._ahead, self._behind = numbers
        self.layouts = [layout_of(piece.num_elements, wire) for piece in self.pieces]
        self.values = [flatten(tensors, piece) for piece in self.pieces]
        has_momentum = self._mu is not None
        self.momenta = [torch.zeros_like(each) if has_momentum else None for each in self.values]
        self.num_merges = 0

    def copy_values(self, room: Sequence[Tensor] | None = None) -> list[Tensor]:
        """Return copies of the shared parameters, for the learners.

        Args:
            room: From ``room_for_copy``: the copies take no further memory.
        """
        room = self.room_for_copy() if room is None else room
        return [copy.copy_(each) for copy, each in zip(room, self.values, strict=True)]

    def room_for_copy(self) -> list[Tensor]:
        """Return tensors like the shared parameters, with any values."""
        return [_empty_like(each) for each in self.values]

    def merge(
        self,
        payloads: Sequence[Sequence[Tensor]],
        weights: Sequence[float],
        factors: list[list[float]] | None = None,
    ) -> list[list[float]]:
        """Take an outer step on the merged pseudo-gradients.

        Args:
            payloads: For each report, the payload of each piece.
            weights: One positive number for each report.
            factors: Of the reports in each piece, where they are known (``Gathered``).

        Returns:
            The factors of the reports in each piece.

        Raises:
            ValueError: If a payload holds NaN or Inf where directions are needed. Then nothing is
                changed, ``num_merges`` included. A mean does not look at the values; ``Gathered``
                does.
        """
        by_piece = list(zip(*payloads, strict=True))
        if factors is None:
            factors = [
                merge_coefficients(piece.merge, each, layout, weights, self.impl)
                for piece, each, layout in zip(self.pieces, by_piece, self.layouts, strict=True)
            ]
        lr = self.outer.lr
        rate = float(lr(self.num_merges) if callable(lr) else lr)
        self.num_merges += 1
        for index, each in enumerate(by_piece):
            self._step(index, each, factors[index], rate)
        return factors

    def _step(
        self, index: int, payloads: Sequence[Tensor], factors: Sequence[float], lr: float
    ) -> None:
        layout = self.layouts[index]
        ops.outer_step_delayed(
            self.values[index],
            self.momenta[index],
            None,
            payloads,
            factors,
            0,
            layout.num_elements,
            layout.run_elements,
            layout.wire.name,
            layout.wire.block_size,
            lr,
            mu=self._mu or 0.0,
            direct=self._direct,
            ahead=self._ahead,
            behind=self._behind,
            first=True,
            last=True,
            impl=self.impl,
        )


def _empty_like(values: Tensor) -> Tensor:
    """Return room for a copy; the page faults of a large one would take longer than the merge."""
    if values.nbytes < _LARGE_BYTES:
        return torch.empty_like(values)
    return empty_pages(tuple(values.shape))


def flatten(tensors: Sequence[Tensor], piece: Piece) -> Tensor:
    """Return a copy of the piece's elements in memory order, fp32 [num_elements]."""
    return torch.cat([memory_order(tensors[i].detach()) for i in piece.indices]).float()
