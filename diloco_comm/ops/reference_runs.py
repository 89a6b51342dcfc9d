"""Encode and decode one run in plain PyTorch, by the family of its wire."""

from __future__ import annotations

from torch import Tensor

from . import reference_codec, reference_rotation, reference_sparse
from .wire import WireFormat


def encode_run(
    x: Tensor,
    run: Tensor,
    run_elements: int,
    wire: WireFormat,
    first_index: int,
    stochastic: bool,
    key: int,
    has_feedback: bool,
) -> int:
    """Encode x into one run of a payload and return the number of bad elements.

    Args:
        first_index: Index in the fragment of the first element, for stochastic rounding.
        has_feedback: The rounding errors are kept for the next encoding; a rotated wire then takes
            its least squares scale.
    """
    if wire.is_rotated:
        return reference_rotation.encode_run(x, run, run_elements, wire, key, has_feedback)
    if wire.is_sparse:
        return reference_sparse.encode_run(x, run, run_elements, wire)
    return reference_codec.encode_run(x, run, run_elements, wire, first_index, stochastic, key)


def decode_run(run: Tensor, run_elements: int, wire: WireFormat, count: int) -> Tensor:
    """Return the first ``count`` elements of one run as fp32."""
    if wire.is_rotated:
        return reference_rotation.decode_run(run, run_elements, wire, count)
    if wire.is_sparse:
        return reference_sparse.decode_run(run, run_elements, wire, count)
    return reference_codec.decode_run(run, run_elements, wire, count)
