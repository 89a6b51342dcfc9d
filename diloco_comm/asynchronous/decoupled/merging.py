"""How much each report counts in a merge: the mean, or radius and direction apart (RDA).

With d_m the decoded pseudo-gradient of learner m and w_m = tokens_m^2 / steps_m, RDA of a tensor is

    (sum w |d| / sum w) * u / |u|    with    u = sum w_m d_m / |d_m|    (arXiv 2604.21428)

which is sum a_m d_m with coefficients a_m. They follow from the Gram matrix of the payloads
(``ops.gram``), so the existing outer step merges with them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ... import ops
from ...ops.wire import Layout

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


def merge_coefficients(
    merge: str, payloads: Sequence[Tensor], layout: Layout, weights: Sequence[float], impl: str = ""
) -> list[float]:
    """Return the factors of the payloads of one tensor, or of several that merge by the mean.

    Args:
        merge: One of ``MERGES``.
        payloads: One payload of each report, on the CPU.
        layout: Where the elements lie in the payloads.
        weights: One positive number for each report.
        impl: Force an implementation of the operators.
    """
    if merge == "mean":
        return normalised(weights)
    return direction_coefficients(gram_of(payloads, layout, impl), weights)


def gram_of(payloads: Sequence[Tensor], layout: Layout, impl: str = "") -> Tensor:
    """Return the Gram matrix of M whole payloads, fp64 [M * M]."""
    count = len(payloads)
    if count <= MAX_GRAM:
        return _rows(payloads, layout, 0, impl)
    matrix = torch.zeros(count, count, dtype=torch.float64)
    for i, payload in enumerate(payloads):
        row = torch.tensor(products_with(payloads[:i], payload, layout, impl), dtype=torch.float64)
        matrix[i, : i + 1] = matrix[: i + 1, i] = row
    return matrix.flatten()


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
    wire = layout.wire
    ops.gram(
        payloads,
        out,
        0,
        layout.num_elements,
        layout.num_elements,
        layout.run_elements,
        wire.name,
        wire.block_size,
        first_row,
        impl=impl,
    )
    return out
