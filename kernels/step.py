"""outer_step, outer_step_adam, decode and merge for Triton: payloads to parameters."""

from __future__ import annotations

import triton
import triton.language as tl

from .payload import tile_offsets
from .terms import sum_of_terms
from .tiles import load_tile, store_tile

_SPAN_VARYING = ["num_terms", "first_tile", "first_run", "tiles_per_run", "end"]


@triton.jit
def _load_flat(pointer, offsets, mask, FULL: tl.constexpr):
    return tl.load(pointer + offsets) if FULL else tl.load(pointer + offsets, mask=mask, other=0.0)


@triton.jit
def _store_flat(pointer, offsets, value, mask, FULL: tl.constexpr):
    if FULL:
        tl.store(pointer + offsets, value)
    else:
        tl.store(pointer + offsets, value, mask=mask)


@triton.jit
def _store_merged(
    new,
    where,
    kind,
    segments_ptr,
    element,
    offsets,
    mask,
    alpha,
    one_minus_alpha,
    HAS_ALPHA: tl.constexpr,
    DTYPE_SET: tl.constexpr,
    FULL: tl.constexpr,
):
    """params <- alpha params + (1 - alpha) new, or new alone."""
    if HAS_ALPHA:
        local = load_tile(where, kind, segments_ptr, element, offsets, mask, DTYPE_SET, FULL)
        new = alpha * local + one_minus_alpha * new
    store_tile(where, kind, segments_ptr, element, offsets, new, mask, DTYPE_SET, FULL)


@triton.jit
def _step_tile(
    outer_ptr,
    momentum_ptr,
    second_ptr,
    where,
    kind,
    segments_ptr,
    payloads,
    coefficients,
    terms_ptr,
    num_terms,
    run_offset,
    code_offset,
    start,
    count,
    element,
    lr,
    mu,
    clip,
    alpha,
    one_minus_alpha,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    correction,
    eps,
    NUM_INLINE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WIRE: tl.constexpr,
    CODE_BITS: tl.constexpr,
    OPTIMIZER: tl.constexpr,
    HAS_ALPHA: tl.constexpr,
    DTYPE_SET: tl.constexpr,
    FULL: tl.constexpr,
):
    offsets = tile_offsets(ROWS, BLOCK_SIZE)
    mask = offsets < count
    g = sum_of_terms(
        payloads, coefficients, terms_ptr, num_terms, run_offset, code_offset, start, count,
        NUM_INLINE, ROWS, BLOCK_SIZE, WIRE, CODE_BITS, FULL,
    )  # fmt: skip
    outer = _load_flat(outer_ptr + element, offsets, mask, FULL)
    if OPTIMIZER == "sgd":
        update = lr * g
    elif OPTIMIZER == "adam":
        m = _load_flat(momentum_ptr + element, offsets, mask, FULL)
        v = _load_flat(second_ptr + element, offsets, mask, FULL)
        m = mu * m + one_minus_beta1 * g
        v = beta2 * v + (one_minus_beta2 * g) * g
        _store_flat(momentum_ptr + element, offsets, m, mask, FULL)
        _store_flat(second_ptr + element, offsets, v, mask, FULL)
        update = tl.div_rn(lr * m, tl.div_rn(tl.sqrt_rn(v), correction) + eps)
    else:
        m = mu * _load_flat(momentum_ptr + element, offsets, mask, FULL) + g
        # Selections, which keep a NaN, and not minimum and maximum, which may drop it.
        m = tl.where(-clip > m, -clip, m)
        m = tl.where(clip < m, clip, m)
        _store_flat(momentum_ptr + element, offsets, m, mask, FULL)
        if OPTIMIZER == "nesterov":
            update = lr * (g + mu * m)
        else:
            update = lr * m
    new = outer - update
    _store_flat(outer_ptr + element, offsets, new, mask, FULL)
    _store_merged(
        new, where, kind, segments_ptr, element, offsets, mask, alpha, one_minus_alpha,
        HAS_ALPHA, DTYPE_SET, FULL,
    )  # fmt: skip


# m' = mu m + g, clipped;  outer' = outer - lr (g + mu m');  params' = alpha params + (1 - alpha)
# outer', with g the weighted sum of the decoded payloads; Adam by its own equations.
# Reads 1 + 4 + 4 bytes an element (int8, one term, momentum), writes 4 + 4 + 4 (fp32 parameters).
# One program a tile of ROWS blocks; none does anything when the verdict is not zero.
@triton.jit(do_not_specialize=_SPAN_VARYING)
def _step_kernel(
    outer_ptr,
    momentum_ptr,
    second_ptr,
    tiles_ptr,
    segments_ptr,
    payloads,
    coefficients,
    terms_ptr,
    num_terms,
    verdict_ptr,
    first_tile,
    first_run,
    tiles_per_run,
    run_elements,
    run_bytes,
    code_offset,
    end,
    lr,
    mu,
    clip,
    alpha,
    one_minus_alpha,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    correction,
    eps,
    NUM_INLINE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WIRE: tl.constexpr,
    CODE_BITS: tl.constexpr,
    OPTIMIZER: tl.constexpr,
    HAS_ALPHA: tl.constexpr,
    DTYPE_SET: tl.constexpr,
):
    if verdict_ptr is not None:
        if tl.load(verdict_ptr) != 0:
            return
    pid = tl.program_id(0)
    row = tiles_ptr + (first_tile.to(tl.int64) + pid) * 2
    where, kind = tl.load(row), tl.load(row + 1).to(tl.int32)
    run = first_run.to(tl.int64) + pid // tiles_per_run
    start = (pid % tiles_per_run).to(tl.int64) * (ROWS * BLOCK_SIZE)
    element = run * run_elements + start
    count = tl.minimum(run_elements - start, end - element)
    if kind >= 0:
        _step_tile(
            outer_ptr, momentum_ptr, second_ptr, where, kind, segments_ptr, payloads, coefficients,
            terms_ptr, num_terms, run * run_bytes, code_offset, start, count, element, lr, mu, clip,
            alpha, one_minus_alpha, one_minus_beta1, beta2, one_minus_beta2, correction, eps,
            NUM_INLINE, ROWS, BLOCK_SIZE, WIRE, CODE_BITS, OPTIMIZER, HAS_ALPHA, DTYPE_SET, True,
        )  # fmt: skip
    else:
        _step_tile(
            outer_ptr, momentum_ptr, second_ptr, where, kind, segments_ptr, payloads, coefficients,
            terms_ptr, num_terms, run * run_bytes, code_offset, start, count, element, lr, mu, clip,
            alpha, one_minus_alpha, one_minus_beta1, beta2, one_minus_beta2, correction, eps,
            NUM_INLINE, ROWS, BLOCK_SIZE, WIRE, CODE_BITS, OPTIMIZER, HAS_ALPHA, DTYPE_SET, False,
        )  # fmt: skip


@triton.jit
def _decode_tile(
    payloads,
    coefficients,
    terms_ptr,
    num_terms,
    where,
    kind,
    segments_ptr,
    run_offset,
    code_offset,
    start,
    count,
    element,
    NUM_INLINE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WIRE: tl.constexpr,
    CODE_BITS: tl.constexpr,
    DTYPE_SET: tl.constexpr,
    FULL: tl.constexpr,
):
    offsets = tile_offsets(ROWS, BLOCK_SIZE)
    value = sum_of_terms(
        payloads, coefficients, terms_ptr, num_terms, run_offset, code_offset, start, count,
        NUM_INLINE, ROWS, BLOCK_SIZE, WIRE, CODE_BITS, FULL,
    )  # fmt: skip
    mask = offsets < count
    store_tile(where, kind, segments_ptr, element, offsets, value, mask, DTYPE_SET, FULL)


# outs <- c_0 d_0 + c_1 d_1 + ...
# Reads 1 byte an element (int8, one term), writes 4 (fp32). One program a tile of ROWS blocks.
@triton.jit(do_not_specialize=_SPAN_VARYING)
def _decode_kernel(
    tiles_ptr,
    segments_ptr,
    payloads,
    coefficients,
    terms_ptr,
    num_terms,
    first_tile,
    first_run,
    tiles_per_run,
    run_elements,
    run_bytes,
    code_offset,
    end,
    NUM_INLINE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WIRE: tl.constexpr,
    CODE_BITS: tl.constexpr,
    DTYPE_SET: tl.constexpr,
):
    pid = tl.program_id(0)
    row = tiles_ptr + (first_tile.to(tl.int64) + pid) * 2
    where, kind = tl.load(row), tl.load(row + 1).to(tl.int32)
    run = first_run.to(tl.int64) + pid // tiles_per_run
    start = (pid % tiles_per_run).to(tl.int64) * (ROWS * BLOCK_SIZE)
    element = run * run_elements + start
    count = tl.minimum(run_elements - start, end - element)
    if kind >= 0:
        _decode_tile(
            payloads, coefficients, terms_ptr, num_terms, where, kind, segments_ptr,
            run * run_bytes, code_offset, start, count, element,
            NUM_INLINE, ROWS, BLOCK_SIZE, WIRE, CODE_BITS, DTYPE_SET, True,
        )  # fmt: skip
    else:
        _decode_tile(
            payloads, coefficients, terms_ptr, num_terms, where, kind, segments_ptr,
            run * run_bytes, code_offset, start, count, element,
            NUM_INLINE, ROWS, BLOCK_SIZE, WIRE, CODE_BITS, DTYPE_SET, False,
        )  # fmt: skip


@triton.jit
def _merge_tile(
    outer_ptr,
    where,
    kind,
    segments_ptr,
    element,
    count,
    alpha,
    one_minus_alpha,
    ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_ALPHA: tl.constexpr,
    DTYPE_SET: tl.constexpr,
    FULL: tl.constexpr,
):
    offsets = tile_offsets(ROWS, BLOCK_SIZE)
    mask = offsets < count
    outer = _load_flat(outer_ptr + element, offsets, mask, FULL)
    _store_merged(
        outer, where, kind, segments_ptr, element, offsets, mask, alpha, one_minus_alpha,
        HAS_ALPHA, DTYPE_SET, FULL,
    )  # fmt: skip


# params <- alpha params + (1 - alpha) outer
# Reads 4 bytes an element, writes 4 (fp32 parameters); alpha reads 4 more. One program a tile.
@triton.jit(do_not_specialize=["end"])
def _merge_kernel(
    outer_ptr,
    tiles_ptr,
    segments_ptr,
    end,
    alpha,
    one_minus_alpha,
    ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_ALPHA: tl.constexpr,
    DTYPE_SET: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    row = tiles_ptr + pid * 2
    where, kind = tl.load(row), tl.load(row + 1).to(tl.int32)
    element = pid * (ROWS * BLOCK_SIZE)
    count = end - element
    if kind >= 0:
        _merge_tile(
            outer_ptr, where, kind, segments_ptr, element, count, alpha, one_minus_alpha,
            ROWS, BLOCK_SIZE, HAS_ALPHA, DTYPE_SET, True,
        )  # fmt: skip
    else:
        _merge_tile(
            outer_ptr, where, kind, segments_ptr, element, count, alpha, one_minus_alpha,
            ROWS, BLOCK_SIZE, HAS_ALPHA, DTYPE_SET, False,
        )  # fmt: skip
