// The code of one element, rounded to nearest even, and the value of a code. y is the number that
// is encoded: the element times 1 / scale in formats with scales, the element itself in fp32, bf16
// and fp16.
//
// fp16, fp8 and e3m0 are minifloats with M mantissa bits and exponent bias B (e4m3: M 3, B 7; e5m2:
// 2, 15; fp16: 10, 15; e3m0: 0, 3). Code 0 is zero, the codes of rising magnitudes are consecutive
// integers, and sub-normal values are multiples of 2^-(B - 1 + M).
#pragma once

#include "wire/format.h"
#include "wire/scale.h"

namespace diloco::wire {

template <Format kFormat>
struct Minifloat;
template <>
struct Minifloat<Format::kFp8E4m3> {
    static constexpr int kMantissa = 3, kBias = 7;
    static constexpr uint32_t kLargest = 0x7E, kSpecial = 0x7F, kSign = 0x80;
};
template <>
struct Minifloat<Format::kFp8E5m2> {
    static constexpr int kMantissa = 2, kBias = 15;
    static constexpr uint32_t kLargest = 0x7B, kSpecial = 0x7C, kSign = 0x80;
};
template <>
struct Minifloat<Format::kFp16> {
    static constexpr int kMantissa = 10, kBias = 15;
    static constexpr uint32_t kLargest = 0x7C00, kSpecial = 0x7C00, kSign = 0x8000;
};
template <>
struct Minifloat<Format::kE3m0> {
    static constexpr int kMantissa = 0, kBias = 3;
    static constexpr uint32_t kLargest = 7, kSpecial = 8, kSign = 8;
};

constexpr bool is_minifloat(Format format) {
    return format == Format::kFp8E4m3 || format == Format::kFp8E5m2 || format == Format::kFp16 ||
           format == Format::kE3m0;
}

// The constants of the conversions between fp32 bits and a minifloat's code.
template <Format kFormat>
struct MinifloatLayout : Minifloat<kFormat> {
    using Base = Minifloat<kFormat>;
    static constexpr int kShift = 23 - Base::kMantissa;
    static constexpr uint32_t kSmallestNormalBits = static_cast<uint32_t>(128 - Base::kBias) << 23;
    static constexpr uint32_t kRebias = static_cast<uint32_t>(127 - Base::kBias) << Base::kMantissa;
    // 2^(B - 1 + M): times this factor, sub-normal values are integers.
    static constexpr uint32_t kSubnormalScaleBits =
        static_cast<uint32_t>(127 + Base::kBias - 1 + Base::kMantissa) << 23;
    // 2^(127 - B): the float with the bits (code << kShift) times this factor is the code's value,
    // also for sub-normals.
    static constexpr uint32_t kValueScaleBits = static_cast<uint32_t>(254 - Base::kBias) << 23;
};

DILOCO_HD uint32_t smaller(uint32_t a, uint32_t b) { return a < b ? a : b; }

template <Format kFormat>
DILOCO_HD uint32_t with_sign(uint32_t magnitude, uint32_t y_bits) {
    using L = MinifloatLayout<kFormat>;
    if (kFormat == Format::kE3m0 && magnitude == 0) return 0;
    return magnitude | ((y_bits >> 31) != 0 ? L::kSign : 0);
}

template <Format kFormat>
DILOCO_HD uint32_t minifloat_nearest(float y) {
    using L = MinifloatLayout<kFormat>;
    const uint32_t bits = float_bits(y), magnitude = bits & kMagnitudeMask;
    uint32_t code;
    if (magnitude < L::kSmallestNormalBits) {
        code = static_cast<uint32_t>(
            __builtin_rintf(bits_float(magnitude) * bits_float(L::kSubnormalScaleBits)));
    } else {
        const uint32_t half = (1u << (L::kShift - 1)) - 1 + ((magnitude >> L::kShift) & 1u);
        code = ((magnitude + half) >> L::kShift) - L::kRebias;
    }
    return with_sign<kFormat>(smaller(code, L::kLargest), bits);
}

template <Format kFormat>
DILOCO_HD float minifloat_value(uint32_t code) {
    using L = MinifloatLayout<kFormat>;
    const uint32_t magnitude = code & (L::kSign - 1);
    uint32_t bits = magnitude << L::kShift;
    bits = magnitude >= L::kSpecial ? bits | 0x7F800000u
                                    : float_bits(bits_float(bits) * bits_float(L::kValueScaleBits));
    return bits_float(bits | ((code & L::kSign) != 0 ? 0x80000000u : 0));
}

// The bits of the nearest bf16; a NaN becomes the quiet NaN 0x7FC0.
DILOCO_HD uint16_t bf16_nearest(float x) {
    const uint32_t bits = float_bits(x);
    if ((bits & kMagnitudeMask) > 0x7F800000u) return 0x7FC0;
    return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

// The bits of the nearest fp16. As in x86's own conversion, a NaN becomes quiet, and keeps the
// upper bits of its mantissa.
DILOCO_HD uint16_t fp16_nearest(float x) {
    const uint32_t bits = float_bits(x), magnitude = bits & kMagnitudeMask;
    if (magnitude > 0x7F800000u) {
        return static_cast<uint16_t>(((bits >> 16) & 0x8000u) | 0x7E00u |
                                     ((magnitude >> 13) & 0x3FFu));
    }
    return static_cast<uint16_t>(minifloat_nearest<Format::kFp16>(x));
}

// The nearest integer code, half to even, clamped to [-limit, limit], in two's complement.
DILOCO_HD int32_t integer_nearest(float y, int32_t limit) {
    const int32_t code = static_cast<int32_t>(__builtin_rintf(y));
    return code > limit ? limit : code < -limit ? -limit : code;
}

// The code of `y`, in the low code_bits(kFormat) bits.
template <Format kFormat>
DILOCO_HD uint32_t encode_nearest(float y) {
    if constexpr (kFormat == Format::kFp32) {
        return float_bits(y);
    } else if constexpr (kFormat == Format::kBf16) {
        return bf16_nearest(y);
    } else if constexpr (kFormat == Format::kInt8) {
        return static_cast<uint32_t>(integer_nearest(y, 127)) & 0xFFu;
    } else if constexpr (kFormat == Format::kInt4) {
        return static_cast<uint32_t>(integer_nearest(y, 7)) & 0xFu;
    } else {
        return minifloat_nearest<kFormat>(y);
    }
}

// The value of a code before the scale. Codes that no encoder makes (int8 -128, int4 -8, e3m0 8,
// fp8 NaN and Inf) decode to what their bits say.
template <Format kFormat>
DILOCO_HD float code_value(uint32_t code) {
    if constexpr (kFormat == Format::kFp32) {
        return bits_float(code);
    } else if constexpr (kFormat == Format::kBf16) {
        return bits_float(code << 16);
    } else if constexpr (kFormat == Format::kInt8) {
        return static_cast<float>(static_cast<int8_t>(code));
    } else if constexpr (kFormat == Format::kInt4) {
        return static_cast<float>(static_cast<int32_t>(code << 28) >> 28);
    } else {
        return minifloat_value<kFormat>(code);
    }
}

// Whether a code is infinite or NaN. Among elements that are not bad (scale.h), only those in fp16
// can get such a code.
template <Format kFormat>
DILOCO_HD bool is_code_bad(uint32_t code) {
    return kFormat == Format::kFp16 && (code & 0x7FFFu) >= 0x7C00u;
}

}  // namespace diloco::wire
