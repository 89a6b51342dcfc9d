"""norms for Triton: sums of squares in one fixed order."""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import find_tile, load_any, load_at

TILE = 65536  # elements whose squares one program sums
LANES = 16  # partial sums of a tile: element i goes to lane i mod 16


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
    DTYPE_SET: tl.constexpr,
):
    """Add elements [first, last) of a tile, row by row, from a tensor that begins at ``begin``."""
    lanes = tl.arange(0, LANES)
    for row in range(first // LANES, (last + LANES - 1) // LANES):
        place = row * LANES + lanes
        mask = (place >= first) & (place < last)
        index = element + place
        if DTYPE_SET == 0:
            x = load_any(address + element, place, mask, False)
        else:
            x = load_at(address, dtype, index - begin, mask, DTYPE_SET, False)
        if outer_ptr is not None:
            x = tl.load(outer_ptr + index, mask=mask, other=0.0) - x
        bad = ((x.to(tl.uint32, bitcast=True) & 0x7FFFFFFF) > 0x7E800000) & mask
        # A lane that is masked adds +0, which changes nothing.
        square = tl.where(bad | (mask == 0), 0.0, x).to(tl.float64)
        total += square * square
        num_bad += bad.to(tl.int32)
    return total, num_bad


# partials[tile] <- (sum of squares of the good elements, number of bad ones) of outer - params
# Reads 4 + 4 bytes an element (fp32 parameters). One warp a tile of 65536 elements: the order of
# the sum is part of the definition, sixteen sums that each take every sixteenth element.
@triton.jit(do_not_specialize=["end"])
def _norms_kernel(
    outer_ptr,
    tiles_ptr,
    segments_ptr,
    partials_ptr,
    end,
    TILE: tl.constexpr,
    LANES: tl.constexpr,
    DTYPE_SET: tl.constexpr,
):
    pid = tl.program_id(0).to(tl.int64)
    element = pid * TILE
    tile, is_whole = find_tile(tiles_ptr, segments_ptr, pid, end - element, TILE, DTYPE_SET)
    where, kind, _ = tile
    total = tl.zeros([LANES], tl.float64)
    num_bad = tl.zeros([LANES], tl.int32)
    if DTYPE_SET == 0:
        last = tl.minimum(end - element, TILE).to(tl.int32)
        total, num_bad = _add_squares(
            total, num_bad, outer_ptr, segments_ptr, 0, 0, 0, last, element, LANES, DTYPE_SET
        )
    elif is_whole:
        total, num_bad = _add_squares(
            total, num_bad, outer_ptr, where, kind, element, 0, TILE, element, LANES, DTYPE_SET
        )
    else:
        for i in range(0, -1 - kind):
            segment = segments_ptr + (where + i) * 4
            begin, stop = tl.load(segment), tl.load(segment + 1)
            address, dtype = tl.load(segment + 2), tl.load(segment + 3)
            first = (tl.maximum(begin, element) - element).to(tl.int32)
            last = (tl.minimum(tl.minimum(stop, end), element + TILE) - element).to(tl.int32)
            total, num_bad = _add_squares(
                total, num_bad, outer_ptr, address, dtype, begin, first, last, element,
                LANES, DTYPE_SET,
            )  # fmt: skip
    # The upper half is added to the lower one until one number is left.
    half = tl.sum(tl.reshape(total, [2, LANES // 2]), axis=0)
    half = tl.sum(tl.reshape(half, [2, LANES // 4]), axis=0)
    half = tl.sum(tl.reshape(half, [2, LANES // 8]), axis=0)
    tl.store(partials_ptr + pid * 2, tl.sum(half, axis=0))
    tl.store(partials_ptr + pid * 2 + 1, tl.sum(num_bad, axis=0).to(tl.float64))


# out <- partials[0] + partials[1] + ..., one after the other. One program.
@triton.jit(do_not_specialize=["num_tiles"])
def _sum_partials_kernel(partials_ptr, out_ptr, num_tiles):
    total = tl.zeros([], tl.float64)
    num_bad = tl.zeros([], tl.float64)
    for i in range(0, num_tiles):
        total += tl.load(partials_ptr + i * 2)
        num_bad += tl.load(partials_ptr + i * 2 + 1)
    tl.store(out_ptr, total)
    tl.store(out_ptr + 1, num_bad)
