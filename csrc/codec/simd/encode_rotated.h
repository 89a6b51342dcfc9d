// Encoding of the rotated formats over a Vec (vec_avx2.h or vec_avx512.h, included before), block
// by block. While a block is folded, the next one is read into the first-level cache, and its
// largest magnitude is found: the reads are then on their way while the block is transformed.
#pragma once

#include "codec/simd/encode.h"

namespace diloco::codec {
namespace {

// The signs as the upper bits of floats, made once for all blocks of an encoding.
template <Format kFormat>
struct SignBits {
    alignas(64) uint32_t bit[wire::Rotation<kFormat>::kBlock];
    explicit SignBits(const uint8_t* signs) {
        const Vec::I sign = Vec::set(static_cast<int32_t>(0x80000000u));
        for (int j = 0; j < wire::Rotation<kFormat>::kBlock; j += Vec::kWidth) {
            const Vec::I value = Vec::add_where(Vec::load_mask(signs + j / 8), Vec::set(0), sign);
            __builtin_memcpy(bit + j, &value, sizeof(value));
        }
    }
};

// A transform of more vectors than are held in registers is done in parts. Stages across parts come
// first, while the vectors are loaded.
template <Format kFormat>
constexpr int kPartVectors =
    kKeptVectors<kFormat> < kHeldVectors ? kKeptVectors<kFormat> : kHeldVectors;

// What is transformed: x as integers with their signs, folded, with the stages across parts. Calls
// load_next(j) for each vector of the block, j being its first element.
template <Format kFormat, class LoadNext>
DILOCO_INLINE void load_folded(const float* x, const SignBits<kFormat>& signs, int exponent,
                               Vec::I* y, LoadNext&& load_next) {
    using R = wire::Rotation<kFormat>;
    constexpr int kVectors = kPartVectors<kFormat>, kParts = kKeptVectors<kFormat> / kVectors;
    const Vec::F unit = Vec::set(wire::power_of_two(R::kBits - exponent));
    int next = 0;
    const auto load_one = [&](int j) __attribute__((always_inline)) {
        Vec::I bits;
        __builtin_memcpy(&bits, signs.bit + j, sizeof(bits));
        // Rounding to even is the same on both sides of zero.
        const Vec::F v = Vec::as_float(Vec::xor_(Vec::as_int(Vec::load(x + j)), bits));
        const Vec::I q = Vec::round_even(Vec::mul(v, unit));
        // After the load: it stores to an address with the same 12 low bits (see Scratch).
        load_next(next);
        next += Vec::kWidth;
        return q;
    };
    const auto load_across = [&](int k) __attribute__((always_inline)) {
        Vec::I part[kParts];
#pragma GCC unroll 8
        for (int p = 0; p < kParts; ++p) {
            const int j = (p * kVectors + k) * Vec::kWidth;
            part[p] = load_one(j);
            for (int begin = R::kKept; begin < R::kBlock; begin += R::kKept) {
                part[p] = Vec::add(part[p], load_one(begin + j));
            }
        }
        if constexpr (kParts > 1) transform_across<WideLanes, 1>(part);
#pragma GCC unroll 8
        for (int p = 0; p < kParts; ++p) y[p * kVectors + k] = part[p];
    };
    if constexpr (kParts == 1 && R::kFolds == 1) {
        // Unrolled, so that y stays in registers.
#pragma GCC unroll 16
        for (int k = 0; k < kVectors; ++k) load_across(k);
    } else {
        for (int k = 0; k < kVectors; ++k) load_across(k);
    }
}

// A block whose signs are written. The rest of its code waits for sums over all coefficients, so it
// is made after the next block was loaded.
template <Format kFormat>
struct Coefficients {
    // Of each coefficient, where these have levels.
    Vec::I magnitude[wire::Rotation<kFormat>::kHasLevels ? kKeptVectors<kFormat> : 1];
    Vec::I magnitudes, squares;  // sums, lane by lane
    int64_t block;
    int exponent;
};

// Transforms y part by part, and writes the signs.
template <Format kFormat>
DILOCO_INLINE void write_signs(const Vec::I* y, uint8_t* code, Coefficients<kFormat>& out) {
    using R = wire::Rotation<kFormat>;
    constexpr int kVectors = kPartVectors<kFormat>, kStep = Vec::kMaskVectors;
    uint8_t* negative = R::kHasLevels ? code + R::kKept / 8 : code;
    Vec::I magnitudes = Vec::set(0), squares = Vec::set(0);
    for (int begin = 0; begin < kKeptVectors<kFormat>; begin += kVectors) {
        Vec::I v[kVectors];
#pragma GCC unroll 16
        for (int k = 0; k < kVectors; ++k) v[k] = y[begin + k];
        if constexpr (kVectors > 1) transform_across<WideLanes, 1>(v);
        transform_inside<WideLanes, 1>(v);
#pragma GCC unroll 16
        for (int k = 0; k < kVectors; k += kStep) {
            Vec::store_signs(negative + (begin + k) * Vec::kWidth / 8, v + k);
        }
#pragma GCC unroll 16
        for (int k = 0; k < kVectors; ++k) {
            const Vec::I magnitude = Vec::abs(v[k]);
            magnitudes = Vec::add(magnitudes, magnitude);
            squares = Vec::add_squares(squares, magnitude);
            if constexpr (R::kHasLevels) out.magnitude[begin + k] = magnitude;
        }
    }
    out.magnitudes = magnitudes;
    out.squares = squares;
}

// Writes the levels, and returns what the scale is made of.
template <Format kFormat>
DILOCO_INLINE wire::CoefficientSums write_levels(const Coefficients<kFormat>& in, uint8_t* code) {
    using R = wire::Rotation<kFormat>;
    constexpr int kStep = Vec::kMaskVectors;
    wire::CoefficientSums sums{Vec::sum(in.magnitudes),
                               static_cast<int64_t>(Vec::sum64(in.squares)), 0, 0};
    if constexpr (R::kHasLevels) {
        const Vec::I border = Vec::set(wire::level_border(sums.magnitude));
        Vec::I large = Vec::set(0);
#pragma GCC unroll 4
        for (int k = 0; k < kKeptVectors<kFormat>; k += kStep) {
            Vec::M is_large[kStep];
#pragma GCC unroll 4
            for (int n = 0; n < kStep; ++n) {
                const Vec::I magnitude = in.magnitude[k + n];
                is_large[n] = Vec::less(border, magnitude);
                large = Vec::add_where(is_large[n], large, magnitude);
            }
            Vec::store_masks(code + k * Vec::kWidth / 8, is_large);
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

template <Format kFormat>
DILOCO_INLINE uint8_t* code_of(const EncodeSpan& span, int64_t block) {
    return span.codes + block * wire::own_bytes(kFormat);
}

// Writes the levels and the scale of a block. The sums of a bad block are zeros: it becomes null.
template <Format kFormat, bool kHasNewResidual>
DILOCO_INLINE void finish_block(const EncodeSpan& span, const Coefficients<kFormat>& in) {
    uint8_t* code = code_of<kFormat>(span, in.block);
    const wire::CoefficientSums sums = write_levels<kFormat>(in, code);
    const uint16_t scale = wire::rotated_scale<kFormat>(sums, in.exponent, kHasNewResidual);
    if (scale == 0) __builtin_memset(code, 0, wire::own_bytes(kFormat));
    __builtin_memcpy(span.scales + 2 * in.block, &scale, sizeof(scale));
}

// Begins with x, block number `block`, and loads the next; returns the number of bad elements.
// `before` is called once the block is loaded.
template <Format kFormat, class LoadNext, class Before>
DILOCO_INLINE int64_t begin_block(const EncodeSpan& span, const SignBits<kFormat>& signs,
                                  int64_t block, const float* x, uint32_t largest,
                                  Coefficients<kFormat>& out, LoadNext&& load_next,
                                  Before&& before) {
    using R = wire::Rotation<kFormat>;
    out.block = block;
    if (largest <= wire::kLargestRotatedBits) {
        alignas(64) Vec::I y[kKeptVectors<kFormat>];
        out.exponent = wire::block_exponent(largest);
        load_folded<kFormat>(x, signs, out.exponent, y, load_next);
        before();
        write_signs<kFormat>(y, code_of<kFormat>(span, block), out);
        return 0;
    }
    for (int j = 0; j < R::kBlock; j += Vec::kWidth) load_next(j);
    before();
    __builtin_memset(&out, 0, sizeof(out));
    out.block = block;
    return count_bad(x, R::kBlock);
}

template <Format kFormat>
void store_rotated_rest(const EncodeSpan& span, int64_t block, const float* x) {
    uint16_t bits;
    __builtin_memcpy(&bits, span.scales + 2 * block, sizeof(bits));
    const float scale = wire::scale_value(bits);
    for_each_decoded<kFormat>(code_of<kFormat>(span, block), span.signs, scale,
                              [&](int j, Vec::F decoded) {
                                  store_residual(span, block * wire::Rotation<kFormat>::kBlock + j,
                                                 Vec::sub(Vec::load(x + j), decoded));
                              });
}

// The sum of any number of payloads, block after block.
template <Format kFormat, bool kHasNewResidual>
int64_t encode_rotated_sum(const EncodeSpan& span) {
    alignas(64) float x[wire::Rotation<kFormat>::kBlock];
    const SignBits<kFormat> signs(span.signs);
    Coefficients<kFormat> coefficients;
    int64_t num_bad = 0;
    for (int64_t block = 0; block < span.num_blocks; ++block) {
        const uint32_t largest = load_sum<kFormat>(span, block, x);
        num_bad +=
            begin_block<kFormat>(span, signs, block, x, largest, coefficients, [](int) {}, [] {});
        finish_block<kFormat, kHasNewResidual>(span, coefficients);
        if constexpr (kHasNewResidual) store_rotated_rest<kFormat>(span, block, x);
    }
    return num_bad;
}

template <Format kFormat, bool kHasNewResidual, class Input>
int64_t encode_rotated_input(const EncodeSpan& argument) {
    const EncodeSpan span = argument;
    Scratch scratch(span);
    const SignBits<kFormat> signs(span.signs);
    Coefficients<kFormat> coefficients[2];
    int64_t num_bad = 0;
    uint32_t largest = load_block<Input>(argument, 0, scratch.x(0));
    for (int64_t block = 0; block < span.num_blocks; ++block) {
        // After the last block this load is in vain.
        const Input next(span, block + 1 < span.num_blocks ? block + 1 : block);
        const float* current = scratch.x(block);
        float* following = scratch.x(block + 1);
        Vec::I maxima = Vec::set(0);
        const auto load_next = [&](int j) __attribute__((always_inline)) {
            const Vec::F v = next.load(j);
            maxima = Vec::max(maxima, magnitude_of(v));
            Vec::store(following + j, v);
        };
        // The rest of a block is stored from x, whose place the block after the next one takes.
        const auto before = [&]() __attribute__((always_inline)) {
            if (kHasNewResidual || block == 0) return;
            finish_block<kFormat, kHasNewResidual>(span, coefficients[(block - 1) & 1]);
        };
        num_bad += begin_block<kFormat>(span, signs, block, current, largest,
                                        coefficients[block & 1], load_next, before);
        if constexpr (kHasNewResidual) {
            finish_block<kFormat, kHasNewResidual>(span, coefficients[block & 1]);
            store_rotated_rest<kFormat>(span, block, current);
        }
        largest = Vec::largest(maxima);
    }
    if (!kHasNewResidual && span.num_blocks > 0) {
        finish_block<kFormat, kHasNewResidual>(span, coefficients[(span.num_blocks - 1) & 1]);
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
