"""The operators of ``torch.ops.diloco_comm`` in Triton, with the same bytes.

The arguments are those of the schemas, less ``impl``, and with one ``layout`` for the three numbers
of a wire's layout (``run_elements``, ``wire``, ``block_size``).

For CUDA tensors, and for CPU tensors when Triton runs as an interpreter (``TRITON_INTERPRET=1``).
An operator is one launch on the current stream, whatever the number of tensors (norms: two);
nothing waits for the device. The first call with tensors that were not met before, or lie elsewhere
than they did, makes tables of them (``tiles.py``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from . import decode as decode_kernels
from . import digest as digest_kernels
from . import encode as encode_kernels
from . import norms as norms_kernels
from . import step as step_kernels
from .checks import (
    MAX_TERMS,
    RunLayout,
    check_count,
    check_digest,
    check_flat,
    check_flat_of,
    check_residuals,
    check_terms,
)
from .launch import (
    PROGRAMS,
    bounded,
    check_max_blocks,
    geometry,
    launch,
    mark_written,
    span_of,
    tile_of,
    tiles_of,
)
from .terms import make_terms

_PLAIN_BLOCK = 256  # rows of a tile where no wire says otherwise
_LARGEST_FLOAT = torch.finfo(torch.float32).max


def is_interpreted() -> bool:
    """Return whether the kernels run in Triton's interpreter, on CPU tensors."""
    return not isinstance(encode_kernels._encode_kernel, triton.JITFunction)


def encode(
    outer: Tensor | None,
    params: Sequence[Tensor],
    payload: Tensor,
    begin: int,
    end: int,
    layout: RunLayout,
    stochastic: bool = False,
    rng_key: int = 0,
    residual: Tensor | None = None,
    new_residual: Tensor | None = None,
    nonfinite: Tensor | None = None,
    outer_begin: int = 0,
    max_blocks: int = 0,
) -> None:
    """Encode c(outer) - params [+ residual], or params, of elements [begin, end)."""
    check_max_blocks(max_blocks)
    device = payload.device
    tile = tile_of("encode", layout)
    tiles = tiles_of("params", params, device, layout.run_elements, tile)
    num_elements = tiles.num_elements
    layout.check_range(begin, end, num_elements)
    layout.check_payload("payload", payload, -(-end // layout.run_elements), device)
    if outer is not None:
        layout.check_window(outer, outer_begin, begin, end, num_elements, device)
    check_residuals(residual, new_residual, num_elements, device)
    check_count("nonfinite", nonfinite, device)
    num_programs, where = span_of(tiles.tiles_per_run, layout, begin, end)
    launch(
        "encode", encode_kernels._encode_kernel, num_programs, device,
        outer, tiles.tiles, tiles.segments, payload, residual, new_residual, nonfinite,
        *where, outer_begin // layout.run_elements, rng_key,
        **geometry("encode", layout), QMAX=layout.qmax,
        STOCHASTIC=stochastic and layout.has_element_codes, DTYPE_SET=tiles.dtype_set,
    )  # fmt: skip


def reduce(
    received: Tensor,
    result: Tensor,
    weights: Sequence[float],
    num_elements: int,
    layout: RunLayout,
    stochastic: bool = False,
    rng_key: int = 0,
    index_begin: int = 0,
    residual: Tensor | None = None,
    new_residual: Tensor | None = None,
    nonfinite: Tensor | None = None,
    max_blocks: int = 0,
) -> None:
    """Decode one run from each rank, take the weighted sum in rank order, encode it once."""
    device, run_elements, block_size = result.device, layout.run_elements, layout.block_size
    if not 0 <= num_elements <= run_elements:
        raise ValueError(
            f"num_elements must lie in [0, run_elements = {run_elements}], got {num_elements}"
        )
    if index_begin < 0 or (num_elements > 0 and index_begin % block_size):
        raise ValueError(
            f"index_begin must be a multiple of block_size {block_size}, got {index_begin}"
        )
    if not 1 <= len(weights) <= MAX_TERMS:
        raise ValueError(f"weights must hold 1 to {MAX_TERMS} numbers, got {len(weights)}")
    layout.check_payload("received", received, len(weights), device)
    run_bytes = layout.run_bytes
    if received.numel() != len(weights) * run_bytes:
        raise ValueError(
            f"received must hold {len(weights)} runs, one for each weight, got "
            f"{received.numel()} bytes"
        )
    layout.check_payload("result", result, 1, device)
    check_residuals(residual, new_residual, num_elements, device)
    check_count("nonfinite", nonfinite, device)
    terms = make_terms(received.split(run_bytes), weights)
    num_tiles = -(-num_elements // tile_of("reduce", layout))
    num_programs, is_bounded = bounded(num_tiles, max_blocks)
    launch(
        "reduce", encode_kernels._reduce_kernel, num_programs, device,
        terms.payloads, terms.coefficients, terms.table, terms.count,
        result, residual, new_residual, nonfinite,
        layout.code_offset, num_elements, rng_key, index_begin,
        NUM_INLINE=terms.num_inline, **geometry("reduce", layout), QMAX=layout.qmax,
        STOCHASTIC=stochastic and layout.has_element_codes, IS_BOUNDED=is_bounded,
    )  # fmt: skip


def outer_step(
    outer: Tensor,
    momentum: Tensor | None,
    params: Sequence[Tensor],
    payloads: Sequence[Tensor],
    coefficients: Sequence[float],
    begin: int,
    end: int,
    layout: RunLayout,
    optimizer: str,
    lr: float,
    mu: float = 0.0,
    alpha: float = 0.0,
    clip: float = math.inf,
    verdict: Tensor | None = None,
    outer_begin: int = 0,
) -> None:
    """Apply sgd, heavy_ball or nesterov to outer, and merge it into the parameters."""
    if optimizer not in ("sgd", "heavy_ball", "nesterov"):
        raise ValueError(f"optimizer must be sgd, heavy_ball or nesterov, got {optimizer!r}")
    if optimizer != "sgd" and momentum is None:
        raise ValueError(f"optimizer {optimizer} needs a momentum tensor, got None")
    if not clip > 0:
        raise ValueError(f"clip must be positive, got {clip}")
    # A schema cannot say inf: a bound that fp32 cannot hold is none.
    bound = math.inf if clip > _LARGEST_FLOAT else float(clip)
    _step(
        outer, None if optimizer == "sgd" else momentum, None, params, payloads, coefficients,
        begin, end, layout, optimizer, alpha, verdict, outer_begin,
        (float(lr), float(mu), bound), (0.0, 0.0, 0.0, 0.0, 0.0),
    )  # fmt: skip


def outer_step_adam(
    outer: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    params: Sequence[Tensor],
    payloads: Sequence[Tensor],
    coefficients: Sequence[float],
    begin: int,
    end: int,
    layout: RunLayout,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    step: int,
    alpha: float = 0.0,
    verdict: Tensor | None = None,
    outer_begin: int = 0,
) -> None:
    """Apply Adam's step number ``step`` (the first is 1) to outer, and merge it."""
    if step < 1:
        raise ValueError(f"step counts from 1, got {step}")
    step_size = lr / (1.0 - beta1**step)
    correction = math.sqrt(1.0 - beta2**step)
    _step(
        outer, exp_avg, exp_avg_sq, params, payloads, coefficients,
        begin, end, layout, "adam", alpha, verdict, outer_begin,
        (step_size, float(beta1), math.inf),
        (1.0 - beta1, float(beta2), 1.0 - beta2, correction, float(eps)),
    )  # fmt: skip


def _step(
    outer: Tensor,
    momentum: Tensor | None,
    second: Tensor | None,
    params: Sequence[Tensor],
    payloads: Sequence[Tensor],
    coefficients: Sequence[float],
    begin: int,
    end: int,
    layout: RunLayout,
    optimizer: str,
    alpha: float,
    verdict: Tensor | None,
    outer_begin: int,
    constants: tuple[float, float, float],
    adam: tuple[float, float, float, float, float],
) -> None:
    device = outer.device
    tile = tile_of("outer_step", layout)
    tiles = tiles_of("params", params, device, layout.run_elements, tile)
    num_elements = tiles.num_elements
    layout.check_range(begin, end, num_elements)
    layout.check_window(outer, outer_begin, begin, end, num_elements, device)
    for name, tensor in {"momentum": momentum, "exp_avg_sq": second}.items():
        if tensor is not None:
            check_flat_of(name, tensor, outer.numel(), device, "outer")
    check_terms(payloads, coefficients, layout, end, device)
    check_count("verdict", verdict, device)
    terms = make_terms(payloads, coefficients)
    num_programs, where = span_of(tiles.tiles_per_run, layout, begin, end)
    launch(
        "outer_step", step_kernels._step_kernel, num_programs, device,
        outer, momentum, second, tiles.tiles, tiles.segments,
        terms.payloads, terms.coefficients, terms.table, terms.count, verdict,
        *where, outer_begin // layout.run_elements, *constants, float(alpha), 1.0 - alpha, *adam,
        NUM_INLINE=terms.num_inline, **geometry("outer_step", layout), OPTIMIZER=optimizer,
        HAS_ALPHA=alpha != 0, DTYPE_SET=tiles.dtype_set,
    )  # fmt: skip
    mark_written(params)


def outer_step_delayed(
    outer: Tensor,
    momentum: Tensor | None,
    pending: Tensor | None,
    payloads: Sequence[Tensor],
    coefficients: Sequence[float],
    begin: int,
    end: int,
    layout: RunLayout,
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
    """Add an arrival to what is pending; the last of a period takes the outer step."""
    # The fragment ends where outer ends.
    device, num_elements = outer.device, max(outer_begin, 0) + outer.numel()
    if pending is None and not (first and last):
        raise ValueError(
            "an arrival that is not both first and last needs a pending tensor, got None"
        )
    layout.check_range(begin, end, num_elements)
    momentum = momentum if last else None
    layout.check_window(outer, outer_begin, begin, end, num_elements, device)
    for name, tensor in {"momentum": momentum, "pending": pending}.items():
        if tensor is not None:
            check_flat_of(name, tensor, outer.numel(), device, "outer")
    check_terms(payloads, coefficients, layout, end, device)
    check_count("verdict", verdict, device)
    terms = make_terms(payloads, coefficients)
    tiles_per_run = -(-layout.run_elements // tile_of("outer_step", layout))
    num_programs, where = span_of(tiles_per_run, layout, begin, end)
    launch(
        "outer_step", step_kernels._delayed_kernel, num_programs, device,
        outer, momentum, pending,
        terms.payloads, terms.coefficients, terms.table, terms.count, verdict,
        *where[1:], outer_begin // layout.run_elements,
        float(lr), float(mu), float(direct), float(ahead), float(behind),
        NUM_INLINE=terms.num_inline, **geometry("outer_step", layout), IS_FIRST=first,
        IS_LAST=last, HAS_BEHIND=torch.tensor(behind, dtype=torch.float32).item() != 0,
    )  # fmt: skip
    mark_written([outer])


def decode(
    payloads: Sequence[Tensor],
    coefficients: Sequence[float],
    outs: Sequence[Tensor],
    begin: int,
    end: int,
    layout: RunLayout,
    max_blocks: int = 0,
) -> None:
    """Write the weighted sum of the decoded payloads into elements [begin, end) of outs."""
    check_max_blocks(max_blocks)
    device = payloads[0].device if payloads else outs[0].device
    tile = tile_of("decode", layout)
    tiles = tiles_of("outs", outs, device, layout.run_elements, tile)
    layout.check_range(begin, end, tiles.num_elements)
    check_terms(payloads, coefficients, layout, end, device)
    terms = make_terms(payloads, coefficients)
    num_programs, where = span_of(tiles.tiles_per_run, layout, begin, end)
    launch(
        "decode", decode_kernels._decode_kernel, num_programs, device,
        tiles.tiles, tiles.segments,
        terms.payloads, terms.coefficients, terms.table, terms.count, *where,
        NUM_INLINE=terms.num_inline, **geometry("decode", layout), DTYPE_SET=tiles.dtype_set,
    )  # fmt: skip
    mark_written(outs)


def merge(outer: Tensor, params: Sequence[Tensor], alpha: float = 0.0) -> None:
    """Set params to alpha * params + (1 - alpha) * outer, rounded toward c(outer)."""
    device, tile = outer.device, PROGRAMS["merge"][0]
    num_elements = sum(param.numel() for param in params)
    run_elements = max(-(-num_elements // tile), 1) * tile
    tiles = tiles_of("params", params, device, run_elements, tile)
    check_flat_of("outer", outer, num_elements, device)
    launch(
        "merge", decode_kernels._merge_kernel, -(-num_elements // tile), device,
        outer, tiles.tiles, tiles.segments, num_elements, float(alpha), 1.0 - alpha,
        ROWS=tile // _PLAIN_BLOCK, BLOCK_SIZE=_PLAIN_BLOCK, HAS_ALPHA=alpha != 0,
        DTYPE_SET=tiles.dtype_set,
    )  # fmt: skip
    mark_written(params)


def norms(outer: Tensor | None, params: Sequence[Tensor], out: Tensor) -> None:
    """Write the squared norm of c(outer) - params, or params, and the number of bad elements."""
    device, tile = out.device, PROGRAMS["norms"][0]
    num_elements = sum(param.numel() for param in params)
    run_elements = max(-(-num_elements // tile), 1) * tile
    tiles = tiles_of("params", params, device, run_elements, tile)
    if outer is not None:
        check_flat_of("outer", outer, num_elements, device)
    check_flat("out", out, torch.float64, device)
    if out.numel() != 2:
        raise ValueError(f"out must have two elements, got {out.numel()}")
    num_tiles = -(-num_elements // tile)
    # From torch's cache at each call: a kept buffer could be written by two streams at once.
    totals, bads = torch.empty(2, max(num_tiles, 1), dtype=torch.float64, device=device)
    launch(
        "norms", norms_kernels._norms_kernel, num_tiles, device,
        outer, tiles.tiles, tiles.segments, totals, bads, num_elements,
        TILE=tile, LANES=norms_kernels.LANES, ROWS=norms_kernels.ROWS, DTYPE_SET=tiles.dtype_set,
    )  # fmt: skip
    launch(
        "norms", norms_kernels._sum_partials_kernel, 1, device,
        totals, bads, out, num_tiles, BATCH=norms_kernels.BATCH,
    )  # fmt: skip


def digest(tensor: Tensor, sums: Tensor, first_word: int = 0, max_blocks: int = 0) -> None:
    """Add the sum of products and the sum of words of a tensor's bytes to ``sums``."""
    device, tile = tensor.device, PROGRAMS["digest"][0]
    check_digest(tensor, sums, first_word)
    num_words = -(-tensor.nbytes // 8)
    num_programs, is_bounded = bounded(-(-num_words // tile), max_blocks)
    data = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    unit = math.gcd(data.data_ptr(), 8)
    launch(
        "digest", digest_kernels._digest_kernel, num_programs, device,
        data, sums, tensor.nbytes, first_word,
        TILE=tile, BATCH=digest_kernels.batch_words(unit), UNIT=unit, IS_BOUNDED=is_bounded,
    )  # fmt: skip
