"""encode and reduce for Triton: they turn values into the bytes of a payload."""

from __future__ import annotations

import triton
import triton.language as tl

from .blocks import find_part, form_offsets, store_values
from .rotation import store_blocks
from .sparse import BLOCK, store_largest
from .terms import sum_of_terms
from .tiles import find_tile, load_any, load_tile, store_any

# Arguments that change from call to call. Triton would compile a kernel again when one of them is a
# multiple of 16, unless told not to specialize.
_ENCODE_VARYING = ["first_tile", "first_run", "tiles_per_run", "end", "outer_run", "key"]
_REDUCE_VARYING = ["num_terms", "num_elements", "key", "element_begin"]


@triton.jit
def _encode_tile(
    x,
    run_ptr,
    part,
    at,
    element,
    key,
    kept,
    FORM: tl.constexpr,
    QMAX: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    FULL: tl.constexpr,
):
    """Add the residual to x, encode the sum, and write its error to the new residual.

    ``at`` is the index of the tile's first element in the residuals. ``kept`` has pointers to the
    residual, the new residual, and the count of bad elements; each may be None.
    """
    residual_ptr, new_residual_ptr, nonfinite_ptr = kept
    offsets = form_offsets(FORM)
    mask = offsets < part[2]
    if residual_ptr is not None:
        x = x + load_any(residual_ptr + at, offsets, mask, FULL)
    if FORM[1] == BLOCK:  # only sparse wires have blocks of that size
        value = store_largest(x, run_ptr, part, nonfinite_ptr, FORM)
    elif FORM[3] == 0:
        IS_KEPT: tl.constexpr = new_residual_ptr is not None
        value = store_blocks(x, run_ptr, part, key, nonfinite_ptr, FORM, IS_KEPT, FULL)
    else:
        value = store_values(
            x, run_ptr, part, element, key, nonfinite_ptr, FORM, QMAX, STOCHASTIC, FULL
        )
    if new_residual_ptr is not None:
        store_any(new_residual_ptr + at, offsets, x - value, None, mask, FULL)


@triton.jit
def _encode_params(
    outer_ptr,
    outer_at,
    tile,
    run_ptr,
    part,
    element,
    key,
    kept,
    FORM: tl.constexpr,
    QMAX: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    DTYPE_SET: tl.constexpr,
    FULL: tl.constexpr,
):
    offsets = form_offsets(FORM)
    mask = offsets < part[2]
    if outer_ptr is not None:
        outer = load_any(outer_ptr + outer_at, offsets, mask, FULL)
        x = load_tile(tile, element, offsets, outer, mask, DTYPE_SET, FULL)
    else:
        x = load_tile(tile, element, offsets, None, mask, DTYPE_SET, FULL)
    _encode_tile(x, run_ptr, part, element, element, key, kept, FORM, QMAX, STOCHASTIC, FULL)


# Encodes c(outer) - params + residual into the payload, where c() rounds to the parameters' dtype.
# Per element it reads 4 + 4 bytes (fp32 parameters) and writes 1 (int8); error feedback reads and
# writes 4 more (fp32). One program for each tile of ROWS blocks.
@triton.jit(do_not_specialize=_ENCODE_VARYING)
def _encode_kernel(
    outer_ptr,
    tiles_ptr,
    segments_ptr,
    payload_ptr,
    residual_ptr,
    new_residual_ptr,
    nonfinite_ptr,
    first_tile,
    first_run,
    tiles_per_run,
    run_elements,
    run_bytes,
    code_offset,
    end,
    outer_run,
    key,
    ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WIRE: tl.constexpr,
    CODE_BITS: tl.constexpr,
    QMAX: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    DTYPE_SET: tl.constexpr,
):
    FORM: tl.constexpr = (ROWS, BLOCK_SIZE, WIRE, CODE_BITS)
    run, part, element = find_part(first_run, tiles_per_run, run_elements, code_offset, end, FORM)
    place = first_tile.to(tl.int64) + tl.program_id(0)
    tile, is_whole = find_tile(
        tiles_ptr, segments_ptr, place, part[2], ROWS * BLOCK_SIZE, DTYPE_SET
    )
    run_ptr = payload_ptr + run * run_bytes
    outer_at = element - outer_run.to(tl.int64) * run_elements
    kept = (residual_ptr, new_residual_ptr, nonfinite_ptr)
    if is_whole:
        _encode_params(
            outer_ptr, outer_at, tile, run_ptr, part, element, key, kept,
            FORM, QMAX, STOCHASTIC, DTYPE_SET, True,
        )  # fmt: skip
    else:
        _encode_params(
            outer_ptr, outer_at, tile, run_ptr, part, element, key, kept,
            FORM, QMAX, STOCHASTIC, DTYPE_SET, False,
        )  # fmt: skip


@triton.jit
def _reduce_tile(
    terms,
    result_ptr,
    part,
    element,
    key,
    kept,
    NUM_INLINE: tl.constexpr,
    FORM: tl.constexpr,
    QMAX: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    FULL: tl.constexpr,
):
    x = sum_of_terms(terms, part, NUM_INLINE, FORM, FULL)
    if not FULL:
        # After the last element, values are 0 times the bytes at the place of a scale: maybe NaN.
        x = tl.where(form_offsets(FORM) < part[2], x, 0.0)
    _encode_tile(x, result_ptr, part, part[1], element, key, kept, FORM, QMAX, STOCHASTIC, FULL)


@triton.jit
def _reduce_at(
    terms,
    result_ptr,
    code_offset,
    start,
    num_elements,
    element,
    key,
    kept,
    NUM_INLINE: tl.constexpr,
    FORM: tl.constexpr,
    QMAX: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    """Reduce the tile that begins at element ``start`` of the run, ``element`` of the fragment."""
    part = (code_offset, start, num_elements - start)
    if part[2] >= FORM[0] * FORM[1]:
        _reduce_tile(
            terms, result_ptr, part, element, key, kept, NUM_INLINE, FORM, QMAX, STOCHASTIC, True
        )
    else:
        _reduce_tile(
            terms, result_ptr, part, element, key, kept, NUM_INLINE, FORM, QMAX, STOCHASTIC, False
        )


# Encodes the weighted sum of the decoded runs, in rank order, plus residual into `result`. Per
# element it reads a byte of each run (int8) and writes 1. One program for each tile of ROWS blocks;
# with IS_BOUNDED a program takes every n-th tile of n programs.
@triton.jit(do_not_specialize=_REDUCE_VARYING)
def _reduce_kernel(
    payloads,
    coefficients,
    terms_ptr,
    num_terms,
    result_ptr,
    residual_ptr,
    new_residual_ptr,
    nonfinite_ptr,
    code_offset,
    num_elements,
    key,
    element_begin,
    NUM_INLINE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WIRE: tl.constexpr,
    CODE_BITS: tl.constexpr,
    QMAX: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    IS_BOUNDED: tl.constexpr,
):
    FORM: tl.constexpr = (ROWS, BLOCK_SIZE, WIRE, CODE_BITS)
    TILE: tl.constexpr = ROWS * BLOCK_SIZE
    start = tl.program_id(0).to(tl.int64) * TILE
    terms = (payloads, coefficients, terms_ptr, num_terms, 0)
    kept = (residual_ptr, new_residual_ptr, nonfinite_ptr)
    if IS_BOUNDED:
        num_tiles = (num_elements + TILE - 1) // TILE
        for _ in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
            _reduce_at(
                terms, result_ptr, code_offset, start, num_elements, element_begin + start, key,
                kept, NUM_INLINE, FORM, QMAX, STOCHASTIC,
            )  # fmt: skip
            start += tl.num_programs(0).to(tl.int64) * TILE
    else:
        _reduce_at(
            terms, result_ptr, code_offset, start, num_elements, element_begin + start, key, kept,
            NUM_INLINE, FORM, QMAX, STOCHASTIC,
        )  # fmt: skip
