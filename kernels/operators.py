"""The operators of ``torch.ops.diloco_comm`` in Triton, with the same bytes.

Each operator takes the ``Arguments`` of one call, by their names in its schema.

They take CUDA tensors, and CPU tensors if Triton runs as an interpreter (``TRITON_INTERPRET=1``).
An operator launches one kernel on the current stream, however many tensors there are (norms two),
and does not wait for the device. The first call with several new tensors, or with tensors at new
addresses, makes tables of them (``tiles.py``), and waits for their copy to the device.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

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

_PLAIN_BLOCK = 256  # the length of a tile's rows for merge, which has no wire format
_LARGEST_FLOAT = torch.finfo(torch.float32).max


class Arguments(SimpleNamespace):
    """The arguments of a call, by their names in the operator's schema, without ``impl``.

    ``layout``, a ``RunLayout``, replaces the three arguments ``run_elements``, ``wire`` and
    ``block_size``.
    """


def is_interpreted() -> bool:
    """Return whether the kernels run in Triton's interpreter, on CPU tensors."""
    return not isinstance(encode_kernels._encode_kernel, triton.JITFunction)


def encode(a: Arguments) -> None:
    """Encode elements [begin, end) of c(outer) - params, or of params, plus a residual if given."""
    check_max_blocks(a.max_blocks)
    device = a.payload.device
    tile = tile_of("encode", a.layout)
    tiles = tiles_of("params", a.params, device, a.layout.run_elements, tile)
    num_elements = tiles.num_elements
    a.layout.check_range(a.begin, a.end, num_elements)
    a.layout.check_payload("payload", a.payload, -(-a.end // a.layout.run_elements), device)
    if a.outer is not None:
        a.layout.check_window(a.outer, a.outer_begin, a.begin, a.end, num_elements, device)
    check_residuals(a.residual, a.new_residual, num_elements, device)
    check_count("nonfinite", a.nonfinite, device)
    num_programs, where = span_of(tiles.tiles_per_run, a.layout, a.begin, a.end)
    launch(
        "encode", encode_kernels._encode_kernel, num_programs, device,
        a.outer, tiles.tiles, tiles.segments, a.payload, a.residual, a.new_residual, a.nonfinite,
        *where, a.outer_begin // a.layout.run_elements, a.rng_key,
        **geometry("encode", a.layout), QMAX=a.layout.qmax,
        STOCHASTIC=a.stochastic and a.layout.has_element_codes, DTYPE_SET=tiles.dtype_set,
    )  # fmt: skip


def reduce(a: Arguments) -> None:
    """Decode one run from each rank, take the weighted sum in rank order, encode it once."""
    device, run_elements, block_size = a.result.device, a.layout.run_elements, a.layout.block_size
    if not 0 <= a.num_elements <= run_elements:
        raise ValueError(
            f"num_elements must lie in [0, run_elements = {run_elements}], got {a.num_elements}"
        )
    if a.index_begin < 0 or (a.num_elements > 0 and a.index_begin % block_size):
        raise ValueError(
            f"index_begin must be a multiple of block_size {block_size}, got {a.index_begin}"
        )
    if not 1 <= len(a.weights) <= MAX_TERMS:
        raise ValueError(f"weights must hold 1 to {MAX_TERMS} numbers, got {len(a.weights)}")
    a.layout.check_payload("received", a.received, len(a.weights), device)
    run_bytes = a.layout.run_bytes
    if a.received.numel() != len(a.weights) * run_bytes:
        raise ValueError(
            f"received must hold {len(a.weights)} runs, one for each weight, got "
            f"{a.received.numel()} bytes"
        )
    a.layout.check_payload("result", a.result, 1, device)
    check_residuals(a.residual, a.new_residual, a.num_elements, device)
    check_count("nonfinite", a.nonfinite, device)
    terms = make_terms(a.received.split(run_bytes), a.weights)
    num_tiles = -(-a.num_elements // tile_of("reduce", a.layout))
    num_programs, is_bounded = bounded(num_tiles, a.max_blocks)
    launch(
        "reduce", encode_kernels._reduce_kernel, num_programs, device,
        terms.payloads, terms.coefficients, terms.table, terms.count,
        a.result, a.residual, a.new_residual, a.nonfinite,
        a.layout.code_offset, a.num_elements, a.rng_key, a.index_begin,
        NUM_INLINE=terms.num_inline, **geometry("reduce", a.layout), QMAX=a.layout.qmax,
        STOCHASTIC=a.stochastic and a.layout.has_element_codes, IS_BOUNDED=is_bounded,
    )  # fmt: skip


def outer_step(a: Arguments) -> None:
    """Apply sgd, heavy_ball or nesterov to outer, and merge it into the parameters."""
    if a.optimizer not in ("sgd", "heavy_ball", "nesterov"):
        raise ValueError(f"optimizer must be sgd, heavy_ball or nesterov, got {a.optimizer!r}")
    if a.optimizer != "sgd" and a.momentum is None:
        raise ValueError(f"optimizer {a.optimizer} needs a momentum tensor, got None")
    if not a.clip > 0:
        raise ValueError(f"clip must be positive, got {a.clip}")
    # Operator schemas have no literal for infinity, so a bound above fp32's range means none.
    bound = math.inf if a.clip > _LARGEST_FLOAT else float(a.clip)
    _step(
        a, a.optimizer, None if a.optimizer == "sgd" else a.momentum, None,
        (float(a.lr), float(a.mu), bound), (0.0, 0.0, 0.0, 0.0, 0.0),
    )  # fmt: skip


def outer_step_adam(a: Arguments) -> None:
    """Apply Adam's step number ``step`` (the first is 1) to outer, and merge it."""
    if a.step < 1:
        raise ValueError(f"step counts from 1, got {a.step}")
    step_size = a.lr / (1.0 - a.beta1**a.step)
    correction = math.sqrt(1.0 - a.beta2**a.step)
    _step(
        a, "adam", a.exp_avg, a.exp_avg_sq,
        (step_size, float(a.beta1), math.inf),
        (1.0 - a.beta1, float(a.beta2), 1.0 - a.beta2, correction, float(a.eps)),
    )  # fmt: skip


def _step(
    a: Arguments,
    optimizer: str,
    momentum: Tensor | None,
    second: Tensor | None,
    constants: tuple[float, float, float],
    adam: tuple[float, float, float, float, float],
) -> None:
    device, layout, alpha = a.outer.device, a.layout, float(a.alpha)
    tile = tile_of("outer_step", layout)
    tiles = tiles_of("params", a.params, device, layout.run_elements, tile)
    num_elements = tiles.num_elements
    layout.check_range(a.begin, a.end, num_elements)
    layout.check_window(a.outer, a.outer_begin, a.begin, a.end, num_elements, device)
    for name, tensor in {"momentum": momentum, "exp_avg_sq": second}.items():
        if tensor is not None:
            check_flat_of(name, tensor, a.outer.numel(), device, "outer")
    check_terms(a.payloads, a.coefficients, layout, a.end, device)
    check_count("verdict", a.verdict, device)
    terms = make_terms(a.payloads, a.coefficients)
    num_programs, where = span_of(tiles.tiles_per_run, layout, a.begin, a.end)
    launch(
        "outer_step", step_kernels._step_kernel, num_programs, device,
        a.outer, momentum, second, tiles.tiles, tiles.segments,
        terms.payloads, terms.coefficients, terms.table, terms.count, a.verdict,
        *where, a.outer_begin // layout.run_elements, *constants, alpha, 1.0 - a.alpha, *adam,
        NUM_INLINE=terms.num_inline, **geometry("outer_step", layout), OPTIMIZER=optimizer,
        HAS_ALPHA=alpha != 0, DTYPE_SET=tiles.dtype_set,
    )  # fmt: skip
    mark_written(a.params)


def outer_step_delayed(a: Arguments) -> None:
    """Add an arrival to what is pending; the last of a period takes the outer step."""
    # The fragment ends where outer ends.
    device, num_elements = a.outer.device, max(a.outer_begin, 0) + a.outer.numel()
    if a.pending is None and not (a.first and a.last):
        raise ValueError(
            "an arrival that is not both first and last needs a pending tensor, got None"
        )
    a.layout.check_range(a.begin, a.end, num_elements)
    momentum = a.momentum if a.last else None
    a.layout.check_window(a.outer, a.outer_begin, a.begin, a.end, num_elements, device)
    for name, tensor in {"momentum": momentum, "pending": a.pending}.items():
        if tensor is not None:
            check_flat_of(name, tensor, a.outer.numel(), device, "outer")
    check_terms(a.payloads, a.coefficients, a.layout, a.end, device)
    check_count("verdict", a.verdict, device)
    terms = make_terms(a.payloads, a.coefficients)
    tiles_per_run = -(-a.layout.run_elements // tile_of("outer_step", a.layout))
    num_programs, where = span_of(tiles_per_run, a.layout, a.begin, a.end)
    launch(
        "outer_step", step_kernels._delayed_kernel, num_programs, device,
        a.outer, momentum, a.pending,
        terms.payloads, terms.coefficients, terms.table, terms.count, a.verdict,
        *where[1:], a.outer_begin // a.layout.run_elements,
        float(a.lr), float(a.mu), float(a.direct), float(a.ahead), float(a.behind),
        NUM_INLINE=terms.num_inline, **geometry("outer_step", a.layout), IS_FIRST=a.first,
        IS_LAST=a.last, HAS_BEHIND=torch.tensor(a.behind, dtype=torch.float32).item() != 0,
    )  # fmt: skip
    mark_written([a.outer])


def decode(a: Arguments) -> None:
    """Write the weighted sum of the decoded payloads into elements [begin, end) of outs."""
    check_max_blocks(a.max_blocks)
    device = a.payloads[0].device if a.payloads else a.outs[0].device
    tile = tile_of("decode", a.layout)
    tiles = tiles_of("outs", a.outs, device, a.layout.run_elements, tile)
    a.layout.check_range(a.begin, a.end, tiles.num_elements)
    check_terms(a.payloads, a.coefficients, a.layout, a.end, device)
    terms = make_terms(a.payloads, a.coefficients)
    num_programs, where = span_of(tiles.tiles_per_run, a.layout, a.begin, a.end)
    launch(
        "decode", decode_kernels._decode_kernel, num_programs, device,
        tiles.tiles, tiles.segments,
        terms.payloads, terms.coefficients, terms.table, terms.count, *where,
        NUM_INLINE=terms.num_inline, **geometry("decode", a.layout), DTYPE_SET=tiles.dtype_set,
    )  # fmt: skip
    mark_written(a.outs)


def merge(a: Arguments) -> None:
    """Set params to alpha * params + (1 - alpha) * outer, rounded toward c(outer)."""
    device, tile = a.outer.device, PROGRAMS["merge"][0]
    num_elements = sum(param.numel() for param in a.params)
    run_elements = max(-(-num_elements // tile), 1) * tile
    tiles = tiles_of("params", a.params, device, run_elements, tile)
    check_flat_of("outer", a.outer, num_elements, device)
    launch(
        "merge", decode_kernels._merge_kernel, -(-num_elements // tile), device,
        a.outer, tiles.tiles, tiles.segments, num_elements, float(a.alpha), 1.0 - a.alpha,
        ROWS=tile // _PLAIN_BLOCK, BLOCK_SIZE=_PLAIN_BLOCK, HAS_ALPHA=a.alpha != 0,
        DTYPE_SET=tiles.dtype_set,
    )  # fmt: skip
    mark_written(a.params)


def norms(a: Arguments) -> None:
    """Write the squared norm of c(outer) - params, or params, and the number of bad elements."""
    device, tile = a.out.device, PROGRAMS["norms"][0]
    num_elements = sum(param.numel() for param in a.params)
    run_elements = max(-(-num_elements // tile), 1) * tile
    tiles = tiles_of("params", a.params, device, run_elements, tile)
    if a.outer is not None:
        check_flat_of("outer", a.outer, num_elements, device)
    check_flat("out", a.out, torch.float64, device)
    if a.out.numel() != 2:
        raise ValueError(f"out must have two elements, got {a.out.numel()}")
    num_tiles = -(-num_elements // tile)
    # Allocated anew by each call: two streams could write to a shared buffer at the same time.
    totals, bads = torch.empty(2, max(num_tiles, 1), dtype=torch.float64, device=device)
    launch(
        "norms", norms_kernels._norms_kernel, num_tiles, device,
        a.outer, tiles.tiles, tiles.segments, totals, bads, num_elements,
        TILE=tile, LANES=norms_kernels.LANES, ROWS=norms_kernels.ROWS, DTYPE_SET=tiles.dtype_set,
    )  # fmt: skip
    launch(
        "norms", norms_kernels._sum_partials_kernel, 1, device,
        totals, bads, a.out, num_tiles, BATCH=norms_kernels.BATCH,
    )  # fmt: skip


def digest(a: Arguments) -> None:
    """Add the sum of products and the sum of words of a tensor's bytes to ``sums``."""
    device, tile = a.tensor.device, PROGRAMS["digest"][0]
    check_digest(a.tensor, a.sums, a.first_word)
    num_words = -(-a.tensor.nbytes // 8)
    num_programs, is_bounded = bounded(-(-num_words // tile), a.max_blocks)
    data = a.tensor.as_strided((a.tensor.numel(),), (1,)).view(torch.uint8)
    unit = math.gcd(data.data_ptr(), 8)
    launch(
        "digest", digest_kernels._digest_kernel, num_programs, device,
        data, a.sums, a.tensor.nbytes, a.first_word,
        TILE=tile, BATCH=digest_kernels.batch_words(unit), UNIT=unit, IS_BOUNDED=is_bounded,
    )  # fmt: skip
