// Encoding of the rotated formats (wire/rotation.h, which defines E, q, Y, K and the levels) over
// the class Vec of vec_avx2.h or vec_avx512.h, whichever is included before. While a block is
// rounded to integers, the next block is read into the first-level cache, and its largest magnitude
// is found: so the memory works while the block is transformed.
#pragma once

#include <cstdlib>

#include "codec/simd/encode.h"

namespace diloco::codec {
namespace {

// The sign bits of all elements of a block as the upper bits of floats, made once for all blocks.
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

// The number of vectors of one part of a transform. If a block's coefficients need more vectors
// than fit into registers, the stages that combine vectors of different parts are computed first,
// while the vectors are loaded, and then each part is transformed by itself.
template <Format kFormat>
constexpr int kPartVectors =
    kKeptVectors<kFormat> < kHeldVectors ? kKeptVectors<kFormat> : kHeldVectors;

// If |E| is at most this, the sum of the squares of a block's elements neither overflows nor
// underflows.
constexpr int kLargestPlainExponent = 55;

// The sums over a block's coefficients from which its scale is made, one for each lane.
struct BlockSums {
    Vec::I magnitudes;       // sum |Y_k|
    Vec::I larger;           // the sum made by store_larger()
    Vec::I squares;          // in sub_f: sum Y_k^2, 64 bits
    Vec::F element_squares;  // in the other formats: sum x_i^2
    int32_t border;          // T, above which a coefficient has the large level
    int exponent;            // E
};

// The magnitudes |Y_k| of a block, if the format has levels.
template <Format kFormat>
struct Magnitudes {
    Vec::I of[wire::Rotation<kFormat>::kHasLevels ? kKeptVectors<kFormat> : 1];
};

// The number 1.5 * 2^23 * 2^(E - bits). Added to x in fp32, it rounds x to a multiple of
// 2^(E - bits), and the bits of the sum, as an integer, are the bits of this number plus q. After
// the transform these biases of all elements are in coefficient 0, from which they are subtracted.
DILOCO_INLINE float rounding_summand(int bits, int exponent) {
    return wire::bits_float((static_cast<uint32_t>(23 + exponent - bits + 127) << 23) | 0x400000u);
}

// Prepares the transform of block x: rounds it to biased integers with the random signs, adds up
// the elements that sub_f folds onto each other, and computes the stages across parts. Calls
// load_next(j) for each vector of the next block, whose first element is j.
template <Format kFormat, bool kHasSquares, class LoadNext>
DILOCO_INLINE void load_folded(const float* x, const SignBits<kFormat>& signs, Vec::I* y,
                               BlockSums& out, LoadNext&& load_next) {
    using R = wire::Rotation<kFormat>;
    constexpr int kVectors = kPartVectors<kFormat>, kParts = kKeptVectors<kFormat> / kVectors;
    const Vec::F summand = Vec::set(rounding_summand(R::kBits, out.exponent));
    // The squares are added in groups, because each addition must wait for the one before it.
    Vec::F squares = Vec::zero(), group = Vec::zero();
    int64_t next = 0;
    const auto load_one = [&](int j) __attribute__((always_inline)) {
        Vec::I bits;
        __builtin_memcpy(&bits, signs.bit + j, sizeof(bits));
        // The sign may be changed before rounding: rounding to even is symmetric.
        const Vec::F v = Vec::as_float(Vec::xor_(Vec::as_int(Vec::load(x + j)), bits));
        const Vec::I biased = Vec::as_int(Vec::add(v, summand));
        if constexpr (kHasSquares && R::kFolds == 1) group = Vec::add(group, Vec::mul(v, v));
        // Called after the load above, because it stores to an address with the same 12 low bits
        // (see Scratch).
        load_next(next);
        next += Vec::kWidth;
        return biased;
    };
    // Vectors that load_halves() will combine (kExchanged apart) are loaded together, too.
    constexpr int kApart = Vec::kExchanged, kPairs = kApart > 0 ? 2 : 1;
    const auto load_across = [&](int k) __attribute__((always_inline)) {
        if (kPairs == 2) k = k / kApart * 2 * kApart + k % kApart;
        Vec::I part[kPairs * kParts];
        group = Vec::zero();
#pragma GCC unroll 16
        for (int n = 0; n < kPairs * kParts; ++n) {
            const int j = (n / kPairs * kVectors + n % kPairs * kApart + k) * Vec::kWidth;
            part[n] = load_one(j);
            for (int begin = R::kKept; begin < R::kBlock; begin += R::kKept) {
                part[n] = Vec::add(part[n], load_one(begin + j));
            }
        }
        squares = Vec::add(squares, group);
        if constexpr (kPairs * kParts > 1) transform_across<WideLanes, 1>(part);
#pragma GCC unroll 16
        for (int n = 0; n < kPairs * kParts; ++n) {
            y[n / kPairs * kVectors + n % kPairs * kApart + k] = part[n];
        }
    };
    if constexpr (kParts == 1 && R::kFolds == 1) {
        // This loop is unrolled, so that y stays in registers.
#pragma GCC unroll 16
        for (int k = 0; k < kVectors / kPairs; ++k) load_across(k);
    } else {
        for (int k = 0; k < kVectors / kPairs; ++k) load_across(k);
    }
    out.element_squares = squares;
}

// Transforms y part by part, and writes the bits Y_k < 0 to the code.
template <Format kFormat, bool kHasSquares>
DILOCO_INLINE void write_signs(const Vec::I* y, uint8_t* code, Magnitudes<kFormat>& all,
                               BlockSums& out) {
    using R = wire::Rotation<kFormat>;
    constexpr int kVectors = kPartVectors<kFormat>, kStep = Vec::kLaneVectors;
    uint8_t* negative = R::kHasLevels ? code + R::kKept / 8 : code;
    const uint32_t bias = wire::float_bits(rounding_summand(R::kBits, out.exponent));
    Vec::I bias_of_first = Vec::set_first(static_cast<int32_t>(bias * R::kBlock));
    Vec::I magnitudes = Vec::set(0), squares = Vec::set(0);
    for (int begin = 0; begin < kKeptVectors<kFormat>; begin += kVectors) {
        Vec::I v[kVectors];
#pragma GCC unroll 16
        for (int k = 0; k < kVectors; k += kStep) Vec::load_halves(y + begin + k, v + k);
        if constexpr (kVectors > 1) transform_across<WideLanes, 1>(v);
#pragma GCC unroll 16
        for (int k = 0; k < kVectors; k += kStep) Vec::transform_lanes(v + k);
        v[0] = Vec::sub(v[0], bias_of_first);
        bias_of_first = Vec::set(0);
#pragma GCC unroll 16
        for (int k = 0; k < kVectors; k += kStep) {
            Vec::store_signs(negative + (begin + k) * Vec::kWidth / 8, v + k);
        }
#pragma GCC unroll 16
        for (int k = 0; k < kVectors; ++k) {
            const Vec::I magnitude = Vec::abs(v[k]);
            magnitudes = Vec::add(magnitudes, magnitude);
            if constexpr (kHasSquares && R::kFolds > 1) {
                squares = Vec::add_squares(squares, magnitude);
            }
            if constexpr (R::kHasLevels) all.of[begin + k] = magnitude;
        }
    }
    out.magnitudes = magnitudes;
    if constexpr (R::kFolds > 1) out.squares = squares;
    if constexpr (R::kHasLevels) out.border = wire::level_border(Vec::sum(magnitudes));
}

// For int2r, whose coefficients Y_k have two magnitudes (levels): writes the bit |Y_k| > out.border
// of each coefficient to the code, and sets `out.larger` to the sum of border - |Y_k| over the set
// bits, a lane for each of its coefficients. Does nothing for other formats.
template <Format kFormat>
DILOCO_INLINE void write_levels(const Magnitudes<kFormat>& all, uint8_t* code, BlockSums& out) {
    using R = wire::Rotation<kFormat>;
    if constexpr (!R::kHasLevels) return;
    constexpr int kStep = Vec::kLaneVectors;
    const Vec::I border = Vec::set(out.border);
    Vec::I larger = Vec::set(0);
#pragma GCC unroll 4
    for (int k = 0; k < kKeptVectors<kFormat>; k += kStep) {
        Vec::store_larger(code + k * Vec::kWidth / 8, border, all.of + k, larger);
    }
    out.larger = larger;
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

// The scale of a block in int2r and int1r, without error feedback. It needs sum Y_k^2, which equals
// kBlock * sum q_i^2. From sum x_i^2 follow two bounds for this sum, which nearly always lead to
// the same scale; if they do not, sum q_i^2 is computed from the elements, which load(j) returns.
template <Format kFormat, class Load>
DILOCO_INLINE uint16_t unbiased_scale(const BlockSums& in, wire::CoefficientSums& sums,
                                      const Load& load) {
    using R = wire::Rotation<kFormat>;
    const float unit = wire::power_of_two(R::kBits - in.exponent);
    const auto scale_of = [&](double square) {
        sums.square = static_cast<int64_t>(square);
        return wire::rotated_scale<kFormat>(sums, in.exponent, false);
    };
    if (std::abs(in.exponent) <= kLargestPlainExponent) {
        // With f = x * unit, the sum over f^2 is rounded less than 2^6 times, each time by at most
        // 2^-24 of the sum. As |q - f| <= 1/2, the sums over q^2 and f^2 differ by at most the sum
        // over |f| + 1/4, and |f| <= f^2 / 2^16 + 2^14.
        const double square = static_cast<double>(Vec::sum(in.element_squares)) * unit * unit;
        const double slack = square * (0x1p-18 + 0x1p-16) + R::kBlock * (0x1p14 + 0.25);
        const uint16_t scale = scale_of(R::kBlock * (square - slack));
        if (scale == scale_of(R::kBlock * (square + slack))) return scale;
    }
    Vec::I squares = Vec::set(0);
    for (int j = 0; j < R::kBlock; j += Vec::kWidth) {
        squares = Vec::add_squares(squares, Vec::round_even(Vec::mul(load(j), Vec::set(unit))));
    }
    sums.square = R::kBlock * static_cast<int64_t>(Vec::sum64(squares));
    return wire::rotated_scale<kFormat>(sums, in.exponent, false);
}

// Writes the scale of a block. The sums of a block with a bad element are zeros, so that scale and
// code become zeros.
template <Format kFormat, bool kHasSquares, class Load>
DILOCO_INLINE void write_scale(const EncodeSpan& span, int64_t block, const BlockSums& in,
                               const Load& load) {
    using R = wire::Rotation<kFormat>;
    uint8_t* code = code_of<kFormat>(span, block);
    wire::CoefficientSums sums{Vec::sum(in.magnitudes), 0, 0, 0};
    if constexpr (R::kHasLevels) {
        for (int byte = 0; byte < R::kKept / 8; byte += 8) {
            uint64_t word;
            __builtin_memcpy(&word, code + byte, sizeof(word));
            sums.num_large += __builtin_popcountll(word);
        }
        sums.large_magnitude = Vec::sum_of_larger(in.larger, in.border, sums.num_large);
    }
    uint16_t scale = 0;
    if constexpr (kHasSquares && R::kFolds == 1) {
        if (sums.magnitude != 0) scale = unbiased_scale<kFormat>(in, sums, load);
    } else {
        if constexpr (kHasSquares) sums.square = static_cast<int64_t>(Vec::sum64(in.squares));
        scale = wire::rotated_scale<kFormat>(sums, in.exponent, !kHasSquares);
    }
    if (scale == 0) __builtin_memset(code, 0, wire::own_bytes(kFormat));
    __builtin_memcpy(span.scales + 2 * block, &scale, sizeof(scale));
}

// Encodes the signs of block number `block`, whose elements are x, and meanwhile loads the next
// block. Calls before() between loading and transforming. Returns the number of bad elements.
template <Format kFormat, bool kHasSquares, class LoadNext, class Before>
DILOCO_INLINE int64_t begin_block(const EncodeSpan& span, const SignBits<kFormat>& signs,
                                  int64_t block, const float* x, uint32_t largest,
                                  Magnitudes<kFormat>& all, BlockSums& out, LoadNext&& load_next,
                                  Before&& before) {
    using R = wire::Rotation<kFormat>;
    if (largest <= wire::kLargestRotatedBits) {
        alignas(64) Vec::I y[kKeptVectors<kFormat>];
        out.exponent = wire::block_exponent(largest);
        load_folded<kFormat, kHasSquares>(x, signs, y, out, load_next);
        before();
        write_signs<kFormat, kHasSquares>(y, code_of<kFormat>(span, block), all, out);
        return 0;
    }
    for (int j = 0; j < R::kBlock; j += Vec::kWidth) load_next(j);
    before();
    __builtin_memset(&all, 0, sizeof(all));
    __builtin_memset(&out, 0, sizeof(out));
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

// Encodes the weighted sum of any number of payloads, one block after the other.
template <Format kFormat, bool kHasNewResidual>
int64_t encode_rotated_sum(const EncodeSpan& span) {
    alignas(64) float x[wire::Rotation<kFormat>::kBlock];
    const SignBits<kFormat> signs(span.signs);
    Magnitudes<kFormat> all;
    BlockSums sums;
    int64_t num_bad = 0;
    for (int64_t block = 0; block < span.num_blocks; ++block) {
        const uint32_t largest = load_sum<kFormat>(span, block, x);
        num_bad += begin_block<kFormat, !kHasNewResidual>(
            span, signs, block, x, largest, all, sums, [](int64_t) {}, [] {});
        write_levels<kFormat>(all, code_of<kFormat>(span, block), sums);
        write_scale<kFormat, !kHasNewResidual>(span, block, sums,
                                               [&](int j) { return Vec::load(x + j); });
        if constexpr (kHasNewResidual) store_rotated_rest<kFormat>(span, block, x);
    }
    return num_bad;
}

// Encodes all blocks of an Input (inputs.h). The levels of a block need a sum over all its
// coefficients, so they are written only after the next block was loaded. A scale is the end of a
// long chain of dependent instructions, so the scales of kScalesAtOnce blocks are made together.
template <Format kFormat, bool kHasNewResidual, class Input>
int64_t encode_rotated_input(const EncodeSpan& argument) {
    constexpr int64_t kScalesAtOnce = 8, kSums = 2 * kScalesAtOnce;
    const EncodeSpan span = argument;
    const int64_t num_blocks = span.num_blocks;
    Scratch scratch(span);
    const SignBits<kFormat> signs(span.signs);
    Magnitudes<kFormat> all[2];
    BlockSums sums[kSums];
    int64_t num_bad = 0;
    const auto finish_levels = [&](int64_t block) __attribute__((always_inline)) {
        write_levels<kFormat>(all[block & 1], code_of<kFormat>(span, block), sums[block % kSums]);
    };
    const auto finish_scales = [&](int64_t begin, int64_t end) {
        for (int64_t block = begin; block < end; ++block) {
            const Input input(span, block);
            write_scale<kFormat, !kHasNewResidual>(span, block, sums[block % kSums],
                                                   [&](int j) { return input.load(j); });
        }
    };
    uint32_t largest = load_block<Input>(argument, 0, scratch.x(0));
    for (int64_t block = 0; block < num_blocks; ++block) {
        // After the last block there is no next one: the last block is loaded again, and not used.
        const Input next(span, block + 1 < num_blocks ? block + 1 : block);
        const float* current = scratch.x(block);
        float* following = scratch.x(block + 1);
        Vec::I maxima = Vec::set(0);
        uint32_t next_largest = 0;
        const auto load_next = [&](int64_t j) __attribute__((always_inline)) {
            const Vec::F v = next.load(j);
            maxima = Vec::max(maxima, magnitude_of(v));
            Vec::store(following + j, v);
        };
        const auto before = [&]() __attribute__((always_inline)) {
            next_largest = Vec::largest(maxima);
            if (!kHasNewResidual && block > 0) finish_levels(block - 1);
        };
        num_bad += begin_block<kFormat, !kHasNewResidual>(span, signs, block, current, largest,
                                                          all[block & 1], sums[block % kSums],
                                                          load_next, before);
        largest = next_largest;
        if constexpr (kHasNewResidual) {
            // Finish the block at once: its residual needs x, whose buffer the block after the next
            // one overwrites.
            finish_levels(block);
            finish_scales(block, block + 1);
            store_rotated_rest<kFormat>(span, block, current);
        } else if (block % kScalesAtOnce == 0 && block > 0) {
            finish_scales(block - kScalesAtOnce, block);
        }
    }
    if (!kHasNewResidual && num_blocks > 0) {
        finish_levels(num_blocks - 1);
        finish_scales((num_blocks - 1) / kScalesAtOnce * kScalesAtOnce, num_blocks);
    }
    return num_bad;
}

template <Format kFormat, bool kHasNewResidual, DType kParams>
int64_t encode_rotated_difference(const EncodeSpan& span) {
    if (span.residual == nullptr) {
        return encode_rotated_input<kFormat, kHasNewResidual, DifferenceInput<kParams, false>>(
            span);
    }
    return encode_rotated_input<kFormat, kHasNewResidual, DifferenceInput<kParams, true>>(span);
}

template <Format kFormat, bool kHasNewResidual>
int64_t encode_rotated_with(const EncodeSpan& span) {
    if (span.num_terms > 0) {
        return encode_rotated_sum<kFormat, kHasNewResidual>(span);
    }
    const bool is_fp32 = span.param_dtype == DType::kFp32;
    const bool has_fp32 = span.residual == nullptr || span.residual_dtype == DType::kFp32;
    if (span.outer != nullptr && has_fp32 && is_fp32) {
        return encode_rotated_difference<kFormat, kHasNewResidual, DType::kFp32>(span);
    }
    if (span.outer != nullptr && has_fp32 && span.param_dtype == DType::kBf16) {
        return encode_rotated_difference<kFormat, kHasNewResidual, DType::kBf16>(span);
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
