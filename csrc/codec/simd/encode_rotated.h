// Encoding of the rotated formats over a Vec (vec_avx2.h or vec_avx512.h, included before), block
// by block. While a block is folded, the next one is read into the first-level cache, and its
// largest magnitude is found: the reads are then on their way while the block is transformed.
#pragma once

#include "codec/simd/encode.h"

namespace diloco::codec {
namespace {

// What is transformed: x as integers with their signs, folded. Calls load_next(j) for each vector
// of the block, j being its first element.
template <Format kFormat, class LoadNext>
DILOCO_INLINE void load_folded(const float* x, const uint8_t* signs, int exponent, Vec::I* y,
                               LoadNext&& load_next) {
    using R = wire::Rotation<kFormat>;
    const Vec::F unit = Vec::set(wire::power_of_two(R::kBits - exponent));
    for (int begin = 0; begin < R::kBlock; begin += R::kKept) {
        for (int k = 0; k < kKeptVectors<kFormat>; ++k) {
            const int j = begin + k * Vec::kWidth;
            Vec::I q = Vec::round_even(Vec::mul(Vec::load(x + j), unit));
            // After the load: it stores to an address with the same 12 low bits (see Scratch).
            load_next(j);
            q = Vec::negate_where(Vec::load_mask(signs + j / 8), q);
            y[k] = begin == 0 ? q : Vec::add(y[k], q);
        }
    }
}

// Writes the code of the coefficients y, and returns what their scale is made of.
template <Format kFormat>
DILOCO_INLINE wire::CoefficientSums write_code(const Vec::I* y, uint8_t* code) {
    using R = wire::Rotation<kFormat>;
    uint8_t* negative = R::kHasLevels ? code + R::kKept / 8 : code;
    Vec::I magnitudes = Vec::set(0), squares = Vec::set(0);
    for (int k = 0; k < kKeptVectors<kFormat>; ++k) {
        magnitudes = Vec::add(magnitudes, Vec::abs(y[k]));
        squares = Vec::add_squares(squares, y[k]);
        Vec::store_mask(negative + k * Vec::kWidth / 8, Vec::is_negative(y[k]));
    }
    wire::CoefficientSums sums{Vec::sum(magnitudes), static_cast<int64_t>(Vec::sum64(squares)), 0,
                               0};
    if constexpr (R::kHasLevels) {
        const Vec::I border = Vec::set(wire::level_border(sums.magnitude));
        Vec::I large = Vec::set(0);
        for (int k = 0; k < kKeptVectors<kFormat>; ++k) {
            const Vec::I magnitude = Vec::abs(y[k]);
            const Vec::M is_large = Vec::less(border, magnitude);
            Vec::store_mask(code + k * Vec::kWidth / 8, is_large);
            large = Vec::add_where(is_large, large, magnitude);
        }
        for (int byte = 0; byte < R::kKept / 8; byte += 8) {
            uint64_t word;
            __builtin_memcpy(&word, code + byte, sizeof(word));
            sums.num_large += __builtin_popcountll(word);
        }
        sums.large_magnitude = Vec::sum(large);
    }
    return sums;
}

inline int64_t count_bad(const float* x, int size) {
    int64_t num_bad = 0;
    for (int j = 0; j < size; ++j) {
        num_bad += (wire::float_bits(x[j]) & wire::kMagnitudeMask) > wire::kLargestRotatedBits;
    }
    return num_bad;
}

// Encodes x, block number `block`, and loads the next; returns the number of bad elements.
template <Format kFormat, bool kHasNewResidual, class LoadNext>
DILOCO_INLINE int64_t encode_rotated_block(const EncodeSpan& span, int64_t block, const float* x,
                                           uint32_t largest, LoadNext&& load_next) {
    using R = wire::Rotation<kFormat>;
    uint8_t* code = span.codes + block * wire::own_bytes(kFormat);
    const bool is_good = largest <= wire::kLargestRotatedBits;
    uint16_t scale = 0;
    if (is_good) {
        alignas(64) Vec::I y[kKeptVectors<kFormat>];
        const int exponent = wire::block_exponent(largest);
        load_folded<kFormat>(x, span.signs, exponent, y, load_next);
        hadamard<WideLanes, kKeptVectors<kFormat>>(y);
        const wire::CoefficientSums sums = write_code<kFormat>(y, code);
        scale = wire::rotated_scale<kFormat>(sums, exponent, kHasNewResidual);
    } else {
        for (int j = 0; j < R::kBlock; j += Vec::kWidth) load_next(j);
    }
    if (scale == 0) __builtin_memset(code, 0, wire::own_bytes(kFormat));
    __builtin_memcpy(span.scales + 2 * block, &scale, sizeof(scale));
    if constexpr (kHasNewResidual) {
        const float value = wire::scale_value(scale);
        for_each_decoded<kFormat>(code, span.signs, value, [&](int j, Vec::F decoded) {
            store_residual(span, block * R::kBlock + j, Vec::sub(Vec::load(x + j), decoded));
        });
    }
    return is_good ? 0 : count_bad(x, R::kBlock);
}

// The sum of any number of payloads, block after block.
template <Format kFormat, bool kHasNewResidual>
int64_t encode_rotated_sum(const EncodeSpan& span) {
    alignas(64) float x[wire::Rotation<kFormat>::kBlock];
    int64_t num_bad = 0;
    for (int64_t block = 0; block < span.num_blocks; ++block) {
        const uint32_t largest = load_sum<kFormat>(span, block, x);
        num_bad +=
            encode_rotated_block<kFormat, kHasNewResidual>(span, block, x, largest, [](int) {});
    }
    return num_bad;
}

template <Format kFormat, bool kHasNewResidual, class Input>
int64_t encode_rotated_input(const EncodeSpan& argument) {
    const EncodeSpan span = argument;
    Scratch scratch(span);
    int64_t num_bad = 0;
    uint32_t largest = load_block<Input>(argument, 0, scratch.x(0));
    for (int64_t block = 0; block < span.num_blocks; ++block) {
        // After the last block this load is in vain.
        const Input next(span, block + 1 < span.num_blocks ? block + 1 : block);
        float* following = scratch.x(block + 1);
        Vec::I maxima = Vec::set(0);
        num_bad += encode_rotated_block<kFormat, kHasNewResidual>(
            span, block, scratch.x(block), largest, [&](int j) {
                const Vec::F v = next.load(j);
                maxima = Vec::max(maxima, magnitude_of(v));
                Vec::store(following + j, v);
            });
        largest = Vec::largest(maxima);
    }
    return num_bad;
}

template <Format kFormat, bool kHasNewResidual>
int64_t encode_rotated_with(const EncodeSpan& span) {
    if (span.num_terms > 0) {
        return encode_rotated_sum<kFormat, kHasNewResidual>(span);
    }
    const bool is_fp32 = span.param_dtype == DType::kFp32;
    if (span.outer != nullptr && is_fp32 && span.residual == nullptr) {
        return encode_rotated_input<kFormat, kHasNewResidual, DifferenceInput<DType::kFp32, false>>(
            span);
    }
    if (span.outer != nullptr && is_fp32 && span.residual_dtype == DType::kFp32) {
        return encode_rotated_input<kFormat, kHasNewResidual, DifferenceInput<DType::kFp32, true>>(
            span);
    }
    if (span.outer == nullptr && is_fp32 && span.residual == nullptr) {
        return encode_rotated_input<kFormat, kHasNewResidual, TensorInput>(span);
    }
    return encode_rotated_input<kFormat, kHasNewResidual, AnyInput>(span);
}

template <Format kFormat>
int64_t encode_rotated(const EncodeSpan& span) {
    return span.new_residual != nullptr ? encode_rotated_with<kFormat, true>(span)
                                        : encode_rotated_with<kFormat, false>(span);
}

}  // namespace
}  // namespace diloco::codec
