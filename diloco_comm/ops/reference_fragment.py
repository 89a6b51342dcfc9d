"""A fragment in plain PyTorch: reading and writing elements of tensors, virtually concatenated.

Imports torch, nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def fp32(number: float) -> Tensor:
    return torch.tensor(number, dtype=torch.float32)


def normalised(weights: Sequence[float]) -> list[float]:
    """Return weights over their sum (fp64, in rank order), each rounded once to fp32."""
    total = sum(float(weight) for weight in weights)
    return [fp32(float(weight) / total).item() for weight in weights]


def flat(tensor: Tensor) -> Tensor:
    """View a dense tensor as one dimension, in the order of its memory."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def gather(tensors: Sequence[Tensor], begin: int, end: int) -> Tensor:
    """Return elements [begin, end) of the concatenation as fp32."""
    if not tensors:
        return torch.empty(0)
    return torch.cat([flat(tensor).float() for tensor in tensors])[begin:end]


def scatter(values: Tensor, tensors: Sequence[Tensor], begin: int) -> None:
    """Write values into elements begin, begin + 1, ... of the concatenation, rounded to nearest."""
    offset = 0
    for tensor in tensors:
        first = max(begin, offset)
        last = min(begin + values.numel(), offset + tensor.numel())
        if first < last:
            part = values[first - begin : last - begin]
            flat(tensor)[first - offset : last - offset] = part.to(tensor.dtype)
        offset += tensor.numel()


def total_elements(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


def runs_of(begin: int, end: int, run_elements: int) -> list[tuple[int, int, int]]:
    """Return (run index, first element, end) of the runs that cover [begin, end)."""
    firsts = range(begin, end, run_elements)
    return [(i // run_elements, i, min(i + run_elements, end)) for i in firsts]
