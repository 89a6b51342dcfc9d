"""The rotated wires for Triton; ``csrc/wire/rotation.h`` has the formulas and their symbols.

A row of a tile is a block. All arithmetic but the scale's is on integers that cannot overflow, so
that additions in any order give the same bytes. ``blocks.py`` explains FORM and ``part``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .codes import bf16_bits, bits_float, float_bits, magnitude_bits


@triton.jit
def _random_signs(key, SIZE: tl.constexpr):
    """1 for elements of a block whose sign changes, else 0: int32 [1, SIZE]."""
    counter = tl.arange(0, SIZE // 128).to(tl.uint32)
    zero = tl.zeros_like(counter)
    w0, w1, w2, w3 = tl.philox(key, counter, zero, zero + 1, zero, n_rounds=7)
    # tl.join() appends a dimension, so these joins put the four words in order.
    words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [SIZE // 32])
    bits = (words[:, None] >> tl.arange(0, 32).to(tl.uint32)[None, :]) & 1
    return tl.reshape(bits.to(tl.int32), [1, SIZE])


@triton.jit
def _hadamard(y, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """The Hadamard transform of each row of an integer tile [ROWS, SIZE], SIZE from 64 to 512.

    Each stage combines elements whose indices differ in the lowest bit, and moves that bit to the
    top of the index. After the last stage the order is the original one.
    """
    STAGES: tl.constexpr = 9 if SIZE == 512 else 8 if SIZE == 256 else 7 if SIZE == 128 else 6
    for _ in tl.static_range(STAGES):
        a, b = tl.split(tl.reshape(y, [ROWS, SIZE // 2, 2]))
        y = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 2, 1)), [ROWS, SIZE])
    return y


@triton.jit
def _pack(bits, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """Bits [ROWS, SIZE] as bytes [ROWS, SIZE / 8], int32; bit k is bit k % 8 of byte k // 8."""
    bits = tl.reshape(bits.to(tl.int32), [ROWS, SIZE // 8, 8])
    return tl.sum(bits << tl.arange(0, 8)[None, None, :], axis=2)


@triton.jit
def _unpack(code, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """The bits of bytes [ROWS, SIZE / 8], int32, as int32 [ROWS, SIZE], 0 or 1."""
    bits = (code[:, :, None] >> tl.arange(0, 8)[None, None, :]) & 1
    return tl.reshape(bits, [ROWS, SIZE])


@triton.jit
def _code_places(run_ptr, part, FORM: tl.constexpr, KEPT: tl.constexpr):
    """Pointers [ROWS, KEPT / 8] to the first KEPT bits of each block's code."""
    ROWS: tl.constexpr = FORM[0]
    BLOCK_BYTES: tl.constexpr = KEPT // 4 if FORM[2] == "int2r" else KEPT // 8
    code_offset, start, _ = part
    rows = start // FORM[1] + tl.arange(0, ROWS)
    return run_ptr + code_offset + rows[:, None] * BLOCK_BYTES + tl.arange(0, KEPT // 8)[None, :]


@triton.jit
def _scale_places(run_ptr, part, FORM: tl.constexpr):
    """Pointers [ROWS] to the scales of the blocks; a run's first scale follows its key."""
    return (run_ptr + 8).to(tl.pointer_type(tl.uint16)) + part[1] // FORM[1] + tl.arange(0, FORM[0])


@triton.jit
def _elements(large, sign, scale, signs, FORM: tl.constexpr, KEPT: tl.constexpr):
    """Decode blocks from the bits of their codes; only int2r has the bits ``large``."""
    ROWS: tl.constexpr = FORM[0]
    SIZE: tl.constexpr = FORM[1]
    level = 1
    if FORM[2] == "int2r":
        level = 3 + 7 * large
    z = _hadamard(level - 2 * level * sign, ROWS, KEPT)
    if KEPT < SIZE:
        z = tl.reshape(tl.broadcast_to(z[:, None, :], [ROWS, SIZE // KEPT, KEPT]), [ROWS, SIZE])
    # Change signs as integers, so that no zero becomes negative.
    z = z - 2 * z * signs
    value = z.to(tl.float32) * scale[:, None]
    return tl.where(scale[:, None] == 0, 0.0, value)


@triton.jit
def received_scale(bits, LARGEST: tl.constexpr):
    """The values of scales from their bf16 bits; NaN for bits that no encoder writes."""
    value = bits_float(bits << 16)
    is_made = (bits >= 0x0080) & (bits < 0x7F80) & (value * (LARGEST * 1.0) <= 2.0**126)
    return tl.where((bits == 0) | is_made, value, float("nan"))


@triton.jit
def load_blocks(run_ptr, part, FORM: tl.constexpr, FULL: tl.constexpr):
    """Decode the tile at ``part`` of a run; blocks that do not exist are 0."""
    ROWS: tl.constexpr = FORM[0]
    SIZE: tl.constexpr = FORM[1]
    # The number of elements that share a coefficient. It is computed here and not by a function,
    # because functions cannot return constants in Triton 3.6.
    FOLDS: tl.constexpr = (
        2 if FORM[2] == "sub2" else 4 if FORM[2] == "sub4" else 8 if FORM[2] == "sub8"
        else 16 if FORM[2] == "sub16" else 1
    )  # fmt: skip
    KEPT: tl.constexpr = SIZE // FOLDS
    LARGEST: tl.constexpr = KEPT * 10 if FORM[2] == "int2r" else KEPT
    eight = tl.arange(0, 8)
    key = tl.sum(tl.load(run_ptr + eight).to(tl.int64) << (8 * eight).to(tl.int64), axis=0)
    exists = tl.arange(0, ROWS) * SIZE < part[2]
    places, scales = _code_places(run_ptr, part, FORM, KEPT), _scale_places(run_ptr, part, FORM)
    second = places + KEPT // 8
    if FULL:
        code, bits = tl.load(places), tl.load(scales)
    else:
        code = tl.load(places, mask=exists[:, None], other=0)
        bits = tl.load(scales, mask=exists, other=0)
    first = _unpack(code.to(tl.int32), ROWS, KEPT)
    sign = first
    if FORM[2] == "int2r":
        code = tl.load(second) if FULL else tl.load(second, mask=exists[:, None], other=0)
        sign = _unpack(code.to(tl.int32), ROWS, KEPT)
    scale = received_scale(bits.to(tl.uint32), LARGEST)
    return _elements(first, sign, scale, _random_signs(key, SIZE), FORM, KEPT)


@triton.jit
def _coefficients(x, exponent, signs, FORM: tl.constexpr, KEPT: tl.constexpr, BITS: tl.constexpr):
    """The coefficients [ROWS, KEPT], integers; ``exponent`` is E of each block."""
    ROWS: tl.constexpr = FORM[0]
    SIZE: tl.constexpr = FORM[1]
    unit = bits_float(((BITS + 127 - exponent) << 23).to(tl.uint32))
    # Adding 1.5 * 2^23 leaves no fraction: the sum's low bits are the integer, rounded half to
    # even.
    q = float_bits(x * unit[:, None] + 12582912.0).to(tl.int32) - 0x4B400000
    q = q - 2 * q * signs
    if KEPT < SIZE:
        q = tl.sum(tl.reshape(q, [ROWS, SIZE // KEPT, KEPT]), axis=1)
    return _hadamard(q, ROWS, KEPT)


@triton.jit
def _scale_bits(
    total, energy, large_total, num_large, exponent,
    FORM: tl.constexpr, KEPT: tl.constexpr, BITS: tl.constexpr, LEAST_SQUARES: tl.constexpr,
):  # fmt: skip
    """The bf16 bits of the scales, uint32; 0 for a block that is null."""
    LOG_KEPT: tl.constexpr = 9 if KEPT == 512 else 8 if KEPT == 256 else 7 if KEPT == 128 else 6
    product = total.to(tl.float32)
    square = tl.full([FORM[0]], KEPT, tl.int32)
    if FORM[2] == "int2r":
        product = 3.0 * product + 7.0 * large_total.to(tl.float32)
        square = 9 * KEPT + 91 * num_large
    # In a block of zeros 1 replaces the divisor 0; the block is null anyway.
    safe = tl.where(total == 0, 1.0, product)
    if LEAST_SQUARES:
        gain = tl.div_rn(product, square.to(tl.float32))
    else:
        gain = tl.div_rn(energy.to(tl.float32), safe)
    unit = bits_float(((exponent + (127 - BITS - LOG_KEPT)) << 23).to(tl.uint32))
    bits = bf16_bits(gain * unit)
    return tl.where((total == 0) | (bits < 0x0080), 0, bits)


@triton.jit
def store_blocks(
    x,
    run_ptr,
    part,
    key,
    nonfinite_ptr,
    FORM: tl.constexpr,
    LEAST_SQUARES: tl.constexpr,
    FULL: tl.constexpr,
):
    """Encode a tile at ``part`` of a run, and return the values of its codes.

    x must be 0 for elements that do not exist. With LEAST_SQUARES, for error feedback, the scale
    is the one with the smallest error.
    """
    ROWS: tl.constexpr = FORM[0]
    SIZE: tl.constexpr = FORM[1]
    # The number of elements that share a coefficient. It is computed here and not by a function,
    # because functions cannot return constants in Triton 3.6.
    FOLDS: tl.constexpr = (
        2 if FORM[2] == "sub2" else 4 if FORM[2] == "sub4" else 8 if FORM[2] == "sub8"
        else 16 if FORM[2] == "sub16" else 1
    )  # fmt: skip
    KEPT: tl.constexpr = SIZE // FOLDS
    BITS: tl.constexpr = 17 if SIZE == 256 else 15
    key = key.to(tl.int64)
    eight = tl.arange(0, 8)
    digits = ((key >> (8 * eight).to(tl.int64)) & 0xFF).to(tl.uint8)
    tl.store(run_ptr + eight, digits, mask=eight + part[1] < 8)  # the run's first tile only
    bad = magnitude_bits(x) > 0x79800000
    if nonfinite_ptr is not None:
        one = tl.full([ROWS, SIZE], 1, tl.int64)
        places = nonfinite_ptr + tl.zeros([ROWS, SIZE], tl.int32)
        tl.atomic_add(places, one, mask=bad, sem="relaxed")
    largest = tl.max(magnitude_bits(x), axis=1)
    is_bad = largest > 0x79800000
    largest = tl.where(is_bad, 0, largest)
    exponent = tl.maximum((largest >> 23).to(tl.int32) - 127, -100)
    signs = _random_signs(key, SIZE)
    good = tl.where(is_bad[:, None], 0.0, x)
    y = _coefficients(good, exponent, signs, FORM, KEPT, BITS)
    magnitude = tl.abs(y)
    total = tl.sum(magnitude, axis=1)
    wide = y.to(tl.int64)
    energy = tl.sum(wide * wide, axis=1)
    large, large_total, num_large = magnitude, total, total
    if FORM[2] == "int2r":
        border = ((total.to(tl.int64) * 315) >> 16).to(tl.int32)
        large = (magnitude > border[:, None]).to(tl.int32)
        large_total = tl.sum(magnitude * large, axis=1)
        num_large = tl.sum(large, axis=1)
    bits = _scale_bits(
        total, energy, large_total, num_large, exponent, FORM, KEPT, BITS, LEAST_SQUARES
    )
    is_sent = (bits != 0).to(tl.int32)[:, None]
    sign = (y < 0).to(tl.int32) * is_sent
    large = large * is_sent
    exists = tl.arange(0, ROWS) * SIZE < part[2]
    tl.store(_scale_places(run_ptr, part, FORM), bits.to(tl.uint16), mask=exists)
    places = _code_places(run_ptr, part, FORM, KEPT)
    if FORM[2] == "int2r":
        tl.store(places, _pack(large, ROWS, KEPT).to(tl.uint8), mask=exists[:, None])
        places += KEPT // 8
    tl.store(places, _pack(sign, ROWS, KEPT).to(tl.uint8), mask=exists[:, None])
    return _elements(large, sign, bits_float(bits << 16), signs, FORM, KEPT)
