"""How alike successive merges of a fragment are, and what that makes of the outer learning rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ... import ops
from .shared import SharedFragment


def effective_rate(lr: float, momentum: float, autocorrelation: float) -> float:
    """Return lr * (1 + momentum / (1 - momentum * autocorrelation)).

    Where the merge k rounds ago is rho^k of the newest one, and the rest is at right angles to it,
    Nesterov moves the parameters along the newest merge by this rate.

    Args:
        lr, momentum: Of Nesterov; the momentum lies in [0, 1).
        autocorrelation: rho, in [-1, 1].

    Raises:
        ValueError: If a number is out of its range.
    """
    if not 0 <= momentum < 1 or not -1 <= autocorrelation <= 1:
        raise ValueError(
            "momentum must lie in [0, 1) and autocorrelation in [-1, 1], got "
            f"{momentum!r} and {autocorrelation!r}"
        )
    return lr * (1.0 + momentum / (1.0 - momentum * autocorrelation))


class WatchedFragment(SharedFragment):
    """A shared fragment that compares each merged pseudo-gradient with the one before it.

    The arguments are those of ``SharedFragment``. Every merge decodes its payloads once more, and
    the fragment keeps one fp32 copy of the last merged pseudo-gradient.

    Attributes:
        cosines: The cosine of each merged pseudo-gradient and the one before it, over all pieces
            together. A pseudo-gradient of zeros has no cosine.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.cosines: list[float] = []
        self._last: Tensor | None = None

    def merge(
        self,
        payloads: Sequence[Sequence[Tensor]],
        weights: Sequence[float],
        factors: list[list[float]] | None = None,
    ) -> list[list[float]]:
        """Take the outer step of ``SharedFragment.merge``, and note the cosine."""
        factors = super().merge(payloads, weights, factors)
        merged = self._merged(payloads, factors)
        if self._last is not None:
            norms = float(self._last.norm() * merged.norm())
            if norms and math.isfinite(norms):
                self.cosines.append(float(self._last @ merged) / norms)
        self._last = merged
        return factors

    def _merged(
        self, payloads: Sequence[Sequence[Tensor]], factors: Sequence[Sequence[float]]
    ) -> Tensor:
        """Return the merged pseudo-gradient of all pieces, fp32 [elements of the fragment]."""
        parts = []
        for layout, own, each in zip(
            self.layouts, factors, zip(*payloads, strict=True), strict=True
        ):
            part = torch.empty(layout.num_elements, dtype=torch.float32)
            ops.decode(
                list(each),
                list(own),
                [part],
                0,
                layout.num_elements,
                layout.run_elements,
                layout.wire.name,
                layout.wire.block_size,
                impl=self.impl,
            )
            parts.append(part)
        return torch.cat(parts)
