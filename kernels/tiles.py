"""Tables by which kernels find the elements of a fragment's tensors, however many there are.

A *tile* has consecutive elements of one run, on which one program works. The first table, on the
device, has a row for each tile of the fragment, so that one launch covers any chunk:

    (address, dtype)       all of the tile is in one tensor, at a multiple of 16 bytes
    (segment, -1 - count)  the tile is cut short, or is in ``count`` tensors from ``segment`` on

The second table has a row for each tensor (segment) that is not empty: (begin, end, address,
dtype), where begin and end count the fragment's elements. Both tables are made once for a fragment
and the sizes of its runs and tiles, and are found again by the tensors' addresses.

A fragment of one tensor needs no tables. Then the tensor itself is passed in place of the second
table, and the set of dtypes, ``DTYPE_SET``, is 0.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .codes import bf16_bits, bits_float, float_bits

# The number of a dtype in the tables; bit 1 << number says that a fragment has such tensors.
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


@triton.jit
def find_tile(tiles_ptr, segments_ptr, place, count, TILE: tl.constexpr, DTYPE_SET: tl.constexpr):
    """Return a tile's row of the first table, and whether it is uncut, aligned, in one tensor.

    ``load_tile`` and ``store_tile`` take the row. A fragment's only tensor need not be aligned.
    """
    if DTYPE_SET == 0:
        where = place
        kind = tl.where(count >= TILE, 0, -1)
    else:
        row = tiles_ptr + place * 2
        where, kind = tl.load(row), tl.load(row + 1).to(tl.int32)
    return (where, kind, segments_ptr), kind >= 0


@triton.jit
def load_any(pointer, offsets, mask, FULL: tl.constexpr):
    """Load fp32, bf16 or fp16 as fp32; 0 for elements that ``mask`` leaves out, unless FULL."""
    if pointer.dtype.element_ty == tl.bfloat16:
        pointer = pointer.to(tl.pointer_type(tl.uint16))
        raw = tl.load(pointer + offsets) if FULL else tl.load(pointer + offsets, mask, other=0)
        value = (raw.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        raw = tl.load(pointer + offsets) if FULL else tl.load(pointer + offsets, mask, other=0)
        value = raw.to(tl.float32)
    return value


@triton.jit
def _written(outer, NUMBER: tl.constexpr):
    """c(outer): the values of tensors of the dtype NUMBER after outer was written to them."""
    if NUMBER == 0:
        value = outer
    elif NUMBER == 1:
        value = bits_float(bf16_bits(outer) << 16)
    else:
        value = outer.to(tl.float16).to(tl.float32)
    return value


@triton.jit
def _rounded(x, outer, NUMBER: tl.constexpr):
    """x in the dtype NUMBER, as fp32: to nearest, or toward c(outer) unless outer is None."""
    if outer is not None and NUMBER != 0:
        is_up = x < _written(outer, NUMBER)
        if NUMBER == 1:
            # Dropping the low bits rounds toward zero; adding 0xFFFF before rounds away from zero.
            added = tl.where(is_up ^ (x < 0), 0xFFFF, 0).to(tl.uint32)
            x = bits_float((float_bits(x) + added) & 0xFFFF0000)
        else:
            half = x.to(tl.float16)
            nearest = half.to(tl.float32)
            is_beyond = tl.where(is_up, nearest < x, nearest > x)
            # Bits of the same sign rise with the magnitude, so +-1 is the neighbouring value.
            bits = half.to(tl.uint16, bitcast=True).to(tl.int32)
            bits += tl.where(is_beyond, tl.where(tl.abs(nearest) < tl.abs(x), 1, -1), 0)
            x = bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    return x


@triton.jit
def store_any(pointer, offsets, value, outer, mask, FULL: tl.constexpr):
    """Store fp32 as fp32, bf16 or fp16, rounded toward c(outer), or to nearest if outer is None."""
    if pointer.dtype.element_ty == tl.bfloat16:
        pointer = pointer.to(tl.pointer_type(tl.uint16))
        value = bf16_bits(_rounded(value, outer, 1)).to(tl.uint16)
    elif pointer.dtype.element_ty == tl.float16:
        value = _rounded(value, outer, 2).to(tl.float16)
    if FULL:
        tl.store(pointer + offsets, value)
    else:
        tl.store(pointer + offsets, value, mask=mask)


@triton.jit
def _load_one(
    address,
    dtype,
    offsets,
    mask,
    NUMBER: tl.constexpr,
    DTYPE_SET: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Load elements at the address if their dtype is NUMBER; else 0, and nothing is read."""
    if NUMBER == 0:
        pointer = address.to(tl.pointer_type(tl.float32))
    elif NUMBER == 1:
        pointer = address.to(tl.pointer_type(tl.uint16))
    else:
        pointer = address.to(tl.pointer_type(tl.float16))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    if (1 << NUMBER) == DTYPE_SET:
        raw = tl.load(pointer + offsets) if ALIGNED else tl.load(pointer + offsets, mask, other=0)
    else:
        is_this = (offsets * 0 + dtype) == NUMBER
        raw = tl.load(pointer + offsets, mask=is_this if ALIGNED else mask & is_this, other=0)
    if NUMBER == 1:
        value = (raw.to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        value = raw.to(tl.float32)
    return value


@triton.jit
def load_at(address, dtype, offsets, mask, DTYPE_SET: tl.constexpr, ALIGNED: tl.constexpr):
    """Load elements of one tensor as fp32; ``dtype`` says which dtype of DTYPE_SET it has."""
    if DTYPE_SET & 1:
        value = _load_one(address, dtype, offsets, mask, 0, DTYPE_SET, ALIGNED)
    if DTYPE_SET & 2:
        bf16 = _load_one(address, dtype, offsets, mask, 1, DTYPE_SET, ALIGNED)
        value = tl.where(dtype == 1, bf16, value) if DTYPE_SET & 1 else bf16
    if DTYPE_SET & 4:
        fp16 = _load_one(address, dtype, offsets, mask, 2, DTYPE_SET, ALIGNED)
        value = tl.where(dtype == 2, fp16, value) if DTYPE_SET & 3 else fp16
    return value


@triton.jit
def _store_one(
    address,
    dtype,
    offsets,
    value,
    outer,
    mask,
    NUMBER: tl.constexpr,
    DTYPE_SET: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """Store fp32 values at the address, rounded to the dtype NUMBER, if ``dtype`` is NUMBER."""
    value = _rounded(value, outer, NUMBER)
    if NUMBER == 0:
        pointer = address.to(tl.pointer_type(tl.float32))
        raw = value
    elif NUMBER == 1:
        pointer = address.to(tl.pointer_type(tl.uint16))
        raw = bf16_bits(value).to(tl.uint16)
    else:
        pointer = address.to(tl.pointer_type(tl.float16))
        raw = value.to(tl.float16)
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    if (1 << NUMBER) == DTYPE_SET:
        if ALIGNED:
            tl.store(pointer + offsets, raw)
        else:
            tl.store(pointer + offsets, raw, mask=mask)
    else:
        is_this = (offsets * 0 + dtype) == NUMBER
        tl.store(pointer + offsets, raw, mask=is_this if ALIGNED else mask & is_this)


@triton.jit
def _store_at(
    address,
    dtype,
    offsets,
    value,
    outer,
    mask,
    DTYPE_SET: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    if DTYPE_SET & 1:
        _store_one(address, dtype, offsets, value, outer, mask, 0, DTYPE_SET, ALIGNED)
    if DTYPE_SET & 2:
        _store_one(address, dtype, offsets, value, outer, mask, 1, DTYPE_SET, ALIGNED)
    if DTYPE_SET & 4:
        _store_one(address, dtype, offsets, value, outer, mask, 2, DTYPE_SET, ALIGNED)


@triton.jit
def round_at(outer, dtype, DTYPE_SET: tl.constexpr):
    """c(outer): the values that a tensor of the dtype has after outer was written to it.

    ``dtype`` is the number of the dtype, or in a fragment of one tensor the pointer to that tensor.
    """
    value = outer
    if DTYPE_SET == 0:
        if dtype.dtype.element_ty == tl.bfloat16:
            value = _written(outer, 1)
        elif dtype.dtype.element_ty == tl.float16:
            value = _written(outer, 2)
    if DTYPE_SET & 2:
        bf16 = _written(outer, 1)
        value = bf16 if DTYPE_SET == 2 else tl.where(dtype == 1, bf16, value)
    if DTYPE_SET & 4:
        fp16 = _written(outer, 2)
        value = fp16 if DTYPE_SET == 4 else tl.where(dtype == 2, fp16, value)
    return value


@triton.jit
def load_tile(tile, element, offsets, outer, mask, DTYPE_SET: tl.constexpr, FULL: tl.constexpr):
    """Load a tile's elements as fp32; unless outer is None, c(outer) minus the elements.

    ``tile`` is from ``find_tile``, and ``element`` is the tile's first element. With FULL, the row
    has the address. Else elements are loaded from one tensor after the other, and elements that
    ``mask`` leaves out are 0.
    """
    where, kind, segments_ptr = tile
    if DTYPE_SET == 0:
        x = load_any(segments_ptr + element, offsets, mask, FULL)
        if outer is not None:
            x = round_at(outer, segments_ptr, 0) - x
    elif FULL:
        x = load_at(where, kind, offsets, None, DTYPE_SET, True)
        if outer is not None:
            x = round_at(outer, kind, DTYPE_SET) - x
    else:
        x = (offsets * 0).to(tl.float32)
        for i in range(0, -1 - kind):
            row = segments_ptr + (where + i) * 4
            begin, end = tl.load(row), tl.load(row + 1)
            address, dtype = tl.load(row + 2), tl.load(row + 3)
            index = offsets + element
            inside = (index >= begin) & (index < end) & mask
            part = load_at(address, dtype, index - begin, inside, DTYPE_SET, False)
            if outer is not None:
                part = round_at(outer, dtype, DTYPE_SET) - part
            x = tl.where(inside, part, x)
    return x


@triton.jit
def store_tile(
    tile,
    element,
    offsets,
    value,
    outer,
    mask,
    DTYPE_SET: tl.constexpr,
    FULL: tl.constexpr,
):
    """Store a tile's elements in the dtype of each tensor, rounded as by ``store_any``."""
    where, kind, segments_ptr = tile
    if DTYPE_SET == 0:
        store_any(segments_ptr + element, offsets, value, outer, mask, FULL)
    elif FULL:
        _store_at(where, kind, offsets, value, outer, None, DTYPE_SET, True)
    else:
        for i in range(0, -1 - kind):
            row = segments_ptr + (where + i) * 4
            begin, end = tl.load(row), tl.load(row + 1)
            address, dtype = tl.load(row + 2), tl.load(row + 3)
            index = offsets + element
            inside = (index >= begin) & (index < end) & mask
            _store_at(address, dtype, index - begin, value, outer, inside, DTYPE_SET, False)
