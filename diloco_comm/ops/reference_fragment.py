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


def _pieces(values: Tensor, tensors: Sequence[Tensor], begin: int) -> list[tuple[Tensor, Tensor]]:
    """Pair values of elements begin, begin + 1, ... with the tensors' own parts."""
    pieces, offset = [], 0
    for tensor in tensors:
        first = max(begin, offset)
        last = min(begin + values.numel(), offset + tensor.numel())
        if first < last:
            own = flat(tensor)[first - offset : last - offset]
            pieces.append((values[first - begin : last - begin], own))
        offset += tensor.numel()
    return pieces


def scatter(values: Tensor, tensors: Sequence[Tensor], begin: int) -> None:
    """Write values into elements begin, begin + 1, ... of the concatenation, rounded to nearest."""
    for part, own in _pieces(values, tensors, begin):
        own.copy_(part.to(own.dtype))


def as_written(values: Tensor, tensors: Sequence[Tensor], begin: int) -> Tensor:
    """Return c(values), fp32: what ``scatter`` would leave in the tensors."""
    pieces = _pieces(values, tensors, begin)
    return torch.cat([values[:0], *(part.to(own.dtype).float() for part, own in pieces)])


def blend(values: Tensor, tensors: Sequence[Tensor], begin: int, alpha: float) -> None:
    """Set elements begin, ... to alpha * element + (1 - alpha) * value, rounded toward c(value)."""
    for part, own in _pieces(values, tensors, begin):
        mean = fp32(alpha) * own.float() + fp32(1 - alpha) * part
        own.copy_(_rounded_toward(mean, part.to(own.dtype)))


def _rounded_toward(x: Tensor, target: Tensor) -> Tensor:
    """Round fp32 values to the dtype of the targets, in the direction of the targets.

    The result is x rounded to nearest where that value lies on the target's side of x, and else
    the neighbour on the target's side. Above 65504 in fp16 the neighbour above is Inf, and from Inf
    the neighbour below is 65504. A zero has the sign of x. NaN is rounded as ``Tensor.to`` does.
    """
    nearest = x.to(target.dtype)
    if target.dtype == torch.float32:
        return nearest
    is_beyond = torch.where(x >= target, nearest > x, nearest < x)
    # The magnitudes of a sign are in the order of their bits.
    neighbour = nearest.view(torch.int16) + torch.where(nearest.abs() < x.abs(), 1, -1)
    return torch.where(is_beyond, neighbour.to(torch.int16).view(target.dtype), nearest)


def total_elements(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


def runs_of(begin: int, end: int, run_elements: int) -> list[tuple[int, int, int]]:
    """Return (run index, first element, end) of the runs that cover [begin, end)."""
    firsts = range(begin, end, run_elements)
    return [(i // run_elements, i, min(i + run_elements, end)) for i in firsts]
