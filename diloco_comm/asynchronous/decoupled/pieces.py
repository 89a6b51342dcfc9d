"""Which tensors of a fragment are encoded and merged together."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import prod

from .merging import MERGES

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
