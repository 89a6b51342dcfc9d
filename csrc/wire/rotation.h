// The rotated formats: a block is multiplied by random signs and by Walsh and Hadamard's matrix, in
// integers that never overflow, and one or two bits of each coefficient travel (int2r, int1r), or
// one bit of the first 1/f of the coefficients (sub_f). docs/developers/wire-formats.md
// has the formulas.
//
//   E     exponent of the block's largest magnitude, at least -100
//   q_i   rint(x_i * 2^(kBits - E))
//   y_i   q_i, or -q_i if the sign bit i is set; in sub_f the sum of these numbers at i, i + K,
//         i + 2K, ..., where K is the block size / f; in the other formats K is the block size
//   Y_k   the coefficients, sum over i of (-1)^popcount(k & i) y_i for k < K; |Y_k| <= 2^26
//   A     sum |Y_k|   below 2^31      S2 = sum Y_k^2   at most 2^52
//   c_k   the magnitude that a decoder takes for coefficient k before the scale: in int2r 10 if
//         |Y_k| > T = (315 A) >> 16 and 3 if not, in the other formats 1
//   code  the bits Y_k < 0; in int2r, before them, the bits |Y_k| > T
//   scale one of these two, times 2^(E - kBits) / K, rounded to bf16:
//         S2 / sum |Y_k| c_k             the projection of the decoded block on x is x itself
//         sum |Y_k| c_k / sum c_k^2      least squares, used with error feedback
// A block with a magnitude above 2^116, or whose scale would be zero or sub-normal, is null: scale
// and code are zeros, and it decodes to +0.
//
// The sign bits are the same for every block of an encoding. Bit i is bit i of the words of
// Philox4x32_7(counter (j, 0, 1, 0), key) for j = 0, 1, ..., one after the other, little endian.
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
    // The largest magnitude of a decoded element before the scale.
    static constexpr int kLargest = kKept * (kHasLevels ? kLargeLevel : 1);
    static constexpr int kFolds = kBlock / kKept;  // f of sub_f, else 1
    static constexpr int kBits = kBlock == 256 ? 17 : 15;
    static constexpr int kSignBytes = kBlock / 8;
    static constexpr int kLogKept = __builtin_ctz(static_cast<unsigned>(kKept));
};

// Writes the sign bits of a block of `count` elements, as count / 8 bytes.
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

// The sums over a block's coefficients from which its scale is made. The last two are for int2r
// only: the sum of |Y_k| over coefficients above T, and their number.
struct CoefficientSums {
    uint32_t magnitude;  // A
    int64_t square;      // S2
    uint32_t large_magnitude;
    int32_t num_large;
};

DILOCO_HD int32_t level_border(uint32_t magnitude_sum) {
    return static_cast<int32_t>((kBorder * magnitude_sum) >> 16);
}

// The bf16 bits of a block's scale; 0 if the block is null.
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

// The value of a received scale. It is NaN for bits that no encoder writes: negative, sub-normal,
// infinite or NaN, or so large that a decoded element, at most `largest` times the scale, may
// exceed 2^126.
DILOCO_HD float received_scale(uint16_t bits, int largest) {
    if (bits == 0) return 0.0f;
    const float value = scale_value(bits);
    const bool is_made = bits >= kSmallestScale && bits < 0x7F80u &&
                         mul(value, static_cast<float>(largest)) <= bits_float(kLargestGoodBits);
    return is_made ? value : bits_float(0x7FC00000u);
}

}  // namespace diloco::wire
