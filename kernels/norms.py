"""norms for Triton: the sum of squares of a fragment, in a fixed order."""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import find_tile, load_any, load_at, round_at

TILE = 65536  # elements whose squares one program sums
LANES = 16  # partial sums of a tile: element i goes to lane i mod 16
ROWS = 16  # rows of LANES elements that are loaded before the first row is added
BATCH = 32  # sums of tiles that are loaded before the first sum is added


@triton.jit
def _load_row(
    outer_ptr,
    address,
    dtype,
    begin,
    element,
    place,
    mask,
    DTYPE_SET: tl.constexpr,
    FULL: tl.constexpr,
):
    """Load a row of c(outer) - params, or of params; 0 for elements that ``mask`` leaves out."""
    index = element + place
    if DTYPE_SET == 0:
        x = load_any(address + element, place, mask, FULL)
    else:
        x = load_at(address, dtype, index - begin, mask, DTYPE_SET, FULL)
    if outer_ptr is not None:
        outer = tl.load(outer_ptr + index) if FULL else tl.load(outer_ptr + index, mask, other=0.0)
        x = round_at(outer, address if DTYPE_SET == 0 else dtype, DTYPE_SET) - x
    return x


@triton.jit
def _add_squares(
    total,
    num_bad,
    outer_ptr,
    address,
    dtype,
    begin,
    first,
    last,
    element,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
    DTYPE_SET: tl.constexpr,
    FULL: tl.constexpr,
):
    """Add the squares of elements [first, last) of a tile, which are in one tensor, row by row.

    ``begin`` is the tensor's first element in the fragment. ROWS rows are loaded before the first
    is added, so that many loads run at the same time. With FULL, first is 0 and last a multiple of
    ROWS rows.
    """
    lanes = tl.arange(0, LANES)
    for row in range(first // LANES, (last + LANES - 1) // LANES, ROWS):
        values = ()
        for i in tl.static_range(ROWS):
            place = (row + i) * LANES + lanes
            mask = None if FULL else (place >= first) & (place < last)
            x = _load_row(
                outer_ptr, address, dtype, begin, element, place, mask, DTYPE_SET, FULL
            )  # fmt: skip
            values = values + (x,)  # type: ignore[assignment]  # noqa: RUF005
        for i in tl.static_range(ROWS):
            # Elements that the mask leaves out are +0, which changes no sum.
            bad = (values[i].to(tl.uint32, bitcast=True) & 0x7FFFFFFF) > 0x7E800000
            square = tl.where(bad, 0.0, values[i]).to(tl.float64)
            total += square * square
            num_bad += bad.to(tl.int32)
    return total, num_bad


# Writes the sum of squares of the good elements of c(outer) - params to totals[tile], and the
# number of bad elements to bads[tile]. Reads 4 + 4 bytes per element (fp32 parameters). One warp
# for each tile of 65536 elements: the operator defines the order of the sum, with sixteen partial
# sums that each take every sixteenth element.
@triton.jit(do_not_specialize=["end"])
def _norms_kernel(
    outer_ptr,
    tiles_ptr,
    segments_ptr,
    totals_ptr,
    bads_ptr,
    end,
    TILE: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
    DTYPE_SET: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    element = pid * TILE
    tile, is_whole = find_tile(tiles_ptr, segments_ptr, pid, end - element, TILE, DTYPE_SET)
    where, kind, _ = tile
    total = tl.zeros([LANES], tl.float64)
    num_bad = tl.zeros([LANES], tl.int32)
    if is_whole:
        address = segments_ptr if DTYPE_SET == 0 else where
        total, num_bad = _add_squares(
            total, num_bad, outer_ptr, address, kind, element, 0, TILE, element,
            LANES, ROWS, DTYPE_SET, True,
        )  # fmt: skip
    elif DTYPE_SET == 0:
        last = (end - element).to(tl.int32)
        total, num_bad = _add_squares(
            total, num_bad, outer_ptr, segments_ptr, 0, 0, 0, last, element,
            LANES, ROWS, DTYPE_SET, False,
        )  # fmt: skip
    else:
        for i in range(0, -1 - kind):
            segment = segments_ptr + (where + i) * 4
            begin, stop = tl.load(segment), tl.load(segment + 1)
            address, dtype = tl.load(segment + 2), tl.load(segment + 3)
            first = (tl.maximum(begin, element) - element).to(tl.int32)
            last = (tl.minimum(tl.minimum(stop, end), element + TILE) - element).to(tl.int32)
            total, num_bad = _add_squares(
                total, num_bad, outer_ptr, address, dtype, begin, first, last, element,
                LANES, ROWS, DTYPE_SET, False,
            )  # fmt: skip
    # The upper half is added to the lower one until one number is left.
    half = tl.sum(tl.reshape(total, [2, LANES // 2]), axis=0)
    half = tl.sum(tl.reshape(half, [2, LANES // 4]), axis=0)
    half = tl.sum(tl.reshape(half, [2, LANES // 8]), axis=0)
    tl.store(totals_ptr + pid, tl.sum(half, axis=0))
    tl.store(bads_ptr + pid, tl.sum(num_bad, axis=0).to(tl.float64))


@triton.jit
def _add_batch(
    total, num_bad, totals_ptr, bads_ptr, tile, num_tiles, BATCH: tl.constexpr, FULL: tl.constexpr
):
    """Add the sums of up to BATCH tiles in order; with FULL there are BATCH tiles."""
    values = ()
    for i in tl.static_range(BATCH):
        pointer = totals_ptr + tile + i
        # After the last tile there is +0, which changes no sum.
        x = tl.load(pointer) if FULL else tl.load(pointer, mask=tile + i < num_tiles, other=0.0)
        values = values + (x,)  # type: ignore[assignment]  # noqa: RUF005
    offsets = tile + tl.arange(0, BATCH)
    # Whole numbers below 2^53: their sum is exact in any order.
    num_bad += tl.load(bads_ptr + offsets, mask=offsets < num_tiles, other=0.0)
    for i in tl.static_range(BATCH):
        total += values[i]
    return total, num_bad


# Writes totals[0] + totals[1] + ..., added in order, and the sum of bads to `out`. A single
# program.
@triton.jit(do_not_specialize=["num_tiles"])
def _sum_partials_kernel(totals_ptr, bads_ptr, out_ptr, num_tiles, BATCH: tl.constexpr):
    total = tl.zeros([], tl.float64)
    num_bad = tl.zeros([BATCH], tl.float64)
    num_full = num_tiles // BATCH * BATCH
    for tile in range(0, num_full, BATCH):
        total, num_bad = _add_batch(
            total, num_bad, totals_ptr, bads_ptr, tile, num_tiles, BATCH, True
        )
    if num_full < num_tiles:
        total, num_bad = _add_batch(
            total, num_bad, totals_ptr, bads_ptr, num_full, num_tiles, BATCH, False
        )
    tl.store(out_ptr, total)
    tl.store(out_ptr + 1, tl.sum(num_bad, axis=0))
