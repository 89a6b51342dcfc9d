// The scale of a block is absmax / qmax, rounded up to bf16, and at least 2^-126. absmax is the
// largest magnitude of the block, and qmax the largest that a code has (format.h). x is encoded as
// y = x * (1 / scale), all in IEEE fp32. Because the scale is rounded up, the largest element never
// clips; because it is at least 2^-126, 1 / scale is finite. An element above 2^126 or a NaN is
// "bad": its block is sent as zeros with the smallest scale. In fp32, bf16 and fp16, which have no
// scales, only the bad element becomes zero.
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
