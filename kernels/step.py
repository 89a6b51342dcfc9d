"""outer_step, outer_step_adam and outer_step_delayed for Triton: they apply payloads to outer."""

from __future__ import annotations

import triton
import triton.language as tl

from .blocks import find_part, form_offsets
from .decode import SPAN_VARYING, load_flat, store_flat, store_merged
from .terms import sum_of_terms
from .tiles import find_tile


@triton.jit
def _step_tile(
    flats,
    numbers,
    terms,
    part,
    tile,
    element,
    outer_at,
    NUM_INLINE: tl.constexpr,
    FORM: tl.constexpr,
    OPTIMIZER: tl.constexpr,
    HAS_ALPHA: tl.constexpr,
    DTYPE_SET: tl.constexpr,
    FULL: tl.constexpr,
):
    outer_ptr, momentum_ptr, second_ptr = flats
    lr, mu, clip, alpha, one_minus_alpha = numbers[:5]
    offsets = form_offsets(FORM)
    mask = offsets < part[2]
    g = sum_of_terms(terms, part, NUM_INLINE, FORM, FULL)
    outer = load_flat(outer_ptr + outer_at, offsets, mask, FULL)
    if OPTIMIZER == "sgd":
        update = lr * g
    elif OPTIMIZER == "adam":
        one_minus_beta1, beta2, one_minus_beta2, correction, eps = numbers[5:]
        m = load_flat(momentum_ptr + outer_at, offsets, mask, FULL)
        v = load_flat(second_ptr + outer_at, offsets, mask, FULL)
        m = mu * m + one_minus_beta1 * g
        v = beta2 * v + (one_minus_beta2 * g) * g
        store_flat(momentum_ptr + outer_at, offsets, m, mask, FULL)
        store_flat(second_ptr + outer_at, offsets, v, mask, FULL)
        update = tl.div_rn(lr * m, tl.div_rn(tl.sqrt_rn(v), correction) + eps)
    else:
        m = mu * load_flat(momentum_ptr + outer_at, offsets, mask, FULL) + g
        # tl.where() keeps a NaN, which tl.minimum() and tl.maximum() may drop.
        m = tl.where(-clip > m, -clip, m)
        m = tl.where(clip < m, clip, m)
        store_flat(momentum_ptr + outer_at, offsets, m, mask, FULL)
        if OPTIMIZER == "nesterov":
            update = lr * (g + mu * m)
        else:
            update = lr * m
    new = outer - update
    store_flat(outer_ptr + outer_at, offsets, new, mask, FULL)
    store_merged(
        new, tile, element, offsets, mask, alpha, one_minus_alpha, HAS_ALPHA, DTYPE_SET, FULL
    )


# Takes an outer step. g is the weighted sum of the decoded payloads; for Nesterov, momentum becomes
# m = mu momentum + g, clipped, and outer decreases by lr (g + mu m). Then params become
# alpha params + (1 - alpha) outer. Per element it reads 1 + 4 + 4 bytes (int8, one term, momentum)
# and writes 4 + 4 + 4 (fp32 parameters). One program for each tile of ROWS blocks; no program does
# anything if the verdict is not zero.
@triton.jit(do_not_specialize=[*SPAN_VARYING, "outer_run"])
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
    outer_run,
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
    FORM: tl.constexpr = (ROWS, BLOCK_SIZE, WIRE, CODE_BITS)
    run, part, element = find_part(first_run, tiles_per_run, run_elements, code_offset, end, FORM)
    place = first_tile.to(tl.int64) + tl.program_id(0)
    tile, is_whole = find_tile(
        tiles_ptr, segments_ptr, place, part[2], ROWS * BLOCK_SIZE, DTYPE_SET
    )
    outer_at = element - outer_run.to(tl.int64) * run_elements
    flats = (outer_ptr, momentum_ptr, second_ptr)
    numbers = (
        lr, mu, clip, alpha, one_minus_alpha,
        one_minus_beta1, beta2, one_minus_beta2, correction, eps,
    )  # fmt: skip
    terms = (payloads, coefficients, terms_ptr, num_terms, run * run_bytes)
    if is_whole:
        _step_tile(
            flats, numbers, terms, part, tile, element, outer_at,
            NUM_INLINE, FORM, OPTIMIZER, HAS_ALPHA, DTYPE_SET, True,
        )  # fmt: skip
    else:
        _step_tile(
            flats, numbers, terms, part, tile, element, outer_at,
            NUM_INLINE, FORM, OPTIMIZER, HAS_ALPHA, DTYPE_SET, False,
        )  # fmt: skip


@triton.jit
def _delayed_tile(
    flats,
    numbers,
    terms,
    part,
    outer_at,
    NUM_INLINE: tl.constexpr,
    FORM: tl.constexpr,
    IS_FIRST: tl.constexpr,
    IS_LAST: tl.constexpr,
    HAS_BEHIND: tl.constexpr,
    FULL: tl.constexpr,
):
    outer_ptr, momentum_ptr, pending_ptr = flats
    lr, mu, direct, ahead, behind = numbers
    offsets = form_offsets(FORM)
    mask = offsets < part[2]
    d = sum_of_terms(terms, part, NUM_INLINE, FORM, FULL)
    if not IS_FIRST:
        d = load_flat(pending_ptr + outer_at, offsets, mask, FULL) + d
    if IS_LAST:
        step = direct * d
        if momentum_ptr is not None:
            old = load_flat(momentum_ptr + outer_at, offsets, mask, FULL)
            m = mu * old + d
            store_flat(momentum_ptr + outer_at, offsets, m, mask, FULL)
            step = step + ahead * m
            if HAS_BEHIND:
                step = step + behind * old
        outer = load_flat(outer_ptr + outer_at, offsets, mask, FULL)
        store_flat(outer_ptr + outer_at, offsets, outer - lr * step, mask, FULL)
    else:
        store_flat(pending_ptr + outer_at, offsets, d, mask, FULL)


# Adds an arrival g, the weighted sum of the decoded payloads, to `pending`: d = pending + g. Before
# the last arrival, d is stored there. The last one makes the new momentum m' = mu m + d, and outer
# decreases by lr (direct d + ahead m' + behind m). Per element it reads 1 + 4 bytes (int8, one
# term) and writes 4; the last arrival reads 1 + 4 + 4 + 4 and writes 4 + 4. One program for each
# tile of ROWS blocks.
@triton.jit(do_not_specialize=["num_terms", "first_run", "tiles_per_run", "end", "outer_run"])
def _delayed_kernel(
    outer_ptr,
    momentum_ptr,
    pending_ptr,
    payloads,
    coefficients,
    terms_ptr,
    num_terms,
    verdict_ptr,
    first_run,
    tiles_per_run,
    run_elements,
    run_bytes,
    code_offset,
    end,
    outer_run,
    lr,
    mu,
    direct,
    ahead,
    behind,
    NUM_INLINE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WIRE: tl.constexpr,
    CODE_BITS: tl.constexpr,
    IS_FIRST: tl.constexpr,
    IS_LAST: tl.constexpr,
    HAS_BEHIND: tl.constexpr,
):
    if verdict_ptr is not None:
        if tl.load(verdict_ptr) != 0:
            return
    FORM: tl.constexpr = (ROWS, BLOCK_SIZE, WIRE, CODE_BITS)
    run, part, element = find_part(first_run, tiles_per_run, run_elements, code_offset, end, FORM)
    outer_at = element - outer_run.to(tl.int64) * run_elements
    flats = (outer_ptr, momentum_ptr, pending_ptr)
    numbers = (lr, mu, direct, ahead, behind)
    terms = (payloads, coefficients, terms_ptr, num_terms, run * run_bytes)
    if part[2] >= ROWS * BLOCK_SIZE:
        _delayed_tile(
            flats, numbers, terms, part, outer_at,
            NUM_INLINE, FORM, IS_FIRST, IS_LAST, HAS_BEHIND, True,
        )  # fmt: skip
    else:
        _delayed_tile(
            flats, numbers, terms, part, outer_at,
            NUM_INLINE, FORM, IS_FIRST, IS_LAST, HAS_BEHIND, False,
        )  # fmt: skip
