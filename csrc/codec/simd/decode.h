// Decoding, written once over the class Vec of vec_avx2.h or vec_avx512.h, whichever is included
// before: weighted sums of payloads, block by block.
#pragma once

#include "codec/simd/rotation.h"
#include "codec/sparse.h"
#include "wire/codes.h"
#include "wire/scale.h"

namespace diloco::codec {
namespace {

// For functions that inner loops call: without inlining they would be too slow.
#define DILOCO_INLINE [[gnu::always_inline]] inline

// The number of payloads that are summed in one pass over a block.
constexpr int kTermBatch = 4;
// The number of elements in one iteration of an inner loop; it divides every block size.
constexpr int kUnroll = 32;

// The values of kWidth codes from element i on, before the scale.
template <Format kFormat>
DILOCO_INLINE Vec::F code_values(const uint8_t* codes, int64_t i) {
    if constexpr (kFormat == Format::kFp32) {
        return Vec::load(reinterpret_cast<const float*>(codes) + i);
    } else if constexpr (kFormat == Format::kBf16) {
        return Vec::load_bf16(reinterpret_cast<const uint16_t*>(codes) + i);
    } else if constexpr (kFormat == Format::kFp16) {
        return Vec::load_fp16(reinterpret_cast<const uint16_t*>(codes) + i);
    } else if constexpr (kFormat == Format::kFp8E4m3) {
        return Vec::load_e4m3(codes + i);
    } else if constexpr (kFormat == Format::kFp8E5m2) {
        return Vec::load_e5m2(codes + i);
    } else if constexpr (kFormat == Format::kInt8) {
        return Vec::to_float(Vec::load_i8(codes + i));
    } else if constexpr (kFormat == Format::kInt4) {
        return Vec::int4_value(Vec::load_nibbles(codes + i / 2));
    } else {
        return Vec::e3m0_value(Vec::load_nibbles(codes + i / 2));
    }
}

// The factors of up to kTermBatch payloads for one block. A value becomes coefficient * (value *
// scale). If all coefficients are powers of two and no scale is extreme, multiplying by a
// coefficient is exact, and the value can be multiplied by coefficient * scale at once.
struct BlockFactors {
    float scale[kTermBatch];
    float coefficient[kTermBatch];
    bool is_single;  // `coefficient` has coefficient * scale
};

DILOCO_INLINE bool is_small_power_of_two(float x) {
    const uint32_t bits = wire::float_bits(x);
    return (bits & 0x7FFFFFu) == 0 && bits >= 0x3B800000u && bits <= 0x3F800000u;  // 2^-8 .. 1
}

template <Format kFormat>
DILOCO_INLINE void load_factors(const Term* terms, int num_terms, int64_t block,
                                BlockFactors& factors) {
    constexpr uint32_t kLargeScale = 0x7000;  // 2^97 as bf16; negative ones are above it too
    bool is_single = true;
    for (int t = 0; t < num_terms; ++t) {
        const float coefficient = terms[t].coefficient;
        factors.coefficient[t] = coefficient;
        is_single = is_single && is_small_power_of_two(coefficient);
        if constexpr (wire::has_scales(kFormat)) {
            uint16_t scale;
            __builtin_memcpy(&scale, terms[t].scales + 2 * block, sizeof(scale));
            factors.scale[t] = wire::scale_value(scale);
            is_single = is_single && scale < kLargeScale && scale >= wire::kSmallestScale;
        }
    }
    factors.is_single = is_single;
    if (wire::has_scales(kFormat) && is_single) {
        for (int t = 0; t < num_terms; ++t) factors.coefficient[t] *= factors.scale[t];
    }
}

// Writes the weighted sum of kTerms payloads to `sum` if is_first, else adds it, for the `size`
// elements of a block that begins at element `begin` of the span. Pointers and factors are copied
// to local arrays, because the compiler must assume that stores to `sum` change anything else.
template <Format kFormat, bool kIsSingle, int kTerms>
void sum_terms(const Term* terms, const BlockFactors& factors, int64_t begin, int size,
               bool is_first, float* sum) {
    constexpr bool kHasScale = wire::has_scales(kFormat) && !kIsSingle;
    constexpr int kVectors = kUnroll / Vec::kWidth;
    const uint8_t* codes[kTerms];
    Vec::F scale[kTerms], coefficient[kTerms];
    for (int t = 0; t < kTerms; ++t) {
        codes[t] = terms[t].codes;
        scale[t] = Vec::set(kHasScale ? factors.scale[t] : 1.0f);
        coefficient[t] = Vec::set(factors.coefficient[t]);
    }
    for (int j = 0; j < size; j += kUnroll) {
        for (int k = 0; k < kVectors; ++k) {
            const int at = j + k * Vec::kWidth;
            Vec::F total = is_first ? Vec::zero() : Vec::load(sum + at);
            for (int t = 0; t < kTerms; ++t) {
                Vec::F value = code_values<kFormat>(codes[t], begin + at);
                if constexpr (kHasScale) value = Vec::mul(value, scale[t]);
                value = Vec::mul(coefficient[t], value);
                total = t == 0 && is_first ? value : Vec::add(total, value);
            }
            Vec::store(sum + at, total);
        }
    }
}

using SumTerms = void (*)(const Term*, const BlockFactors&, int64_t, int, bool, float*);

template <Format kFormat, bool kIsSingle>
constexpr SumTerms kSumTerms[kTermBatch] = {
    sum_terms<kFormat, kIsSingle, 1>, sum_terms<kFormat, kIsSingle, 2>,
    sum_terms<kFormat, kIsSingle, 3>, sum_terms<kFormat, kIsSingle, 4>};

template <Format kFormat>
void decode_element_block(const Term* terms, int num_terms, int64_t block, int size, float* sum) {
    BlockFactors factors;
    for (int first = 0; first < num_terms; first += kTermBatch) {
        const int count = num_terms - first < kTermBatch ? num_terms - first : kTermBatch;
        load_factors<kFormat>(terms + first, count, block, factors);
        const SumTerms add = factors.is_single ? kSumTerms<kFormat, true>[count - 1]
                                               : kSumTerms<kFormat, false>[count - 1];
        add(terms + first, factors, block * size, size, first == 0, sum);
    }
}

// The weighted sum of block number `block` of all terms, as fp32.
template <Format kFormat>
void decode_block(const Term* terms, int num_terms, int64_t block, int size, float* sum) {
    if constexpr (wire::is_rotated(kFormat)) {
        decode_rotated_block<kFormat>(terms, num_terms, block, size, sum);
    } else if constexpr (wire::is_sparse(kFormat)) {
        sum_sparse_block<kFormat>(terms, num_terms, block, sum);
    } else {
        decode_element_block<kFormat>(terms, num_terms, block, size, sum);
    }
}

// The weighted sum of kTerms payloads in one block, vector by vector.
template <Format kFormat, int kTerms>
class WeightedSum {
  public:
    DILOCO_INLINE WeightedSum(const Term* terms, int64_t block) {
        BlockFactors factors;
        load_factors<kFormat>(terms, kTerms, block, factors);
        has_scale_ = wire::has_scales(kFormat) && !factors.is_single;
        for (int t = 0; t < kTerms; ++t) {
            codes_[t] = terms[t].codes;
            scale_[t] = Vec::set(wire::has_scales(kFormat) ? factors.scale[t] : 1.0f);
            coefficient_[t] = Vec::set(factors.coefficient[t]);
        }
    }
    DILOCO_INLINE bool has_scale() const { return has_scale_; }
    // The sum at elements i to i + kWidth - 1 of the span; kHasScale must be has_scale().
    template <bool kHasScale>
    DILOCO_INLINE Vec::F at(int64_t i) const {
        Vec::F total = Vec::zero();
        for (int t = 0; t < kTerms; ++t) {
            Vec::F value = code_values<kFormat>(codes_[t], i);
            if constexpr (kHasScale) value = Vec::mul(value, scale_[t]);
            value = Vec::mul(coefficient_[t], value);
            total = t == 0 ? value : Vec::add(total, value);
        }
        return total;
    }

  private:
    bool has_scale_;
    const uint8_t* codes_[kTerms];
    Vec::F scale_[kTerms], coefficient_[kTerms];
};

DILOCO_INLINE void store_as(DType dtype, void* out, int64_t i, Vec::F value) {
    if (dtype == DType::kFp32) {
        Vec::store(static_cast<float*>(out) + i, value);
    } else if (dtype == DType::kBf16) {
        Vec::store_bf16(static_cast<uint16_t*>(out) + i, value);
    } else {
        Vec::store_fp16(static_cast<uint16_t*>(out) + i, value);
    }
}

DILOCO_INLINE Vec::F load_as(DType dtype, const void* in, int64_t i) {
    return dtype == DType::kFp32   ? Vec::load(static_cast<const float*>(in) + i)
           : dtype == DType::kBf16 ? Vec::load_bf16(static_cast<const uint16_t*>(in) + i)
                                   : Vec::load_fp16(static_cast<const uint16_t*>(in) + i);
}

// c(x): the value that a parameter of this dtype has after x was written to it.
DILOCO_INLINE Vec::F as_written(DType dtype, Vec::F x) {
    return dtype == DType::kFp32   ? x
           : dtype == DType::kBf16 ? Vec::round_bf16(x)
                                   : Vec::round_fp16(x);
}

// Stores the value as rounded_toward() of step_rule.h rounds it; `target` is a value of the dtype.
DILOCO_INLINE void store_toward(DType dtype, void* out, int64_t i, Vec::F value, Vec::F target) {
    if (dtype == DType::kFp32) {
        Vec::store(static_cast<float*>(out) + i, value);
    } else if (dtype == DType::kBf16) {
        Vec::store_bf16_toward(static_cast<uint16_t*>(out) + i, value, target);
    } else {
        Vec::store_fp16_toward(static_cast<uint16_t*>(out) + i, value, target);
    }
}

// Decodes a sum of few payloads by non-temporal stores, without a buffer between.
template <Format kFormat, int kTerms>
void decode_streamed(const DecodeSpan& argument) {
    const DecodeSpan span = argument;
    const int size = span.block_size;
    for (int64_t block = 0; block < span.num_blocks; ++block) {
        const WeightedSum<kFormat, kTerms> sum(span.terms, block);
        const int64_t begin = block * size;
        float* out = static_cast<float*>(span.out) + begin;
        if (wire::has_scales(kFormat) && sum.has_scale()) {
            for (int j = 0; j < size; j += Vec::kWidth) {
                Vec::stream(out + j, sum.template at<true>(begin + j));
            }
        } else {
            for (int j = 0; j < size; j += Vec::kWidth) {
                Vec::stream(out + j, sum.template at<false>(begin + j));
            }
        }
    }
    _mm_sfence();
}

template <Format kFormat>
void decode_format(const DecodeSpan& span) {
    if constexpr (wire::has_element_codes(kFormat)) {
        if (span.streams && span.num_terms == 1) return decode_streamed<kFormat, 1>(span);
        if (span.streams && span.num_terms == 2) return decode_streamed<kFormat, 2>(span);
    }
    const int size = span.block_size;
    for (int64_t block = 0; block < span.num_blocks; ++block) {
        alignas(64) float sum[wire::kLargestBlock];
        decode_block<kFormat>(span.terms, span.num_terms, block, size, sum);
        if (span.streams) {
            float* out = static_cast<float*>(span.out) + block * size;
            for (int j = 0; j < size; j += Vec::kWidth) Vec::stream(out + j, Vec::load(sum + j));
        } else {
            for (int j = 0; j < size; j += Vec::kWidth) {
                store_as(span.out_dtype, span.out, block * size + j, Vec::load(sum + j));
            }
        }
    }
    if (span.streams) _mm_sfence();
}

}  // namespace
}  // namespace diloco::codec
