"""Blocks for Triton: how the scales and codes of a tile are made, read and written.

A tile is [ROWS, BLOCK_SIZE] elements of one run; a row is a block, which has one scale. Functions
take FORM, which is (ROWS, BLOCK_SIZE, WIRE, CODE_BITS), and ``part``, which says where the tile is
in its run: (byte of the run at which its codes begin, the tile's first element in the run, number
of elements from there on). CODE_BITS is 0 in rotated and sparse wires, whose blocks have a single
code each. FULL says that the tile has all its elements, so that no masks are needed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .codes import bits_float, code_values, encode_codes, magnitude_bits, random_bits
from .codes import scale_bits as scale_bits_of
from .rotation import load_blocks
from .sparse import BLOCK, load_largest


@triton.jit
def find_part(first_run, tiles_per_run, run_elements, code_offset, end, FORM: tl.constexpr):
    """The run of a program's tile, its ``part``, and its first element in the fragment."""
    pid = tl.program_id(0)
    run = first_run.to(tl.int64) + pid // tiles_per_run
    start = (pid % tiles_per_run).to(tl.int64) * (FORM[0] * FORM[1])
    element = run * run_elements + start
    count = tl.minimum(run_elements - start, end - element)
    return run, (code_offset, start, count), element


@triton.jit
def form_offsets(FORM: tl.constexpr):
    """Offsets of a tile's elements from its first one."""
    return tile_offsets(FORM[0], FORM[1])


@triton.jit
def tile_offsets(ROWS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    return tl.arange(0, ROWS)[:, None] * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)[None, :]


@triton.jit
def _codes_at(run_ptr, code_offset, start, CODE_BITS: tl.constexpr):
    """Pointer to the code of element ``start`` of the run."""
    if CODE_BITS == 4:
        pointer = run_ptr + code_offset + start // 2
    elif CODE_BITS == 8:
        pointer = run_ptr + code_offset + start
    elif CODE_BITS == 16:
        pointer = (run_ptr + code_offset + start * 2).to(tl.pointer_type(tl.uint16))
    else:
        pointer = (run_ptr + code_offset + start * 4).to(tl.pointer_type(tl.uint32))
    return pointer


@triton.jit
def _load(pointer, count, offsets, FULL: tl.constexpr):
    """Load the ``count`` elements of a tile that exist; the others become 0."""
    return tl.load(pointer) if FULL else tl.load(pointer, mask=offsets < count, other=0)


@triton.jit
def _load_codes(run_ptr, part, FORM: tl.constexpr, FULL: tl.constexpr):
    ROWS: tl.constexpr = FORM[0]
    BLOCK_SIZE: tl.constexpr = FORM[1]
    CODE_BITS: tl.constexpr = FORM[3]
    code_offset, start, count = part
    pointer = _codes_at(run_ptr, code_offset, start, CODE_BITS)
    if CODE_BITS == 4:
        offsets = tile_offsets(ROWS, BLOCK_SIZE // 2)
        pairs = _load(pointer + offsets, (count + 1) // 2, offsets, FULL).to(tl.uint32)
        code = tl.reshape(tl.join(pairs & 0xF, pairs >> 4), [ROWS, BLOCK_SIZE])
    else:
        offsets = tile_offsets(ROWS, BLOCK_SIZE)
        code = _load(pointer + offsets, count, offsets, FULL).to(tl.uint32)
    return code


@triton.jit
def load_values(run_ptr, part, FORM: tl.constexpr, FULL: tl.constexpr):
    """Decode the tile at ``part`` of a run; elements that do not exist are 0."""
    # One return at the end: Triton also compiles the code after a branch that returns.
    if FORM[1] == BLOCK:  # only sparse wires have blocks of that size
        values = load_largest(run_ptr, part, FORM)
    elif FORM[3] == 0:
        values = load_blocks(run_ptr, part, FORM, FULL)
    else:
        values = _load_elements(run_ptr, part, FORM, FULL)
    return values


@triton.jit
def _load_elements(run_ptr, part, FORM: tl.constexpr, FULL: tl.constexpr):
    ROWS: tl.constexpr = FORM[0]
    BLOCK_SIZE: tl.constexpr = FORM[1]
    value = code_values(_load_codes(run_ptr, part, FORM, FULL), FORM[2])
    if FORM[3] <= 8:
        _, start, count = part
        rows = tl.arange(0, ROWS)
        pointer = run_ptr.to(tl.pointer_type(tl.uint16)) + start // BLOCK_SIZE + rows
        scale = bits_float(_load(pointer, count, rows * BLOCK_SIZE, FULL).to(tl.uint32) << 16)
        value = value * scale[:, None]
    return value


@triton.jit
def _store_codes(run_ptr, part, code, FORM: tl.constexpr, FULL: tl.constexpr):
    ROWS: tl.constexpr = FORM[0]
    BLOCK_SIZE: tl.constexpr = FORM[1]
    CODE_BITS: tl.constexpr = FORM[3]
    code_offset, start, count = part
    pointer = _codes_at(run_ptr, code_offset, start, CODE_BITS)
    if CODE_BITS == 4:
        # If the number of codes is odd, the high nibble of the last byte is 0.
        low, high = tl.split(tl.reshape(code, [ROWS, BLOCK_SIZE // 2, 2]))
        code = low | (high << 4)
        offsets = tile_offsets(ROWS, BLOCK_SIZE // 2)
        count = (count + 1) // 2
    else:
        offsets = tile_offsets(ROWS, BLOCK_SIZE)
    code = code.to(pointer.dtype.element_ty)
    if FULL:
        tl.store(pointer + offsets, code)
    else:
        tl.store(pointer + offsets, code, mask=offsets < count)


@triton.jit
def store_values(
    x,
    run_ptr,
    part,
    element,
    key,
    nonfinite_ptr,
    FORM: tl.constexpr,
    QMAX: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    FULL: tl.constexpr,
):
    """Encode a tile at ``part`` of a run, and return the values of its codes.

    ``element`` is the index in the fragment of the tile's first element. x must be 0 for elements
    that do not exist.
    """
    ROWS: tl.constexpr = FORM[0]
    BLOCK_SIZE: tl.constexpr = FORM[1]
    WIRE: tl.constexpr = FORM[2]
    CODE_BITS: tl.constexpr = FORM[3]
    _, start, count = part
    bad = magnitude_bits(x) > 0x7E800000
    if CODE_BITS <= 8:
        rows = tl.arange(0, ROWS)
        absmax = tl.max(magnitude_bits(x), axis=1)
        is_bad_row = absmax > 0x7E800000
        scale = scale_bits_of(bits_float(tl.where(is_bad_row, 0, absmax)), QMAX)
        pointer = run_ptr.to(tl.pointer_type(tl.uint16)) + start // BLOCK_SIZE + rows
        tl.store(pointer, (scale >> 16).to(tl.uint16), mask=rows * BLOCK_SIZE < count)
        inverse = tl.div_rn(1.0, bits_float(scale))
        y = tl.where(is_bad_row[:, None], 0.0, x) * inverse[:, None]
    else:
        y = tl.where(bad, 0.0, x)
    r = y
    if STOCHASTIC and WIRE != "fp32":
        r = random_bits(element, key, ROWS, BLOCK_SIZE)
    code = encode_codes(y, r, WIRE, STOCHASTIC)
    # In a block with a bad element y is +0, whose code is 0 even with stochastic rounding.
    if WIRE == "fp16":
        bad = bad | ((code & 0x7FFF) >= 0x7C00)
    if CODE_BITS > 8:
        code = tl.where(bad, 0, code)
    if not FULL:
        offsets = tile_offsets(ROWS, BLOCK_SIZE)
        code = tl.where(offsets < count, code, 0)
    _store_codes(run_ptr, part, code, FORM, FULL)
    if nonfinite_ptr is not None:
        # Bad elements are rare, so each adds 1 by itself, and no sum is computed first.
        places = nonfinite_ptr + tl.zeros([ROWS, BLOCK_SIZE], tl.int32)
        one = tl.full([ROWS, BLOCK_SIZE], 1, tl.int64)
        tl.atomic_add(places, one, mask=bad, sem="relaxed")
    value = code_values(code, WIRE)
    return value * bits_float(scale)[:, None] if CODE_BITS <= 8 else value
