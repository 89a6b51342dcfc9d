// The scale of a block and its reciprocal without a division: bit for bit what wire/scale.h
// computes with two IEEE divisions, which take 20 instructions each.
#pragma once

#include "wire/format.h"
#include "wire/scale.h"

namespace diloco::cuda {

using wire::Format;

// 1 / x of a normal x, at most one unit of the last place wrong.
#if defined(__CUDA_ARCH__)
DILOCO_DEVICE float rough_reciprocal(float x) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}
#else
// As wrong as a device's may be, in every direction.
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

// 1 / scale, rounded to nearest, of a bf16 number from 2^-126 to 2^126 whose reciprocal was
// guessed.
DILOCO_HD float refined_reciprocal(float scale, float guess) {
    return wire::fused(wire::fused(-scale, guess, 1.0f), guess, guess);
}
DILOCO_DEVICE float inverse_of(float scale) {
    return refined_reciprocal(scale, rough_reciprocal(scale));
}

// The bf16 bits of the scale of a block whose largest magnitude has these bits; the smallest one
// for a bad block. The mantissa alone is divided, so that nothing underflows.
template <Format kFormat>
DILOCO_DEVICE uint32_t scale_of_bits(uint32_t magnitude) {
    constexpr uint32_t kOne = 0x3F800000u, kMantissa = 0x007FFFFFu;
    const float mantissa = wire::bits_float((magnitude & kMantissa) | kOne);
    const uint32_t exponent = magnitude & ~kMantissa;
    auto bits = static_cast<int32_t>(wire::float_bits(div_by_qmax<kFormat>(mantissa)) + exponent -
                                     kOne + 0xFFFFu);
    // Zero, subnormal or small.
    bits = bits < static_cast<int32_t>(wire::kSmallestScaleBits) ? wire::kSmallestScaleBits : bits;
    return magnitude > wire::kLargestGoodBits ? wire::kSmallestScale
                                              : static_cast<uint32_t>(bits) >> 16;
}

}  // namespace diloco::cuda
