// The fp8 conversion instructions of sm_89 and later, on four elements. By their definition in the
// PTX ISA they give the same codes as wire/codes.h for every number that is not NaN:
//   - cvt.rn.satfinite rounds half to even, also to sub-normal results, keeps the sign of a number
//     that becomes zero, and turns too large numbers into the largest one. minifloat_nearest() does
//     the same.
//   - The code of a NaN is not used: the codes of a block with a bad element are zero.
//   - Decoding is exact: all fp8 numbers are fp16 numbers, and these are fp32 numbers.
// A code for an fp8 NaN, which no encoder makes, may give a NaN with other bits than wire/codes.h.
#pragma once

#include "wire/config.h"

namespace diloco::cuda {

template <bool kIsE4m3>
DILOCO_DEVICE uint32_t fp8_codes(const float (&y)[4]) {
    uint16_t low, high;
    if constexpr (kIsE4m3) {
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(y[1]), "f"(y[0]));
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(y[3]), "f"(y[2]));
    } else {
        asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(low) : "f"(y[1]), "f"(y[0]));
        asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(high) : "f"(y[3]), "f"(y[2]));
    }
    return low | static_cast<uint32_t>(high) << 16;
}

DILOCO_DEVICE float half_to_float(uint32_t bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<uint16_t>(bits)));
    return value;
}

template <bool kIsE4m3>
DILOCO_DEVICE void fp8_values(uint32_t codes, float (&values)[4]) {
    DILOCO_UNROLL
    for (int i = 0; i < 4; i += 2) {
        const auto pair = static_cast<uint16_t>(codes >> (8 * i));
        uint32_t halves;
        if constexpr (kIsE4m3) {
            asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(pair));
        } else {
            asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(halves) : "h"(pair));
        }
        values[i] = half_to_float(halves & 0xFFFFu);
        values[i + 1] = half_to_float(halves >> 16);
    }
}

}  // namespace diloco::cuda
