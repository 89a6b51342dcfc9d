"""decode and merge for Triton: they write payloads or outer parameters to a fragment's tensors."""

from __future__ import annotations

import triton
import triton.language as tl

from .blocks import find_part, form_offsets, tile_offsets
from .terms import sum_of_terms
from .tiles import find_tile, load_tile, store_tile

# Arguments that change from call to call. Triton would compile a kernel again when one of them is a
# multiple of 16, unless told not to specialize.
SPAN_VARYING = ["num_terms", "first_tile", "first_run", "tiles_per_run", "end"]


@triton.jit
def load_flat(pointer, offsets, mask, FULL: tl.constexpr):
    return tl.load(pointer + offsets) if FULL else tl.load(pointer + offsets, mask=mask, other=0.0)


@triton.jit
def store_flat(pointer, offsets, value, mask, FULL: tl.constexpr):
    if FULL:
        tl.store(pointer + offsets, value)
    else:
        tl.store(pointer + offsets, value, mask=mask)


@triton.jit
def store_merged(
    new,
    tile,
    element,
    offsets,
    mask,
    alpha,
    one_minus_alpha,
    HAS_ALPHA: tl.constexpr,
    DTYPE_SET: tl.constexpr,
    FULL: tl.constexpr,
):
    """Write alpha params + (1 - alpha) new to params, rounded toward c(new); or just ``new``.

    c(new) is ``new`` rounded to nearest in the dtype of the parameters.
    """
    if HAS_ALPHA:
        local = load_tile(tile, element, offsets, None, mask, DTYPE_SET, FULL)
        x = alpha * local + one_minus_alpha * new
        store_tile(tile, element, offsets, x, new, mask, DTYPE_SET, FULL)
    else:
        store_tile(tile, element, offsets, new, None, mask, DTYPE_SET, FULL)


@triton.jit
def _decode_tile(
    terms,
    part,
    tile,
    element,
    NUM_INLINE: tl.constexpr,
    FORM: tl.constexpr,
    DTYPE_SET: tl.constexpr,
    FULL: tl.constexpr,
):
    offsets = form_offsets(FORM)
    value = sum_of_terms(terms, part, NUM_INLINE, FORM, FULL)
    store_tile(tile, element, offsets, value, None, offsets < part[2], DTYPE_SET, FULL)


# Writes the weighted sum of the decoded payloads to the tensors. Per element it reads 1 byte (int8,
# one term) and writes 4 (fp32). One program for each tile of ROWS blocks.
@triton.jit(do_not_specialize=SPAN_VARYING)
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
    FORM: tl.constexpr = (ROWS, BLOCK_SIZE, WIRE, CODE_BITS)
    run, part, element = find_part(first_run, tiles_per_run, run_elements, code_offset, end, FORM)
    place = first_tile.to(tl.int64) + tl.program_id(0)
    tile, is_whole = find_tile(
        tiles_ptr, segments_ptr, place, part[2], ROWS * BLOCK_SIZE, DTYPE_SET
    )
    terms = (payloads, coefficients, terms_ptr, num_terms, run * run_bytes)
    if is_whole:
        _decode_tile(terms, part, tile, element, NUM_INLINE, FORM, DTYPE_SET, True)
    else:
        _decode_tile(terms, part, tile, element, NUM_INLINE, FORM, DTYPE_SET, False)


@triton.jit
def _merge_tile(
    outer_ptr,
    tile,
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
    outer = load_flat(outer_ptr + element, offsets, mask, FULL)
    store_merged(
        outer, tile, element, offsets, mask, alpha, one_minus_alpha, HAS_ALPHA, DTYPE_SET, FULL
    )


# Writes alpha params + (1 - alpha) outer to params, rounded toward c(outer): outer in the dtype of
# the parameter. Per element (fp32) it reads 4 bytes, or 8 if alpha is not 0, and writes 4. One
# program for each tile.
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
    element = pid * (ROWS * BLOCK_SIZE)
    count = end - element
    tile, is_whole = find_tile(tiles_ptr, segments_ptr, pid, count, ROWS * BLOCK_SIZE, DTYPE_SET)
    if is_whole:
        _merge_tile(
            outer_ptr, tile, element, count, alpha, one_minus_alpha,
            ROWS, BLOCK_SIZE, HAS_ALPHA, DTYPE_SET, True,
        )  # fmt: skip
    else:
        _merge_tile(
            outer_ptr, tile, element, count, alpha, one_minus_alpha,
            ROWS, BLOCK_SIZE, HAS_ALPHA, DTYPE_SET, False,
        )  # fmt: skip
