// The scalar definition of the rotated formats (wire/rotation.h), for kernels.cpp alone.
#pragma once

#include <utility>

#include "codec/kernels.h"
#include "wire/rotation.h"

namespace diloco::codec {
namespace {

// The Hadamard transform in place: value k becomes the sum over i of (-1)^popcount(k & i) value_i.
template <int kSize>
void hadamard(int32_t* values) {
    for (int half = 1; half < kSize; half *= 2) {
        for (int begin = 0; begin < kSize; begin += 2 * half) {
            for (int i = begin; i < begin + half; ++i) {
                const int32_t low = values[i], high = values[i + half];
                values[i] = low + high;
                values[i + half] = low - high;
            }
        }
    }
}

inline int32_t flipped(int32_t value, const uint8_t* signs, int i) {
    return wire::is_sign_set(signs, i) ? -value : value;
}

inline void set_bit(uint8_t* bits, int i, bool value) {
    bits[i / 8] = static_cast<uint8_t>(bits[i / 8] | (value ? 1 << (i % 8) : 0));
}

// Decodes block number `block` of a term.
template <wire::Format kFormat>
void decode_rotated(const uint8_t* scales, const uint8_t* codes, const uint8_t* signs,
                    int64_t block, float* out) {
    using R = wire::Rotation<kFormat>;
    uint16_t bits;
    __builtin_memcpy(&bits, scales + 2 * block, sizeof(bits));
    const float scale = wire::received_scale(bits, R::kLargest);
    const uint8_t* large = codes + block * wire::own_bytes(kFormat);
    const uint8_t* negative = R::kHasLevels ? large + R::kKept / 8 : large;
    int32_t z[R::kKept];
    for (int k = 0; k < R::kKept; ++k) {
        int32_t level = 1;
        if (R::kHasLevels) {
            level = wire::is_sign_set(large, k) ? wire::kLargeLevel : wire::kSmallLevel;
        }
        z[k] = wire::is_sign_set(negative, k) ? -level : level;
    }
    hadamard<R::kKept>(z);
    for (int i = 0; i < R::kBlock; ++i) {
        out[i] =
            scale == 0.0f ? 0.0f : static_cast<float>(flipped(z[i % R::kKept], signs, i)) * scale;
    }
}

// Encodes the block x to its scale and code; returns the number of bad elements.
template <wire::Format kFormat>
int64_t encode_rotated(const float* x, const uint8_t* signs, bool is_least_squares, uint16_t& scale,
                       uint8_t* code) {
    using R = wire::Rotation<kFormat>;
    __builtin_memset(code, 0, wire::own_bytes(kFormat));
    scale = 0;
    uint32_t largest = 0;
    int64_t num_bad = 0;
    for (int i = 0; i < R::kBlock; ++i) {
        const uint32_t magnitude = wire::float_bits(x[i]) & wire::kMagnitudeMask;
        largest = magnitude > largest ? magnitude : largest;
        num_bad += magnitude > wire::kLargestRotatedBits;
    }
    if (num_bad > 0) return num_bad;
    const int exponent = wire::block_exponent(largest);
    const float unit = wire::power_of_two(R::kBits - exponent);
    int32_t y[R::kKept] = {};
    for (int i = 0; i < R::kBlock; ++i) {
        const auto q = static_cast<int32_t>(__builtin_rintf(x[i] * unit));
        y[i % R::kKept] += flipped(q, signs, i);
    }
    hadamard<R::kKept>(y);
    wire::CoefficientSums sums{};
    for (const int32_t value : y) {
        sums.magnitude += static_cast<uint32_t>(value < 0 ? -value : value);
        sums.square += static_cast<int64_t>(value) * value;
    }
    const int32_t border = wire::level_border(sums.magnitude);
    for (int k = 0; k < R::kKept; ++k) {
        const int32_t magnitude = y[k] < 0 ? -y[k] : y[k];
        if (!R::kHasLevels || magnitude <= border) continue;
        sums.large_magnitude += static_cast<uint32_t>(magnitude);
        ++sums.num_large;
    }
    scale = wire::rotated_scale<kFormat>(sums, exponent, is_least_squares);
    if (scale == 0) return 0;
    for (int k = 0; k < R::kKept; ++k) {
        const int32_t magnitude = y[k] < 0 ? -y[k] : y[k];
        if (R::kHasLevels) set_bit(code, k, magnitude > border);
        set_bit(code + (R::kHasLevels ? R::kKept / 8 : 0), k, y[k] < 0);
    }
    return 0;
}

}  // namespace
}  // namespace diloco::codec
