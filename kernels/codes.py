"""The codes of the wire formats for Triton, as in ``csrc/wire``, for a tile of elements at a time.

All arithmetic is fp32 with one rounding for each operation. A number is rounded to an integer by
adding one so large that the sum has no bits for a fraction. Floating-point codes are made by
integer arithmetic, because Triton's interpreter and some devices cast to fp8 in another way.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def float_bits(x):
    return x.to(tl.uint32, bitcast=True)


@triton.jit
def bits_float(bits):
    return bits.to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def magnitude_bits(x):
    """The bits of |x|. As integers they rise with the number; Inf and NaN are the highest."""
    return float_bits(x) & 0x7FFFFFFF


@triton.jit
def random_bits(first, key, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The 16 random bits of elements from ``first`` (a multiple of 16) on, [ROWS, COLUMNS].

    One Philox block serves sixteen elements; ``csrc/wire/philox.h`` has the exact mapping.
    """
    PER_ROW: tl.constexpr = COLUMNS // 16
    block = tl.arange(0, ROWS)[:, None] * PER_ROW + tl.arange(0, PER_ROW)[None, :]
    counter = (first // 16).to(tl.uint64) + block.to(tl.uint64)
    low = (counter & 0xFFFFFFFF).to(tl.uint32)
    high = (counter >> 32).to(tl.uint32)
    zero = tl.zeros_like(low)
    w0, w1, w2, w3 = tl.philox(key, low, high, zero, zero, n_rounds=7)
    # tl.join() appends a dimension. In order of memory the result has the four words, in each word
    # its two halves, and in each half two elements; the first element's bytes are swapped.
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    halves = tl.join(words & 0xFFFF, words >> 16)
    pieces = tl.join(((halves << 8) | (halves >> 8)) & 0xFFFF, halves)
    return tl.reshape(pieces, [ROWS, COLUMNS])


@triton.jit
def _uniform(r):
    """(2 r + 1) * 2^-17, in (0, 1), exact."""
    return (2 * r + 1).to(tl.float32) * 7.62939453125e-06


@triton.jit
def _integer_code(y, r, LIMIT: tl.constexpr, STOCHASTIC: tl.constexpr):
    """One of the two integers around y, in the low bits of a uint32 in two's complement."""
    if STOCHASTIC:
        # The sum y + 768 has 14 bits after the binary point. Adding 14 random bits there carries
        # into the code above them.
        return (float_bits(y + 768.0) + (r >> 2)) >> 14
    limit = LIMIT * 1.0
    y = tl.minimum(tl.maximum(y, -limit), limit)
    # Adding 1.5 * 2^23 leaves no fraction: the sum's low bits are y, rounded half to even.
    return float_bits(y + 12582912.0)


@triton.jit
def _minifloat_code(
    y,
    r,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    LARGEST: tl.constexpr,
    SIGN: tl.constexpr,
    STOCHASTIC: tl.constexpr,
):
    """The code of y with MANTISSA bits and an exponent of this BIAS; magnitudes are consecutive."""
    SHIFT: tl.constexpr = 23 - MANTISSA
    bits = float_bits(y)
    magnitude = bits & 0x7FFFFFFF
    # Values below the smallest normal code are evenly spaced; scaled by this factor they are
    # integers, and so are their codes. Casts to an integer drop the fraction.
    grid = bits_float(magnitude) * (2.0 ** (BIAS - 1 + MANTISSA))
    if STOCHASTIC:
        if SHIFT > 16:
            tiny = (grid + _uniform(r)).to(tl.uint32)
            cut = magnitude + (r << (SHIFT - 16)) + (1 << (SHIFT - 17))
        else:
            upper = r >> (16 - SHIFT)
            half_spacing = (2 * upper + 1).to(tl.float32) * (2.0 ** (-SHIFT - 1))
            tiny = (grid + half_spacing).to(tl.uint32)
            cut = magnitude + upper
    else:
        tiny = float_bits(grid + 8388608.0) & 0x7FFFFF
        cut = magnitude + ((1 << (SHIFT - 1)) - 1) + ((magnitude >> SHIFT) & 1)
    normal = (cut >> SHIFT) - ((127 - BIAS) << MANTISSA)
    code = tl.where(magnitude < ((128 - BIAS) << 23), tiny, normal)
    code = tl.minimum(code, LARGEST)
    signed = code | tl.where((bits >> 31) != 0, SIGN, 0)
    # e3m0, the only format without a mantissa, has no negative zero.
    return tl.where(code == 0, 0, signed) if MANTISSA == 0 else signed


@triton.jit
def _minifloat_value(
    code, MANTISSA: tl.constexpr, BIAS: tl.constexpr, SPECIAL: tl.constexpr, SIGN: tl.constexpr
):
    """The value of a code. Magnitudes from SPECIAL on are Inf or NaN, depending on their bits."""
    magnitude = code & (SIGN - 1)
    shifted = magnitude << (23 - MANTISSA)
    value = float_bits(bits_float(shifted) * (2.0 ** (127 - BIAS)))
    value = tl.where(magnitude >= SPECIAL, shifted | 0x7F800000, value)
    return bits_float(value | tl.where((code & SIGN) != 0, 0x80000000, 0).to(tl.uint32))


@triton.jit
def bf16_bits(x):
    """Round fp32 to the nearest bf16, ties to even; a NaN becomes the quiet NaN 0x7FC0."""
    bits = float_bits(x)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7FC0, rounded)


@triton.jit
def encode_codes(y, r, WIRE: tl.constexpr, STOCHASTIC: tl.constexpr):
    """The codes of good elements y in the low bits of a uint32. STOCHASTIC uses random bits r."""
    if WIRE == "fp32":
        code = float_bits(y)
    elif WIRE == "bf16":
        code = (float_bits(y) + r) >> 16 if STOCHASTIC else bf16_bits(y)
    elif WIRE == "fp16":
        if STOCHASTIC:
            code = _minifloat_code(y, r, 10, 15, 0x7C00, 0x8000, True)
        else:
            code = y.to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32)
    elif WIRE == "fp8_e4m3":
        code = _minifloat_code(y, r, 3, 7, 0x7E, 0x80, STOCHASTIC)
    elif WIRE == "fp8_e5m2":
        code = _minifloat_code(y, r, 2, 15, 0x7B, 0x80, STOCHASTIC)
    elif WIRE == "e3m0":
        code = _minifloat_code(y, r, 0, 3, 7, 8, STOCHASTIC)
    elif WIRE == "int8":
        code = _integer_code(y, r, 127, STOCHASTIC) & 0xFF
    else:
        tl.static_assert(WIRE == "int4")
        code = _integer_code(y, r, 7, STOCHASTIC) & 0xF
    return code


@triton.jit
def code_values(code, WIRE: tl.constexpr):
    """The values of codes, uint32, before the scale. Codes may have any of their low bits set."""
    if WIRE == "fp32":
        value = bits_float(code)
    elif WIRE == "bf16":
        value = bits_float(code << 16)
    elif WIRE == "fp16":
        value = code.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    elif WIRE == "fp8_e4m3":
        value = _minifloat_value(code, 3, 7, 0x7F, 0x80)
    elif WIRE == "fp8_e5m2":
        value = _minifloat_value(code, 2, 15, 0x7C, 0x80)
    elif WIRE == "e3m0":
        value = _minifloat_value(code, 0, 3, 8, 8)
    elif WIRE == "int8":
        value = code.to(tl.uint8).to(tl.int8, bitcast=True).to(tl.float32)
    else:
        tl.static_assert(WIRE == "int4")
        value = ((code ^ 8).to(tl.int32) - 8).to(tl.float32)
    return value


@triton.jit
def scale_bits(absmax, QMAX: tl.constexpr):
    """absmax / qmax rounded up to bf16 and at least 2^-126, as fp32 bits."""
    bits = (float_bits(tl.div_rn(absmax, QMAX * 1.0)) + 0xFFFF) & 0xFFFF0000
    return tl.maximum(bits, 0x00800000)
