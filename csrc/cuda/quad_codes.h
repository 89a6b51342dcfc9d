// The codes of a quad (four elements) and their values, in few instructions. The results are bit
// for bit those which wire/codes.h computes one element at a time.
//   - The fp32 number 1.5 * 2^23 + n has the integer n in its low bits, and adding 1.5 * 2^23 to a
//     number rounds it to an integer, half to even. So no conversion between integers and floats is
//     needed: a multiprocessor does fewer conversions per cycle than additions.
//   - A scale and its reciprocal are exactly rounded quotients. A division takes 20 instructions; a
//     rough quotient and two fused multiply-adds give the same bits.
//   - sm_89 and later convert fp8 themselves (fp8_hardware.h).
#pragma once

#include "cuda/quads.h"
#include "wire/scale.h"
#include "wire/stochastic.h"
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
#include "cuda/fp8_hardware.h"
#define DILOCO_HAS_FP8_HARDWARE 1
#else
#define DILOCO_HAS_FP8_HARDWARE 0
#endif

namespace diloco::cuda {

DILOCO_HD constexpr bool is_integer(Format format) {
    return format == Format::kInt8 || format == Format::kInt4;
}
DILOCO_HD constexpr bool is_fp8(Format format) {
    return format == Format::kFp8E4m3 || format == Format::kFp8E5m2;
}

constexpr float kRoundingMagic = 12582912.0f;     // 1.5 * 2^23
constexpr uint32_t kPlainMagicBits = 0x4B000000;  // 2^23, above an integer of up to 23 bits

// A word made of the low bytes of four words.
DILOCO_DEVICE uint32_t low_bytes(const uint32_t (&w)[kQuad]) {
#if defined(__CUDA_ARCH__)
    return __byte_perm(__byte_perm(w[0], w[1], 0x0040), __byte_perm(w[2], w[3], 0x0040), 0x5410);
#else
    return (w[0] & 0xFF) | (w[1] & 0xFF) << 8 | (w[2] & 0xFF) << 16 | w[3] << 24;
#endif
}

// Byte i of a word minus 128, as fp32. The caller has added 128 to the int8 codes.
DILOCO_DEVICE float biased_byte_value(uint32_t w, int i) {
#if defined(__CUDA_ARCH__)
    const uint32_t bits = __byte_perm(w, kPlainMagicBits, 0x7440 | i);
#else
    const uint32_t bits = kPlainMagicBits | (w >> (8 * i) & 0xFF);
#endif
    return wire::sub(wire::bits_float(bits), 8388608.0f + 128.0f);
}

template <Format kFormat>
DILOCO_DEVICE Quad values_of(const CodeQuad<kFormat>& codes) {
    Quad values;
    if constexpr (kFormat == Format::kInt8) {
        const uint32_t w = codes.w[0] ^ 0x80808080u;
        DILOCO_UNROLL
        for (int i = 0; i < kQuad; ++i) values.v[i] = biased_byte_value(w, i);
    } else if constexpr (kFormat == Format::kInt4) {
        const uint32_t w = codes.w[0] ^ 0x8888u;
        DILOCO_UNROLL
        for (int i = 0; i < kQuad; ++i) {
            const uint32_t bits = kPlainMagicBits | (w >> (4 * i) & 0xFu);
            values.v[i] = wire::sub(wire::bits_float(bits), 8388608.0f + 8.0f);
        }
#if DILOCO_HAS_FP8_HARDWARE
    } else if constexpr (is_fp8(kFormat)) {
        fp8_values<kFormat == Format::kFp8E4m3>(codes.w[0], values.v);
#endif
    } else {
        DILOCO_UNROLL
        for (int i = 0; i < kQuad; ++i) values.v[i] = wire::code_value<kFormat>(codes.get(i));
    }
    return values;
}

// The codes of y, four scaled elements of a block without bad elements. In int8 |y| rounds to at
// most 127 and in int4 to at most 7 (wire/scale.h), so no clipping is needed.
template <Format kFormat, bool kStochastic>
DILOCO_DEVICE CodeQuad<kFormat> scaled_codes_of(const Quad& y, uint32_t random) {
    CodeQuad<kFormat> codes{};
#if DILOCO_HAS_FP8_HARDWARE
    if constexpr (is_fp8(kFormat) && !kStochastic) {
        codes.w[0] = fp8_codes<kFormat == Format::kFp8E4m3>(y.v);
    } else
#endif
    {
        uint32_t each[kQuad];
        DILOCO_UNROLL
        for (int i = 0; i < kQuad; ++i) {
            if constexpr (kStochastic) {
                each[i] = wire::encode_stochastic<kFormat>(y.v[i], wire::random16_of(random, i));
            } else if constexpr (is_integer(kFormat)) {
                each[i] = wire::float_bits(wire::add(y.v[i], kRoundingMagic));
            } else {
                each[i] = wire::encode_nearest<kFormat>(y.v[i]);
            }
        }
        if constexpr (CodeQuad<kFormat>::kBits == 8) {
            codes.w[0] = low_bytes(each);
        } else {
            DILOCO_UNROLL
            for (int i = 0; i < kQuad; ++i) codes.put(i, each[i] & 0xFu);
        }
    }
    return codes;
}

// 1 / x of a normal number x, with an error of at most one unit in the last place.
#if defined(__CUDA_ARCH__)
DILOCO_DEVICE float rough_reciprocal(float x) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
#else
// For tests on the host: adds errors of -1, 0 and 1 units, as a device may have them.
inline float rough_reciprocal(float x) {
    return wire::bits_float(wire::float_bits(1.0f / x) + wire::float_bits(x) / 0x10000u % 3 - 1);
}
#endif

// a / qmax, rounded to nearest, for 1 <= a < 2 (tests/ops/test_cuda_whole_tiles.py tries all).
template <Format kFormat>
DILOCO_HD float div_by_qmax(float a) {
    constexpr float kQmax = wire::qmax(kFormat), kReciprocal = 1.0f / kQmax;
    const float guess = wire::mul(a, kReciprocal);
    return wire::fused(wire::fused(-guess, kQmax, a), kReciprocal, guess);
}

// 1 / scale, rounded to nearest, for a bf16 number from 2^-126 to 2^126, made from a rough guess.
DILOCO_HD float refined_reciprocal(float scale, float guess) {
    return wire::fused(wire::fused(-scale, guess, 1.0f), guess, guess);
}
DILOCO_DEVICE float inverse_of(float scale) {
    return refined_reciprocal(scale, rough_reciprocal(scale));
}

// The bf16 bits of a block's scale, from the bits of the block's largest magnitude. A block with a
// bad element gets the smallest scale. Only the mantissa is divided, so that nothing underflows.
template <Format kFormat>
DILOCO_DEVICE uint32_t scale_of_bits(uint32_t magnitude) {
    constexpr uint32_t kOne = 0x3F800000u, kMantissa = 0x007FFFFFu;
    const float mantissa = wire::bits_float((magnitude & kMantissa) | kOne);
    const uint32_t exponent = magnitude & ~kMantissa;
    auto bits = static_cast<int32_t>(wire::float_bits(div_by_qmax<kFormat>(mantissa)) + exponent -
                                     kOne + 0xFFFFu);
    // Below the smallest scale: the magnitude is zero, sub-normal or small.
    bits = bits < static_cast<int32_t>(wire::kSmallestScaleBits) ? wire::kSmallestScaleBits : bits;
    return magnitude > wire::kLargestGoodBits ? wire::kSmallestScale
                                              : static_cast<uint32_t>(bits) >> 16;
}

}  // namespace diloco::cuda
