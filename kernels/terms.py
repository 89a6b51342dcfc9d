"""The terms of a weighted sum of payloads: a few are arguments, many are in a table on the device.

A term is a payload and its coefficient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .blocks import load_values

MAX_INLINE = 8  # the most terms that are arguments; each number of them needs its own compilation


@triton.jit
def sum_of_terms(terms, part, NUM_INLINE: tl.constexpr, FORM: tl.constexpr, FULL: tl.constexpr):
    """The weighted sum of the decoded payloads over a tile, in the order of the terms.

    Each product is rounded before it is added. ``terms`` are the payloads, the coefficients, the
    table, the number of terms, and the byte at which the run begins in each payload.
    """
    payloads, coefficients, table_ptr, num_terms, run_offset = terms
    if NUM_INLINE > 0:
        total = coefficients[0] * load_values(payloads[0] + run_offset, part, FORM, FULL)
        for i in tl.static_range(1, NUM_INLINE):
            total += coefficients[i] * load_values(payloads[i] + run_offset, part, FORM, FULL)
    else:
        total = _term(table_ptr, 0, run_offset, part, FORM, FULL)
        for i in range(1, num_terms):
            total += _term(table_ptr, i, run_offset, part, FORM, FULL)
    return total


@triton.jit
def _term(table_ptr, i, run_offset, part, FORM: tl.constexpr, FULL: tl.constexpr):
    address = tl.load(table_ptr + 2 * i)
    coefficient = tl.load(table_ptr + 2 * i + 1).to(tl.int32).to(tl.float32, bitcast=True)
    payload = address.to(tl.pointer_type(tl.uint8))
    return coefficient * load_values(payload + run_offset, part, FORM, FULL)


@dataclass(frozen=True)
class Terms:
    """Arguments of ``sum_of_terms``: payloads and coefficients, or a table with both."""

    payloads: tuple[Tensor, ...]
    coefficients: tuple[float, ...]
    table: Tensor | None
    count: int

    @property
    def num_inline(self) -> int:
        return len(self.payloads)


def make_terms(payloads: Sequence[Tensor], coefficients: Sequence[float]) -> Terms:
    """Return up to ``MAX_INLINE`` terms as arguments, or a larger number in a table."""
    factors = tuple(float(coefficient) for coefficient in coefficients)
    if len(payloads) <= MAX_INLINE:
        return Terms(tuple(payloads), factors, None, len(payloads))
    device = payloads[0].device
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"a CUDA graph can hold at most {MAX_INLINE} payloads in one operator, got "
            f"{len(payloads)}"
        )
    table = torch.empty(len(factors), 2, dtype=torch.int64, pin_memory=device.type == "cuda")
    table[:, 0] = torch.tensor([payload.data_ptr() for payload in payloads])
    table[:, 1] = torch.tensor(factors, dtype=torch.float32).view(torch.int32)
    return Terms((), (), table.to(device, non_blocking=True), len(payloads))
