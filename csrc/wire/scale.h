// The scale of a block: scale = max(bf16 rounded up of absmax / qmax, 2^-126), inv = 1 / scale, y =
// x * inv. IEEE fp32 division, no contraction. The scale is rounded up, so the largest element of a
// block never clips, and its floor keeps 1 / scale finite. absmax is at most 2^126 here: a block
// with a larger element or a NaN is "bad" and is sent as zeros with the smallest scale.
#pragma once

#include "wire/exact.h"

namespace diloco::wire {

constexpr uint32_t kMagnitudeMask = 0x7FFFFFFFu;
constexpr uint32_t kLargestGoodBits = 0x7E800000u;    // 2^126; anything above, Inf and NaN are bad
constexpr uint32_t kSmallestScaleBits = 0x00800000u;  // 2^-126
constexpr uint16_t kSmallestScale = 0x0080;           // the same as bf16

DILOCO_HD bool is_bad(float x) { return (float_bits(x) & kMagnitudeMask) > kLargestGoodBits; }

// The bf16 bits of the scale of a block whose largest magnitude is `absmax` (finite, not negative).
DILOCO_HD uint16_t scale_of(float absmax, float qmax) {
    uint32_t bits = (float_bits(div(absmax, qmax)) + 0xFFFFu) & 0xFFFF0000u;
    bits = bits < kSmallestScaleBits ? kSmallestScaleBits : bits;
    return static_cast<uint16_t>(bits >> 16);
}

DILOCO_HD float scale_value(uint16_t scale) {
    return bits_float(static_cast<uint32_t>(scale) << 16);
}

}  // namespace diloco::wire
