"""The reports of one round of a fragment, and the dot products of their payloads.

The products with the reports that are there already are taken when a report arrives. So a merge by
RDA reads the payloads once, in its outer step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ...ops.wire import Layout
from .merging import direction_coefficients, normalised, products_with
from .pieces import Piece


class Gathered:
    """The payloads that wait for their merge.

    Args:
        pieces, layouts: Of the fragment.
        impl: Force an implementation of the operators.
    """

    def __init__(self, pieces: Sequence[Piece], layouts: Sequence[Layout], impl: str = "") -> None:
        self._pieces, self._layouts, self._impl = pieces, layouts, impl
        self._payloads: dict[str, list[Tensor]] = {}
        # For each learner, in the order of arrival: by piece, the products with the payloads before
        # it and with itself; of a piece that merges by the mean, the last one alone.
        self._products: list[list[list[float]]] = []

    def add(self, learner: str, payloads: list[Tensor]) -> str:
        """Take a report's payloads, one of each piece; return why they are refused, or "".

        Payloads of another size, or with NaN or Inf, are refused, and change nothing.
        """
        if len(payloads) != len(self._pieces):
            return (
                f"a report has one payload for each piece: {len(self._pieces)}, not {len(payloads)}"
            )
        products = []
        for index, (payload, layout) in enumerate(zip(payloads, self._layouts, strict=True)):
            if payload.numel() != layout.payload_bytes:
                return (
                    f"the payload of piece {index} must have {layout.payload_bytes} bytes, got "
                    f"{payload.numel()}"
                )
            is_alone = self._pieces[index].merge == "mean"
            others = [] if is_alone else [each[index] for each in self._payloads.values()]
            products.append(products_with(others, payload, layout, self._impl))
            # A dot product in fp64 is finite where all the fp32 values are.
            if not math.isfinite(products[-1][-1]):
                return f"the payload of piece {index} holds NaN or Inf"
        self._payloads[learner] = payloads
        self._products.append(products)
        return ""

    def payloads(self, learners: Sequence[str]) -> list[list[Tensor]]:
        """Return the payloads of these learners."""
        return [self._payloads[learner] for learner in learners]

    def factors(self, learners: Sequence[str], weights: Sequence[float]) -> list[list[float]]:
        """Return the factors of the reports in each piece, as ``SharedFragment.merge`` has them."""
        places = {learner: place for place, learner in enumerate(self._payloads)}
        found = []
        for index, piece in enumerate(self._pieces):
            if piece.merge == "mean":
                found.append(normalised(weights))
                continue
            order = [places[learner] for learner in learners]
            rows = [[self._products[max(a, b)][index][min(a, b)] for b in order] for a in order]
            gram = torch.tensor(rows, dtype=torch.float64).flatten()
            found.append(direction_coefficients(gram, weights))
        return found

    def clear(self) -> None:
        """Forget all reports."""
        self._payloads.clear()
        self._products.clear()
