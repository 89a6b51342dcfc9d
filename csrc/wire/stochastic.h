// Stochastic rounding of one element y (codes.h, also for M and B) with 16 random bits r
// (philox.h). The result is one of the two codes around y. The probability of the upper one is the
// distance of y from the lower one, as a share of the distance between the two, with an error of at
// most 2^-17 (int8, int4: 2^-15; fp16: 2^-13).
//   int8, int4:     y is rounded to the nearest multiple of 2^-14, to even, by the fp32 addition of
//                   768, whose last bit that is; the low 14 bits of the sum's significand plus the
//                   upper 14 of r carry into the code above them. |y| is so little above qmax
//                   (scale.h) that it rounds to qmax: no code clips
//   u = (2 r + 1) * 2^-17                       exact in fp32, in (0, 1), symmetric around 1/2
//   minifloats:     s = 23 - M mantissa bits are dropped. |y| below the smallest normal:
//                     s > 16 (fp8, e3m0):  magnitude = floor(|y| * 2^(B - 1 + M) + u)
//                     s <= 16 (fp16):      the same with u = (2 (r >> (16 - s)) + 1) * 2^-(s + 1),
//                     so that the sum is not rounded up to the next code
//                   else random bits are added below the kept mantissa, and cut off with the rest:
//                     s > 16 (fp8, e3m0):  bits + (r << (s - 16)) + (1 << (s - 17))
//                     s <= 16 (fp16):      bits + (r >> (16 - s))
//                   then clamped to the largest finite magnitude (fp16: not clamped, an overflow is
//                   a bad element); the sign of y is kept (e3m0: zero is code 0)
//   bf16:           (bits + r) >> 16
//   fp32:           exact
#pragma once

#include "wire/codes.h"
#include "wire/philox.h"

namespace diloco::wire {

DILOCO_HD float uniform_of(uint32_t r) { return static_cast<float>(2 * r + 1) * 0x1p-17f; }

// In fp32 the sum y + 768 has 14 bits after the binary point; the code is in the bits above them.
constexpr float kIntegerMagic = 768.0f;
constexpr int kIntegerShift = 14;

DILOCO_HD uint32_t integer_stochastic(float y, uint32_t r) {
    return (float_bits(add(y, kIntegerMagic)) + (r >> (16 - kIntegerShift))) >> kIntegerShift;
}

// The uniform number for the sub-normals of a minifloat.
template <int kShift>
DILOCO_HD float grid_uniform_of(uint32_t r) {
    if constexpr (kShift > 16) {
        return uniform_of(r);
    } else {
        return static_cast<float>(2 * (r >> (16 - kShift)) + 1) *
               bits_float(static_cast<uint32_t>(126 - kShift) << 23);
    }
}

// Random bits aligned with the mantissa bits that a minifloat drops.
template <int kShift>
DILOCO_HD uint32_t dropped_bits(uint32_t r) {
    if constexpr (kShift > 16) {
        return (r << (kShift - 16)) + (1u << (kShift - 17));
    } else {
        return r >> (16 - kShift);
    }
}

template <Format kFormat>
DILOCO_HD uint32_t minifloat_stochastic(float y, uint32_t r) {
    using L = MinifloatLayout<kFormat>;
    const uint32_t bits = float_bits(y), magnitude = bits & kMagnitudeMask;
    uint32_t code;
    if (magnitude < L::kSmallestNormalBits) {
        const float grid = mul(bits_float(magnitude), bits_float(L::kSubnormalScaleBits));
        code = static_cast<uint32_t>(__builtin_floorf(add(grid, grid_uniform_of<L::kShift>(r))));
    } else {
        code = ((magnitude + dropped_bits<L::kShift>(r)) >> L::kShift) - L::kRebias;
    }
    return with_sign<kFormat>(smaller(code, L::kLargest), bits);
}

// The code of `y`, in the low code_bits(kFormat) bits. The element must not be bad (scale.h).
template <Format kFormat>
DILOCO_HD uint32_t encode_stochastic(float y, uint32_t r) {
    if constexpr (kFormat == Format::kFp32) {
        return float_bits(y);
    } else if constexpr (kFormat == Format::kBf16) {
        return (float_bits(y) + r) >> 16;
    } else if constexpr (kFormat == Format::kInt8) {
        return integer_stochastic(y, r) & 0xFFu;
    } else if constexpr (kFormat == Format::kInt4) {
        return integer_stochastic(y, r) & 0xFu;
    } else {
        return minifloat_stochastic<kFormat>(y, r);
    }
}

}  // namespace diloco::wire
