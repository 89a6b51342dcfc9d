"""Every operator in plain PyTorch: slow, obvious, and the truth that all others are compared with.

The functions have the names and arguments of ``torch.ops.diloco_comm.*`` (less ``impl``) and give
the same bytes. Arithmetic on elements is IEEE fp32, one rounding for each operation, sub-normals
kept; ``norms`` and ``gram`` add in fp64, and rotations and digests compute with integers.
``all_reduce`` is what a whole exchange must leave behind, computed in one process.

This module imports torch and, from this package, only ``wire.py`` and the ``reference_*`` modules.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from . import reference_codec, reference_rotation, reference_sparse
from .reference_codec import HUGE, SMALLEST_SCALE
from .wire import Layout, WireFormat, encoding_keys, mean_layout, num_phases

STEP = 0x9E3779B97F4A7C15
FACTOR = 0xBF58476D1CE4E5B9
SHIFT = 29
MASK64 = (1 << 64) - 1


def _signed(number: int) -> int:
    """Return the int64 that has the bits of a number mod 2^64."""
    number &= MASK64
    return number - (1 << 64) if number >> 63 else number


def _shifted(words: Tensor, bits: int) -> Tensor:
    """Shift int64 words to the right and fill up with zeros."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)


def _words(tensor: Tensor) -> Tensor:
    """Return the bytes of a dense tensor as int64 words, the last filled up with zero bytes."""
    flat = tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    padded = torch.zeros(-(-flat.numel() // 8) * 8, dtype=torch.uint8, device=tensor.device)
    padded[: flat.numel()] = flat
    return padded.view(torch.int64)


def products(words: Tensor, first_word: int = 0) -> Tensor:
    """Return what each word adds to a digest's sum of products.

    Args:
        words: int64 [..., n]; each row holds consecutive words.
        first_word: Index of a row's first word in the tensor that is digested.
    """
    index = torch.arange(words.shape[-1], dtype=torch.int64, device=words.device)
    u = words ^ ((index + (first_word + 1)) * _signed(STEP))
    v = (u ^ _shifted(u, SHIFT)) * _signed(FACTOR)
    high = _shifted(v, 32)
    return ((v ^ high) & 0xFFFFFFFF) * high


def digest(tensor: Tensor, sums: Tensor, first_word: int = 0, max_blocks: int = 0) -> None:
    """Add the sum of products and the sum of words of a tensor's bytes to ``sums``."""
    words = _words(tensor)
    sums += torch.stack([products(words, first_word).sum(), words.sum()])


def mix(z: int) -> int:
    """Scramble a 64-bit number: the finaliser of splitmix64."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
    return z ^ (z >> 31)


def finish_digest(product: int, sum: int, num_bytes: int) -> int:
    """Return the digest of ``num_bytes`` bytes from their two sums mod 2^64."""
    return mix((product & MASK64) ^ mix((sum & MASK64) ^ mix(num_bytes)))


# ----------------------------------------------------------------------------------- fragment


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
    """Return elements [begin, end) of a fragment, the concatenation of its tensors, as fp32."""
    if not tensors:
        return torch.empty(0)
    return torch.cat([flat(tensor).float() for tensor in tensors])[begin:end]


def _pieces(values: Tensor, tensors: Sequence[Tensor], begin: int) -> list[tuple[Tensor, Tensor]]:
    """Pair values for elements begin, begin + 1, ... of a fragment with the places they belong to.

    Returns:
        For each tensor that has some of these elements: the values, and the view of the tensor's
        elements that they are for.
    """
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
    """Write values into elements begin, begin + 1, ... of a fragment, rounded to nearest."""
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
    # Among numbers of one sign a larger magnitude has larger bits, so that bits + 1 and bits - 1
    # are the neighbouring values.
    neighbour = nearest.view(torch.int16) + torch.where(nearest.abs() < x.abs(), 1, -1)
    return torch.where(is_beyond, neighbour.to(torch.int16).view(target.dtype), nearest)


def total_elements(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() for tensor in tensors)


def runs_of(begin: int, end: int, run_elements: int) -> list[tuple[int, int, int]]:
    """Return (run index, first element, end) of the runs that cover [begin, end)."""
    firsts = range(begin, end, run_elements)
    return [(i // run_elements, i, min(i + run_elements, end)) for i in firsts]


# ----------------------------------------------------------------------------------- sums


NORM_TILE = 65536
NORM_LANES = 16


def ordered_sum(x: Tensor) -> float:
    """Return the sum of 1-D fp64 values.

    Tiles of 65536 elements are added one after the other; in a tile sixteen partial sums take every
    sixteenth element, then the upper half is added to the lower half until one is left.
    """
    return _one_after_the_other(_lane_sums(x, NORM_TILE))


def sum_by_blocks(x: Tensor, block_size: int) -> float:
    """Return the sum of 1-D fp64 values.

    Blocks are summed as the tiles of ``ordered_sum``, and added one after the other in each tile of
    65536 elements; then tiles are added one after the other.
    """
    blocks = _lane_sums(x, block_size).split(NORM_TILE // block_size)
    return _one_after_the_other([_one_after_the_other(tile) for tile in blocks])


def _one_after_the_other(values: Tensor | list[float]) -> float:
    total = 0.0
    for value in values if isinstance(values, list) else values.tolist():
        total += value
    return total


def _lane_sums(x: Tensor, size: int) -> Tensor:
    """Return the sum of each ``size`` consecutive elements, added as ``ordered_sum`` says."""
    parts = torch.nn.functional.pad(x, (0, -x.numel() % size)).view(
        -1, size // NORM_LANES, NORM_LANES
    )
    lanes = torch.zeros(parts.shape[0], NORM_LANES, dtype=torch.float64)
    for row in range(parts.shape[1]):
        lanes = lanes + parts[:, row]
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes.flatten()


# ----------------------------------------------------------------------------------- runs


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


# ---------------------------------------------------------------------------------------- reference


_F = TypeVar("_F", bound=Callable)


def _exact(function: _F) -> _F:
    """Run without autograd and with sub-normals kept, and restore the caller's setting."""

    @functools.wraps(function)
    def wrapper(*args, **kwargs):  # type: ignore[no-untyped-def]
        flushes = (torch.tensor([SMALLEST_SCALE]) * 0.5).item() == 0.0
        torch.set_flush_denormal(False)
        try:
            with torch.no_grad():
                return function(*args, **kwargs)
        finally:
            torch.set_flush_denormal(flushes)

    return wrapper  # type: ignore[return-value]


def _combine(
    payloads: Sequence[Tensor],
    coefficients: Sequence[float],
    run_idx: int,
    run_elements: int,
    wire: WireFormat,
    count: int,
) -> Tensor:
    """Return one run's sum of coefficient * decoded payload, added in the order of the payloads."""
    run_bytes = wire.run_bytes(run_elements)
    total = torch.empty(0)
    for i, (payload, coefficient) in enumerate(zip(payloads, coefficients, strict=True)):
        run = payload[run_idx * run_bytes : (run_idx + 1) * run_bytes]
        term = fp32(coefficient) * decode_run(run, run_elements, wire, count)
        total = term if i == 0 else total + term
    return total


@_exact
def encode(
    outer: Tensor | None,
    params: Sequence[Tensor],
    payload: Tensor,
    begin: int,
    end: int,
    run_elements: int,
    wire: str,
    block_size: int,
    stochastic: bool = False,
    rng_key: int = 0,
    residual: Tensor | None = None,
    new_residual: Tensor | None = None,
    nonfinite: Tensor | None = None,
    outer_begin: int = 0,
    max_blocks: int = 0,
) -> None:
    """Encode elements [begin, end) of c(outer) - params; without ``outer``, of the params.

    c(x) is x rounded to nearest in the dtype of the element's parameter. A residual is added first.
    """
    form = WireFormat(wire, block_size)
    run_bytes = form.run_bytes(run_elements)
    bad = 0
    for run_idx, first, last in runs_of(begin, end, run_elements):
        x = gather(params, first, last)
        if outer is not None:
            here = slice(first - outer_begin, last - outer_begin)
            x = as_written(outer[here], params, first) - x
        if residual is not None:
            x = x + residual[first:last].float()
        run = payload[run_idx * run_bytes : (run_idx + 1) * run_bytes]
        has_feedback = new_residual is not None
        bad += encode_run(x, run, run_elements, form, first, stochastic, rng_key, has_feedback)
        if new_residual is not None:
            error = x - decode_run(run, run_elements, form, last - first)
            new_residual[first:last] = error.to(new_residual.dtype)
    if nonfinite is not None:
        nonfinite += bad


@_exact
def reduce(
    received: Tensor,
    result: Tensor,
    weights: Sequence[float],
    num_elements: int,
    run_elements: int,
    wire: str,
    block_size: int,
    stochastic: bool = False,
    rng_key: int = 0,
    index_begin: int = 0,
    residual: Tensor | None = None,
    new_residual: Tensor | None = None,
    nonfinite: Tensor | None = None,
    max_blocks: int = 0,
) -> None:
    """Decode one run from each rank, take the weighted sum in rank order, encode it once."""
    form = WireFormat(wire, block_size)
    runs = list(received.view(len(weights), form.run_bytes(run_elements)))
    x = _combine(runs, weights, 0, run_elements, form, num_elements)
    if residual is not None:
        x = x + residual[:num_elements].float()
    has_feedback = new_residual is not None
    bad = encode_run(x, result, run_elements, form, index_begin, stochastic, rng_key, has_feedback)
    if new_residual is not None:
        error = x - decode_run(result, run_elements, form, num_elements)
        new_residual[:num_elements] = error.to(new_residual.dtype)
    if nonfinite is not None:
        nonfinite += bad


def _merge(outer: Tensor, params: Sequence[Tensor], begin: int, alpha: float) -> None:
    """Merge outer values of elements begin, begin + 1, ... into the parameters."""
    if alpha == 0:
        scatter(outer, params, begin)
    else:
        blend(outer, params, begin, alpha)


@_exact
def outer_step(
    outer: Tensor,
    momentum: Tensor | None,
    params: Sequence[Tensor],
    payloads: Sequence[Tensor],
    coefficients: Sequence[float],
    begin: int,
    end: int,
    run_elements: int,
    wire: str,
    block_size: int,
    optimizer: str,
    lr: float,
    mu: float = 0.0,
    alpha: float = 0.0,
    clip: float = math.inf,
    verdict: Tensor | None = None,
    outer_begin: int = 0,
) -> None:
    """Apply sgd, heavy_ball or nesterov to outer, and merge it into the parameters."""
    if verdict is not None and verdict.item() != 0:
        return
    form = WireFormat(wire, block_size)
    for run_idx, first, last in runs_of(begin, end, run_elements):
        g = _combine(payloads, coefficients, run_idx, run_elements, form, last - first)
        step, here = g, slice(first - outer_begin, last - outer_begin)
        if optimizer != "sgd":
            assert momentum is not None
            m = fp32(mu) * momentum[here] + g
            m = torch.minimum(torch.maximum(m, fp32(-clip)), fp32(clip))
            momentum[here] = m
            step = m if optimizer == "heavy_ball" else g + fp32(mu) * m
        new = outer[here] - fp32(lr) * step
        outer[here] = new
        _merge(new, params, first, alpha)


@_exact
def outer_step_adam(
    outer: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    params: Sequence[Tensor],
    payloads: Sequence[Tensor],
    coefficients: Sequence[float],
    begin: int,
    end: int,
    run_elements: int,
    wire: str,
    block_size: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    alpha: float = 0.0,
    verdict: Tensor | None = None,
    outer_begin: int = 0,
) -> None:
    """Apply Adam's step number ``step`` (the first is 1) to outer, and merge outer into params."""
    if verdict is not None and verdict.item() != 0:
        return
    form = WireFormat(wire, block_size)
    step_size = fp32(lr / (1 - beta1**step))
    correction = fp32(math.sqrt(1 - beta2**step))
    for run_idx, first, last in runs_of(begin, end, run_elements):
        g = _combine(payloads, coefficients, run_idx, run_elements, form, last - first)
        here = slice(first - outer_begin, last - outer_begin)
        m = fp32(beta1) * exp_avg[here] + fp32(1 - beta1) * g
        v = fp32(beta2) * exp_avg_sq[here] + (fp32(1 - beta2) * g) * g
        exp_avg[here] = m
        exp_avg_sq[here] = v
        # torch's fp32 square root is not the IEEE one; fp64's, rounded once more, is.
        root = v.double().sqrt().float()
        new = outer[here] - (step_size * m) / (root / correction + fp32(eps))
        outer[here] = new
        _merge(new, params, first, alpha)


@_exact
def outer_step_delayed(
    outer: Tensor,
    momentum: Tensor | None,
    pending: Tensor | None,
    payloads: Sequence[Tensor],
    coefficients: Sequence[float],
    begin: int,
    end: int,
    run_elements: int,
    wire: str,
    block_size: int,
    lr: float,
    mu: float = 0.0,
    direct: float = 1.0,
    ahead: float = 0.0,
    behind: float = 0.0,
    first: bool = False,
    last: bool = False,
    verdict: Tensor | None = None,
    outer_begin: int = 0,
) -> None:
    """Add a gradient to those that wait in ``pending``; the last of a period takes the step."""
    if verdict is not None and verdict.item() != 0:
        return
    form = WireFormat(wire, block_size)
    for run_idx, start, stop in runs_of(begin, end, run_elements):
        d = _combine(payloads, coefficients, run_idx, run_elements, form, stop - start)
        here = slice(start - outer_begin, stop - outer_begin)
        if not first:
            assert pending is not None
            d = pending[here] + d
        if not last:
            assert pending is not None
            pending[here] = d
            continue
        step = fp32(direct) * d
        if momentum is not None:
            old = momentum[here].clone()
            m = fp32(mu) * old + d
            momentum[here] = m
            step = step + fp32(ahead) * m
            if fp32(behind) != 0:
                step = step + fp32(behind) * old
        outer[here] = outer[here] - fp32(lr) * step


@_exact
def decode(
    payloads: Sequence[Tensor],
    coefficients: Sequence[float],
    outs: Sequence[Tensor],
    begin: int,
    end: int,
    run_elements: int,
    wire: str,
    block_size: int,
    max_blocks: int = 0,
) -> None:
    """Write the weighted sum of the decoded payloads into elements [begin, end) of outs."""
    form = WireFormat(wire, block_size)
    for run_idx, first, last in runs_of(begin, end, run_elements):
        total = _combine(payloads, coefficients, run_idx, run_elements, form, last - first)
        scatter(total, outs, first)


@_exact
def merge(outer: Tensor, params: Sequence[Tensor], alpha: float = 0.0) -> None:
    """Set params to outer, rounded to nearest, or to alpha * params + (1 - alpha) * outer.

    The weighted sum is fp32. Its rounding to the dtype of a parameter is in the direction of
    c(outer), so that a merge never takes a parameter farther from c(outer).
    """
    _merge(outer, params, 0, alpha)


@_exact
def norms(outer: Tensor | None, params: Sequence[Tensor], out: Tensor) -> None:
    """Write the squared norm of c(outer) - params, or params, and the number of bad elements.

    The differences are fp32, their squares and sums fp64. The order of the sum is fixed: tiles of
    65536 elements are added one after the other; in a tile sixteen partial sums take every
    sixteenth element, then the upper half is added to the lower half until one is left. Bad
    elements count as zero.
    """
    x = gather(params, 0, total_elements(params))
    if outer is not None:
        x = as_written(outer, params, 0) - x
    bad = ~(x.abs() <= HUGE)
    square = torch.where(bad, 0.0, x).double() ** 2
    out[0] = ordered_sum(square)
    out[1] = float(bad.sum())


@_exact
def gram(
    payloads: Sequence[Tensor],
    out: Tensor,
    begin: int,
    end: int,
    num_elements: int,
    run_elements: int,
    wire: str,
    block_size: int,
    first_row: int = 0,
) -> None:
    """Write the dot products of all pairs of decoded payloads; ``sum_by_blocks`` adds in fp64."""
    decoded = [torch.zeros(end - begin, dtype=torch.float32) for _ in payloads]
    form = WireFormat(wire, block_size)
    for run_idx, first, last in runs_of(begin, end, run_elements):
        for payload, flat in zip(payloads, decoded, strict=True):
            values = _combine([payload], [1.0], run_idx, run_elements, form, last - first)
            flat[first - begin : last - begin] = values
    matrix = out.view(len(payloads), len(payloads))
    for i in range(first_row, len(payloads)):
        for j in range(i + 1):
            product = decoded[i].double() * decoded[j].double()
            matrix[i, j] = matrix[j, i] = sum_by_blocks(product, block_size)


@_exact
def all_reduce(
    params: Sequence[Sequence[Tensor]],
    layout: Layout,
    weights: Sequence[float] | None = None,
    *,
    outers: Sequence[Tensor] | None = None,
    stochastic: bool = False,
    seed: int = 0,
    replicas: Sequence[int] | None = None,
    round: int = 0,
    fragment: int = 0,
    residuals: Sequence[Tensor] | None = None,
    new_residuals: Sequence[Tensor] | None = None,
    reduce_residual: Tensor | None = None,
    new_reduce_residual: Tensor | None = None,
    nonfinite: Tensor | None = None,
) -> list[tuple[Tensor, float]]:
    """Return an exchange's result: payloads, laid out as ``mean_layout``, and their coefficients.

    The averaged gradient is the sum of coefficient * decoded payload.

    Args:
        params: The fragment's tensors of each rank, in rank order.
        layout: The fragment's layout, planned for ``len(params)`` ranks.
        weights: One positive number a rank; equal by default.
        outers: fp32 [N] outer parameters of each rank; without them the parameters are averaged.
        stochastic: Round stochastically instead of to nearest.
        seed, replicas, round, fragment: The random numbers' keys are made of these. ``replicas``
            are the ranks' replica ids, by default 0, 1, ...
        residuals, new_residuals: [N] for each rank: the error feedback of the ranks' own payloads.
        reduce_residual, new_reduce_residual: [N]: the error feedback of the encoding of the mean.
            In an exchange each rank holds the elements of the runs it owns, and no others.
        nonfinite: int64 [world size]; the number of bad elements that each rank met is added.
    """
    world_size, wire = len(params), layout.wire
    replicas = range(world_size) if replicas is None else replicas
    coefficients = normalised(weights or [1.0] * world_size)
    form = (layout.run_elements, wire.name, wire.block_size)
    keys = [encoding_keys(wire, stochastic, seed, each, round, fragment) for each in replicas]
    counts = torch.zeros(world_size, 1, dtype=torch.int64)
    payloads = [torch.zeros(layout.payload_bytes, dtype=torch.uint8) for _ in params]
    for rank, payload in enumerate(payloads):
        old = residuals[rank] if residuals else None
        new = new_residuals[rank] if new_residuals else None
        encode(
            outers[rank] if outers else None, params[rank], payload, 0, layout.num_elements, *form,
            stochastic, keys[rank][0], old, new, counts[rank],
        )  # fmt: skip
    terms = list(zip(payloads, coefficients, strict=True))
    if num_phases(wire, world_size) == 2:
        mean = mean_layout(layout, world_size)
        average = torch.zeros(mean.payload_bytes, dtype=torch.uint8)
        for run_idx in range(layout.num_runs):
            owner = run_idx % world_size
            begin, end = layout.run_range(run_idx)
            run = slice(run_idx * layout.run_bytes, (run_idx + 1) * layout.run_bytes)
            if mean != layout:
                x = _combine(payloads, coefficients, run_idx, form[0], wire, end - begin)
                part = average[run_idx * mean.run_bytes : (run_idx + 1) * mean.run_bytes]
                how = (0, False, keys[owner][1], False)
                counts[owner] += encode_run(x, part, form[0], mean.wire, *how)
                continue
            old = None if reduce_residual is None else reduce_residual[begin:end]
            new = None if new_reduce_residual is None else new_reduce_residual[begin:end]
            reduce(
                torch.cat([payload[run] for payload in payloads]), average[run], coefficients,
                end - begin, *form, stochastic, keys[owner][1], begin, old, new, counts[owner],
            )  # fmt: skip
        terms = [(average, 1.0)]
    if nonfinite is not None:
        nonfinite += counts.flatten()
    return terms
