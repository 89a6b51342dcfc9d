// The rotated formats: a block is multiplied by random signs and by Walsh and Hadamard's matrix, in
// integers that never overflow, and one or two bits of each coefficient travel (int2r, int1r), or
// one bit of the first 1/f of the coefficients (sub_f). docs/developers/wire-formats.md
// has the formulas.
//
//   E     exponent of the block's largest magnitude, at least -100
//   q_i   rint(x_i * 2^(kBits - E))
//   y_i   -q_i where the sign of i is set; sub_f: the sum of those at i, i + K, i + 2K, ...
//   Y_k   sum of (-1)^popcount(k & i) y_i          K of them, |Y| <= 2^26
//   A     sum |Y|   below 2^31      S2 = sum Y^2   at most 2^52
//   code  the bits Y_k < 0; int2r: before them, those of |Y_k| > T = (315 A) >> 16
//   scale of the levels c (int2r: 3 and 10, else 1), times 2^(E - kBits) / K, rounded to bf16:
//         S2 / sum |Y| c         with which the projection of the decoded block on x is x itself
//         sum |Y| c / sum c^2    of the least squares, for error feedback
// A block with a magnitude above 2^116, or whose scale would be zero or sub-normal, is null: scale
// and code are zeros, and it decodes to +0.
//
// The signs of a block, the same for every block of an encoding: bit i of the words of
// Philox4x32_7(counter (j, 0, 1, 0), key), j = 0, 1, ..., little endian.
#pragma once

#include "wire/codes.h"
#include "wire/philox.h"

namespace diloco::wire {

constexpr uint32_t kLargestRotatedBits = 0x79800000u;  // 2^116
constexpr int kMaxSignBytes = kMaxBlockSize / 8;
constexpr int kSmallLevel = 3, kLargeLevel = 10;
constexpr uint64_t kBorder = 315;

template <Format kFormat>
struct Rotation {
    static constexpr int kBlock = own_block(kFormat);
    static constexpr bool kHasLevels = kFormat == Format::kInt2r;
    static constexpr int kKept = kHasLevels ? 256 : 8 * own_bytes(kFormat);
    static constexpr int kLargest = kKept * (kHasLevels ? kLargeLevel : 1);  // of |z|, decoded
    static constexpr int kFolds = kBlock / kKept;                            // f of sub_f
    static constexpr int kBits = kBlock == 256 ? 17 : 15;
    static constexpr int kSignBytes = kBlock / 8;
    static constexpr int kLogKept = __builtin_ctz(static_cast<unsigned>(kKept));
};

// The signs of a block of `count` elements, as count / 8 bytes.
DILOCO_HD void fill_signs(uint64_t key, int count, uint8_t* signs) {
    for (int j = 0; j < count / 128; ++j) {
        const PhiloxBlock block = philox(static_cast<uint64_t>(j), key, 1);
        __builtin_memcpy(signs + 16 * j, block.word, 16);
    }
}

DILOCO_HD bool is_sign_set(const uint8_t* signs, int i) {
    return (signs[i / 8] >> (i % 8) & 1) != 0;
}

// The exponent E of a block with this largest magnitude.
DILOCO_HD int block_exponent(uint32_t largest_bits) {
    const int exponent = static_cast<int>(largest_bits >> 23) - 127;
    return exponent < -100 ? -100 : exponent;
}

DILOCO_HD float power_of_two(int exponent) {
    return bits_float(static_cast<uint32_t>(exponent + 127) << 23);
}

// What the scale is made of.
struct CoefficientSums {
    uint32_t magnitude;        // A
    int64_t square;            // S2
    uint32_t large_magnitude;  // of the coefficients with the large level, int2r alone
    int32_t num_large;
};

DILOCO_HD int32_t level_border(uint32_t magnitude_sum) {
    return static_cast<int32_t>((kBorder * magnitude_sum) >> 16);
}

// The bf16 bits of the scale; 0: the block is null.
template <Format kFormat>
DILOCO_HD uint16_t rotated_scale(const CoefficientSums& sums, int exponent, bool is_least_squares) {
    using R = Rotation<kFormat>;
    if (sums.magnitude == 0) return 0;
    float product = static_cast<float>(sums.magnitude);
    int32_t square = R::kKept;
    if constexpr (R::kHasLevels) {
        product = add(mul(3.0f, product), mul(7.0f, static_cast<float>(sums.large_magnitude)));
        square = 9 * R::kKept + 91 * sums.num_large;
    }
    const float gain = is_least_squares ? div(product, static_cast<float>(square))
                                        : div(static_cast<float>(sums.square), product);
    const float scale = mul(gain, power_of_two(exponent - R::kBits - R::kLogKept));
    const uint16_t bits = bf16_nearest(scale);
    return bits < kSmallestScale ? 0 : bits;
}

// The value of a scale that was received; NaN for one that no encoder makes: negative, sub-normal,
// infinite, NaN, or so large that `largest` times it, an element decoded with it, may exceed 2^126.
DILOCO_HD float received_scale(uint16_t bits, int largest) {
    if (bits == 0) return 0.0f;
    const float value = scale_value(bits);
    const bool is_made = bits >= kSmallestScale && bits < 0x7F80u &&
                         mul(value, static_cast<float>(largest)) <= bits_float(kLargestGoodBits);
    return is_made ? value : bits_float(0x7FC00000u);
}

}  // namespace diloco::wire
