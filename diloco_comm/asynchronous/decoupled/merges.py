"""The merges of a decoupled run: the weights of reports, and the fragments that are merged.

A merge is the mean, or takes radius and direction apart (RDA). With d_m the decoded pseudo-gradient
of learner m and w_m = tokens_m^2 / steps_m, RDA of a tensor is

    (sum w |d| / sum w) * u / |u|    with    u = sum w_m d_m / |d_m|    (arXiv 2604.21428)

which is sum a_m d_m with coefficients a_m. They follow from the Gram matrix of the payloads
(``ops.gram``), so the existing outer step merges with them.

The products with the reports that are there already are taken when a report arrives. So a merge by
RDA reads the payloads once, in its outer step.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from ... import ops
from ...base.memory import empty_pages, memory_order
from ...methods.outer import OuterOptimizer, make_outer
from ...ops.wire import Layout, WireFormat
from ..model import layout_of
from ..rules import FusedState, fused_numbers

MERGES = ("mean", "rda")
# A mean of unit vectors that is shorter than this has no direction: fp32 values leave about 1e-7 of
# rounding errors in each unit vector.
LEAST_DIRECTION = 1e-6
# The outer step takes factors in fp32.
_LARGEST_FACTOR = torch.finfo(torch.float32).max
# Payloads in one call of ``ops.gram``.
MAX_GRAM = 64


def report_weight(tokens: int, steps: int) -> float:
    """Return tokens^2 / steps, the weight of a report before normalisation.

    Raises:
        ValueError: If a number is below 1.
    """
    if tokens < 1 or steps < 1:
        raise ValueError(f"tokens and steps of a report must be at least 1, got {tokens}, {steps}")
    return tokens * (tokens / steps)


def normalised(weights: Sequence[float]) -> list[float]:
    """Return the weights over their sum.

    Raises:
        ValueError: If there is no weight, or one is not finite and positive.
    """
    if not weights or not all(0 < weight < math.inf for weight in weights):
        raise ValueError(f"weights must be positive numbers, at least one, got {list(weights)}")
    total = sum(weights)
    return [weight / total for weight in weights]


def direction_coefficients(gram: Tensor, weights: Sequence[float]) -> list[float]:
    """Return the factors a_m of the payloads with which their sum is the RDA merge.

    A pseudo-gradient of zeros has a radius, 0, and no direction. If the weighted mean of the
    directions is shorter than ``LEAST_DIRECTION``, or a factor is too large for fp32, the factors
    are those of the mean.

    Args:
        gram: fp64 [M * M], from ``ops.gram``.
        weights: M positive numbers.

    Raises:
        ValueError: If sizes differ, or the matrix is not finite.
    """
    shares = normalised(weights)
    if gram.numel() != len(shares) ** 2:
        raise ValueError(
            f"the Gram matrix of {len(shares)} payloads has {len(shares) ** 2} elements, got "
            f"{gram.numel()}"
        )
    if not gram.isfinite().all():
        raise ValueError("the Gram matrix must be finite: a payload holds NaN or Inf")
    rows = gram.view(len(shares), len(shares)).tolist()
    radii = [math.sqrt(rows[i][i]) for i in range(len(shares))]
    b = [w / radius if radius else 0.0 for w, radius in zip(shares, radii, strict=True)]
    square = sum(b[i] * b[j] * rows[i][j] for i in range(len(b)) for j in range(len(b)))
    if not square >= LEAST_DIRECTION**2:
        return shares
    factor = sum(w * radius for w, radius in zip(shares, radii, strict=True)) / math.sqrt(square)
    factors = [factor * each for each in b]
    # The comparison is false for NaN too.
    return factors if all(each <= _LARGEST_FACTOR for each in factors) else shares


def products_with(
    others: Sequence[Tensor], payload: Tensor, layout: Layout, impl: str = ""
) -> list[float]:
    """Return the dot products of a payload with each other one, and with itself as the last."""
    products: list[float] = []
    # At least one call, which has the product of the payload with itself.
    for begin in range(0, max(1, len(others)), MAX_GRAM - 1):
        part = [*others[begin : begin + MAX_GRAM - 1], payload]
        last = _rows(part, layout, len(part) - 1, impl)[-len(part) :]
        products = [*products[:begin], *last.tolist()]
    return products


def _rows(payloads: Sequence[Tensor], layout: Layout, first_row: int, impl: str) -> Tensor:
    """Return the Gram matrix of up to 64 payloads from a row on."""
    out = torch.zeros(len(payloads) ** 2, dtype=torch.float64)
    ops.gram(
        payloads,
        out,
        0,
        layout.num_elements,
        *layout.whole[1:],
        first_row,
        impl=impl,
    )
    return out


# Tensors of fewer elements merge by the mean; the number is this library's choice.
LEAST_ELEMENTS = 1024


@dataclass(frozen=True)
class Piece:
    """Tensors of one fragment that share a payload.

    Attributes:
        indices: Places of the tensors in the fragment.
        num_elements: Elements of all of them.
        merge: "mean", or "rda" for a single tensor.
    """

    indices: tuple[int, ...]
    num_elements: int
    merge: str


def pieces_of(
    shapes: Sequence[Sequence[int]],
    merge: str = "mean",
    *,
    by_mean: Collection[int] = (),
    least: int = LEAST_ELEMENTS,
) -> list[Piece]:
    """Divide a fragment into pieces.

    With "mean" the fragment is one piece. With "rda" every matrix is a piece of its own; vectors,
    tensors of fewer than ``least`` elements and those in ``by_mean`` are one piece, which merges by
    the mean.

    Args:
        shapes: The shapes of the fragment's tensors.
        merge: One of ``MERGES``.
        by_mean: Places of tensors that always merge by the mean, such as embeddings.
        least: Least elements of a tensor that merges by RDA.

    Raises:
        ValueError: If ``merge`` is unknown, or the fragment has no element.
    """
    if merge not in MERGES:
        raise ValueError(f"merge must be one of {', '.join(MERGES)}, got {merge!r}")
    sizes = [prod(shape) for shape in shapes]
    if not sum(sizes):
        raise ValueError(f"a fragment needs at least one element, got shapes {list(shapes)}")
    alone = [
        i
        for i, shape in enumerate(shapes)
        if merge == "rda" and i not in by_mean and len(shape) > 1 and sizes[i] >= least
    ]
    rest = tuple(i for i in range(len(shapes)) if i not in alone)
    pieces = [Piece((i,), sizes[i], "rda") for i in alone]
    num_rest = sum(sizes[i] for i in rest)
    return [*pieces, Piece(rest, num_rest, "mean")] if num_rest else pieces


class Gathered:
    """The payloads that wait for their merge.

    Args:
        pieces, layouts: Of the fragment.
        impl: Force an implementation of the operators.
    """

    def __init__(self, pieces: Sequence[Piece], layouts: Sequence[Layout], impl: str = "") -> None:
        self._pieces, self._layouts, self._impl = pieces, layouts, impl
        self._payloads: dict[str, list[Tensor]] = {}
        # For each learner, in the order of arrival: by piece, the products of its payload with the
        # earlier ones and with itself; if the piece merges by the mean, with itself alone.
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


# Copies of at least this many bytes use huge pages.
_LARGE_BYTES = 1 << 22


def numbers_of(outer: OuterOptimizer) -> tuple[float | None, float, float, float]:
    """Return what ``FusedState`` takes of an outer optimizer.

    Raises:
        ValueError: If it is not SGD, HeavyBall or Nesterov.
    """
    numbers = fused_numbers(outer)
    if numbers is None:
        raise ValueError(
            "a decoupled merge takes SGD, HeavyBall or Nesterov as the outer optimizer, got "
            f"{type(outer).__name__}"
        )
    return numbers


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
        num_merges: Outer steps begun; a merge that raises in its step has moved some pieces.

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
        numbers = numbers_of(self.outer)
        self.layouts = [layout_of(piece.num_elements, wire) for piece in self.pieces]
        self._states = [
            FusedState(flatten(tensors, piece), 1, self.outer, *numbers) for piece in self.pieces
        ]
        self.values = [state.outer for state in self._states]
        self.momenta = [state.momentum for state in self._states]
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
            ValueError: If the factors are not known, and a payload has another size, or holds NaN
                or Inf. Then nothing is changed, ``num_merges`` included.
        """
        by_piece = list(zip(*payloads, strict=True))
        if factors is None:
            factors = self._factors(payloads, weights)
        lr = self.outer.lr
        rate = float(lr(self.num_merges) if callable(lr) else lr)
        self.num_merges += 1
        for index, each in enumerate(by_piece):
            self._step(index, each, factors[index], rate)
        return factors

    def _factors(
        self, payloads: Sequence[Sequence[Tensor]], weights: Sequence[float]
    ) -> list[list[float]]:
        gathered, names = Gathered(self.pieces, self.layouts, self.impl), []
        for number, each in enumerate(payloads):
            names.append(str(number))
            refusal = gathered.add(names[-1], list(each))
            if refusal:
                raise ValueError(refusal)
        return gathered.factors(names, weights)

    def _step(
        self, index: int, payloads: Sequence[Tensor], factors: Sequence[float], lr: float
    ) -> None:
        layout, state = self.layouts[index], self._states[index]
        state.step(payloads, factors, layout, 0, layout.num_elements, lr, impl=self.impl)


def _empty_like(values: Tensor) -> Tensor:
    """Return room for a copy; huge pages for a large one, since page faults outlast the merge."""
    if values.nbytes < _LARGE_BYTES:
        return torch.empty_like(values)
    return empty_pages(tuple(values.shape))


def flatten(tensors: Sequence[Tensor], piece: Piece) -> Tensor:
    """Return a copy of the piece's elements in memory order, fp32 [num_elements]."""
    return torch.cat([memory_order(tensors[i].detach()) for i in piece.indices]).float()


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
                *layout.whole,
                impl=self.impl,
            )
            parts.append(part)
        return torch.cat(parts)
