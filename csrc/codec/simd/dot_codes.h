// Dot products of int8 codes. Both implementations use AVX2 here: 16 codes, widened to 16 bits,
// fill one register.
#pragma once

#include <immintrin.h>

#include "codec/kernels.h"

namespace diloco::codec {
namespace {

inline __m256i load_codes(const int8_t* codes) {
    return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
}

// Computes the sums of kCount of the others at once, so that `a` is widened only once.
// `num_elements` is a multiple of 16.
template <int kCount>
void dot_codes_with(const CodeDotSpan& span, int first, int64_t num_elements) {
    __m256i sums[kCount];
    for (auto& sum : sums) sum = _mm256_setzero_si256();
    for (int64_t i = 0; i < num_elements; i += 16) {
        const __m256i a = load_codes(span.a + i);
        for (int k = 0; k < kCount; ++k) {
            const __m256i b = load_codes(span.others[first + k] + i);
            sums[k] = _mm256_add_epi32(sums[k], _mm256_madd_epi16(a, b));
        }
    }
    for (int k = 0; k < kCount; ++k) {
        __m128i sum =
            _mm_add_epi32(_mm256_castsi256_si128(sums[k]), _mm256_extracti128_si256(sums[k], 1));
        sum = _mm_hadd_epi32(sum, sum);
        sum = _mm_hadd_epi32(sum, sum);
        span.sums[first + k] = _mm_cvtsi128_si32(sum);
    }
}

void dot_codes(const CodeDotSpan& argument) {
    const CodeDotSpan span = argument;
    const int64_t whole = span.num_elements / 16 * 16;
    int k = 0;
    for (; k + 4 <= span.num_others; k += 4) dot_codes_with<4>(span, k, whole);
    if (k + 2 <= span.num_others) {
        dot_codes_with<2>(span, k, whole);
        k += 2;
    }
    if (k < span.num_others) dot_codes_with<1>(span, k, whole);
    for (int64_t i = whole; i < span.num_elements; ++i) {
        for (int other = 0; other < span.num_others; ++other) {
            span.sums[other] += span.a[i] * span.others[other][i];
        }
    }
}

}  // namespace
}  // namespace diloco::codec
