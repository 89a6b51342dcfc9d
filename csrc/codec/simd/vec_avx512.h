// The class Vec for AVX-512 (F, BW, VL, DQ): vectors of sixteen fp32 lanes. vec_avx2.h has a class
// with the same functions, and the kernels are written once for both. Only kernels_avx512.cpp,
// which has its own compiler flags, includes this file; everything in it has internal linkage.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace diloco::codec {
namespace {

struct Vec {
    static constexpr int kWidth = 16;
    using F = __m512;
    using I = __m512i;
    using M = __mmask16;
    using D = __m512d;

    static F load(const float* p) { return _mm512_loadu_ps(p); }
    static F load_bf16(const uint16_t* p) {
        return _mm512_castsi512_ps(_mm512_slli_epi32(load_u16(p), 16));
    }
    static F load_fp16(const uint16_t* p) { return _mm512_cvtph_ps(load256(p)); }
    static I load_u16(const uint16_t* p) { return _mm512_cvtepu16_epi32(load256(p)); }
    static I load_i8(const uint8_t* p) { return _mm512_cvtepi8_epi32(load128(p)); }
    // Loads eight numbers of 16 bits to lanes of 64 bits.
    static I load_u16_as_64(const uint16_t* p) {
        return _mm512_cvtepu16_epi64(load128(reinterpret_cast<const uint8_t*>(p)));
    }
    // Loads sixteen 4-bit codes to lanes of 32 bits: each byte is widened to 64 bits, and its high
    // nibble moved to the upper half.
    static I load_nibbles(const uint8_t* p) {
        const I bytes = _mm512_cvtepu8_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
        return _mm512_and_si512(_mm512_or_si512(bytes, _mm512_slli_epi64(bytes, 28)), set(0xF));
    }
    static F load_e4m3(const uint8_t* p) {
        // The code, shifted to fp16's position, is its value times 2^-8. Only the NaN, 0x7F, must
        // be replaced by a NaN of fp16.
        const __m256i code = _mm256_slli_epi16(_mm256_cvtepi8_epi16(load128(p)), 7);
        const __m256i half = _mm256_and_si256(code, _mm256_set1_epi16(static_cast<short>(0xBFFF)));
        const __mmask16 is_nan = _mm256_cmpeq_epi16_mask(
            _mm256_and_si256(half, _mm256_set1_epi16(0x7FFF)), _mm256_set1_epi16(0x3F80));
        const __m256i value = _mm256_or_si256(half, _mm256_maskz_set1_epi16(is_nan, 0x7E00));
        return _mm512_mul_ps(_mm512_cvtph_ps(value), set(256.0f));
    }
    static F load_e5m2(const uint8_t* p) {
        return _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(load128(p)), 8));
    }
    static F int4_value(I nibble) {
        const F table = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1);
        return _mm512_permutexvar_ps(nibble, table);
    }
    static F e3m0_value(I nibble) {
        const F table = _mm512_setr_ps(0.0f, 0.25f, 0.5f, 1.0f, 2.0f, 4.0f, 8.0f, 16.0f, -0.0f,
                                       -0.25f, -0.5f, -1.0f, -2.0f, -4.0f, -8.0f, -16.0f);
        return _mm512_permutexvar_ps(nibble, table);
    }

    static void store(float* p, F v) { _mm512_storeu_ps(p, v); }
    static void stream(float* p, F v) { _mm512_stream_ps(p, v); }
    static void stream_line(uint8_t* p, const uint8_t* from) {
        _mm512_stream_si512(reinterpret_cast<__m512i*>(p), _mm512_load_si512(from));
    }
    static void store_u16(uint16_t* p, I v) { store256(p, _mm512_cvtepi32_epi16(v)); }
    // Stores the codes of 32 elements, the low bytes of the lanes.
    static void store_bytes(uint8_t* p, const I* v) {
        for (int k = 0; k < 2; ++k) {
            _mm_storeu_si128(reinterpret_cast<__m128i*>(p) + k, _mm512_cvtepi32_epi8(v[k]));
        }
    }
    static void store_nibbles(uint8_t* p, const I* v) {
        for (int k = 0; k < 2; ++k) {
            const I nibbles = and_(v[k], set(0xF));
            const I pairs = _mm512_or_si512(nibbles, _mm512_srli_epi64(nibbles, 28));
            _mm_storel_epi64(reinterpret_cast<__m128i*>(p + 8 * k), _mm512_cvtepi64_epi8(pairs));
        }
    }
    static void store_bf16(uint16_t* p, F v) { store_upper(p, v, nearest_bf16(as_int(v))); }
    static void store_fp16(uint16_t* p, F v) { store256(p, to_half(v)); }
    // Store v, rounded in the direction of `target`, which is a value of the dtype. Dropping the
    // low 16 bits rounds toward zero; adding 0xFFFF before rounds away from zero.
    static void store_bf16_toward(uint16_t* p, F v, F target) {
        const M is_away = _kxor_mask16(less(v, target), less(v, zero()));
        store_upper(p, v, add_where(is_away, as_int(v), set(0xFFFF)));
    }
    static void store_fp16_toward(uint16_t* p, F v, F target) {
        const __m256i below = _mm512_cvtps_ph(v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
        const __m256i above = _mm512_cvtps_ph(v, _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC);
        store256(p, _mm256_mask_mov_epi16(below, less(v, target), above));
    }

    static F set(float x) { return _mm512_set1_ps(x); }
    static I set(int32_t x) { return _mm512_set1_epi32(x); }
    static F zero() { return _mm512_setzero_ps(); }

    static I as_int(F v) { return _mm512_castps_si512(v); }
    static F as_float(I v) { return _mm512_castsi512_ps(v); }
    static I round_even(F v) { return _mm512_cvtps_epi32(v); }
    static I round_down(F v) {
        return _mm512_cvt_roundps_epi32(v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    }
    static F to_float(I v) { return _mm512_cvtepi32_ps(v); }
    // Round to the nearest bf16 and fp16; a NaN stays a NaN.
    static F round_bf16(F v) {
        const I bits = as_int(v);
        const M is_number = _mm512_cmp_ps_mask(v, v, _CMP_ORD_Q);
        return as_float(_mm512_mask_and_epi32(bits, is_number, nearest_bf16(bits), set(kBf16Mask)));
    }
    static F round_fp16(F v) { return _mm512_cvtph_ps(to_half(v)); }
    static I to_half_bits(F v) { return _mm512_cvtepu16_epi32(to_half(v)); }

    static F add(F a, F b) { return _mm512_add_ps(a, b); }
    static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
    static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
    static F div(F a, F b) { return _mm512_div_ps(a, b); }
    static F sqrt(F a) { return _mm512_sqrt_ps(a); }
    static F min(F a, F b) { return _mm512_min_ps(a, b); }
    static F max(F a, F b) { return _mm512_max_ps(a, b); }

    static I add(I a, I b) { return _mm512_add_epi32(a, b); }
    static I sub(I a, I b) { return _mm512_sub_epi32(a, b); }
    static I and_(I a, I b) { return _mm512_and_si512(a, b); }
    static I xor_(I a, I b) { return _mm512_xor_si512(a, b); }
    static I or_(I a, I b) { return _mm512_or_si512(a, b); }
    static I min(I a, I b) { return _mm512_min_epi32(a, b); }
    static I max(I a, I b) { return _mm512_max_epi32(a, b); }
    template <int kBits>
    static I shift_left(I a) {
        return _mm512_slli_epi32(a, kBits);
    }
    template <int kBits>
    static I shift_right(I a) {
        return _mm512_srli_epi32(a, kBits);
    }
    template <int kBits>
    static I shift_right_signed(I a) {
        return _mm512_srai_epi32(a, kBits);
    }
    static M less(I a, I b) { return _mm512_cmplt_epi32_mask(a, b); }
    static I select(M m, I yes, I no) { return _mm512_mask_mov_epi32(no, m, yes); }
    // The bits of `yes` where `mask` has ones, of `no` elsewhere.
    static I pick_bits(I mask, I yes, I no) {
        return _mm512_ternarylogic_epi32(mask, yes, no, 0xCA);
    }
    static F zero_where(M m, F v) { return _mm512_maskz_mov_ps(static_cast<M>(~m), v); }
    static int count(M m) { return __builtin_popcount(m); }
    static uint32_t largest(I v) { return static_cast<uint32_t>(_mm512_reduce_max_epi32(v)); }

    // fp64 arithmetic: low() and high() widen the lower and the upper eight lanes.
    static D low(F v) { return _mm512_cvtps_pd(_mm512_castps512_ps256(v)); }
    static D high(F v) { return _mm512_cvtps_pd(_mm512_extractf32x8_ps(v, 1)); }
    static D add(D a, D b) { return _mm512_add_pd(a, b); }
    static D mul(D a, D b) { return _mm512_mul_pd(a, b); }
    static D load(const double* p) { return _mm512_loadu_pd(p); }
    static void store(double* p, D v) { _mm512_storeu_pd(p, v); }

    // Philox (wire/philox.h) on eight counters in 64-bit lanes. Their order is chosen so that
    // store_philox() writes the outputs in the order of the counters.
    static constexpr int kPhiloxLanes = 8;
    static I philox_counters(uint64_t first) {
        return _mm512_add_epi64(_mm512_set1_epi64(static_cast<long long>(first)),
                                _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7));
    }
    static I high_half(I v) { return _mm512_srli_epi64(v, 32); }
    static I multiply_low(I a, I b) { return _mm512_mul_epu32(a, b); }
    static I set64(uint64_t x) { return _mm512_set1_epi64(static_cast<long long>(x)); }
    // Loads eight words of 64 bits.
    static I load_words(const uint8_t* p) { return _mm512_loadu_si512(p); }
    static I lane_numbers() { return _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7); }
    // 1 << n in lanes of 64 bits; 0 if n, taken as unsigned, is above 63.
    static I bit64(I n) { return _mm512_sllv_epi64(set64(1), n); }
    static I add64(I a, I b) { return _mm512_add_epi64(a, b); }
    static I multiply64(I a, I b) { return _mm512_mullo_epi64(a, b); }
    template <int kBits>
    static I shift_right64(I a) {
        return _mm512_srli_epi64(a, kBits);
    }
    static uint64_t sum64(I v) { return static_cast<uint64_t>(_mm512_reduce_add_epi64(v)); }
    static I xor3(I a, I b, I c) { return _mm512_ternarylogic_epi64(a, b, c, 0x96); }
    // Stores the 16 output bytes of each counter.
    static void store_philox(uint8_t* p, I w0, I w1, I w2, I w3) {
        const I a = _mm512_mask_shuffle_epi32(w0, 0xAAAA, w1, _MM_PERM_CCAA);
        const I b = _mm512_mask_shuffle_epi32(w2, 0xAAAA, w3, _MM_PERM_CCAA);
        _mm512_storeu_si512(p, _mm512_unpacklo_epi64(a, b));
        _mm512_storeu_si512(p + 64, _mm512_unpackhi_epi64(a, b));
    }
    // Makes the 16 random bits of sixteen elements from their bytes: an element's own byte above
    // its neighbour's, above 8 zero bits.
    static I load_random(const uint8_t* p) {
        const I order =
            _mm512_set_epi32(0x800F0E80, 0x800E0F80, 0x800D0C80, 0x800C0D80, 0x800B0A80, 0x800A0B80,
                             0x80090880, 0x80080980, 0x80070680, 0x80060780, 0x80050480, 0x80040580,
                             0x80030280, 0x80020380, 0x80010080, 0x80000180);
        return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(load128(p)), order);
    }

    // For the rotated formats (simd/rotation.h). Lane i of across(v) is lane i ^ kStride of v.
    template <int kStride>
    static I across(I v) {
        if constexpr (kStride == 1) return _mm512_shuffle_epi32(v, _MM_PERM_CDAB);
        if constexpr (kStride == 2) return _mm512_shuffle_epi32(v, _MM_PERM_BADC);
        if constexpr (kStride == 4) return _mm512_shuffle_i32x4(v, v, 0xB1);
        return _mm512_shuffle_i32x4(v, v, 0x4E);
    }
    // One stage of a transform. Lane i becomes v[i] + v[i ^ kStride] if i & kStride is 0, else
    // v[i ^ kStride] - v[i].
    template <int kStride>
    static I butterfly(I v) {
        constexpr M kUpper = kStride == 1   ? 0xAAAA
                             : kStride == 2 ? 0xCCCC
                             : kStride == 4 ? 0xF0F0
                                            : 0xFF00;
        const I other = across<kStride>(v);
        return _mm512_mask_sub_epi32(_mm512_add_epi32(other, v), kUpper, other, v);
    }
    // As butterfly(), in lanes of 16 bits.
    template <int kStride>
    static I butterfly16(I v) {
        constexpr __mmask32 kUpper = kStride == 1   ? 0xAAAAAAAA
                                     : kStride == 2 ? 0xCCCCCCCC
                                     : kStride == 4 ? 0xF0F0F0F0
                                     : kStride == 8 ? 0xFF00FF00
                                                    : 0xFFFF0000;
        I other;
        if constexpr (kStride == 1) {
            other = _mm512_rol_epi32(v, 16);
        } else {
            other = across<kStride / 2>(v);
        }
        return _mm512_mask_sub_epi16(_mm512_add_epi16(other, v), kUpper, other, v);
    }
    static I add16(I a, I b) { return _mm512_add_epi16(a, b); }
    static I sub16(I a, I b) { return _mm512_sub_epi16(a, b); }
    static I negate16_where(const uint8_t* bits, I v) {
        return _mm512_mask_sub_epi16(v, load_mask16(bits), _mm512_setzero_si512(), v);
    }
    // Lane i of 16 bits becomes `yes` if bit i is set, else `no`.
    static I pick16(const uint8_t* bits, short yes, short no) {
        return _mm512_mask_mov_epi16(_mm512_set1_epi16(no), load_mask16(bits),
                                     _mm512_set1_epi16(yes));
    }
    static I widen16(const int16_t* p) {
        return _mm512_cvtepi16_epi32(load256(reinterpret_cast<const uint16_t*>(p)));
    }
    static I abs(I v) { return _mm512_abs_epi32(v); }
    // Bit i of the bytes belongs to lane i.
    static M load_mask(const uint8_t* bits) {
        uint16_t mask;
        __builtin_memcpy(&mask, bits, sizeof(mask));
        return mask;
    }
    static void store_mask(uint8_t* bits, M mask) {
        const auto word = static_cast<uint16_t>(mask);
        __builtin_memcpy(bits, &word, sizeof(word));
    }
    // The stages of a transform inside vectors. Unlike in vec_avx2.h, they work on one vector at a
    // time, and the coefficients stay in order.
    static constexpr int kLaneVectors = 1;
    static constexpr int kExchanged = 0;  // no vectors exchange halves
    static void load_halves(const I* from, I* v) { *v = *from; }
    static void transform_lanes(I* v) {
        *v = butterfly<8>(butterfly<4>(butterfly<2>(butterfly<1>(*v))));
    }
    static void store_signs(uint8_t* bits, const I* v) { store_mask(bits, is_negative(*v)); }
    // Stores the bits v > border, and adds those elements to `sum`.
    static void store_larger(uint8_t* bits, I border, const I* v, I& sum) {
        const M mask = less(border, *v);
        sum = add_where(mask, sum, *v);
        store_mask(bits, mask);
    }
    // The sum of all elements above the border, from the sum that store_larger() has made.
    static uint32_t sum_of_larger(I sum, int32_t, int) { return Vec::sum(sum); }
    static M is_negative(I v) { return _mm512_movepi32_mask(v); }
    static I negate_where(M m, I v) { return _mm512_mask_sub_epi32(v, m, set(0), v); }
    static I add_where(M m, I a, I b) { return _mm512_mask_add_epi32(a, m, a, b); }
    // Adds the squares of all lanes to 64-bit sums, an even and an odd lane to each.
    static I add_squares(I sum, I v) {
        const I odd = _mm512_srli_epi64(v, 32);
        return _mm512_add_epi64(_mm512_add_epi64(sum, _mm512_mul_epi32(v, v)),
                                _mm512_mul_epi32(odd, odd));
    }
    static float sum(F v) { return _mm512_reduce_add_ps(v); }
    // A vector with x in the first lane and 0 in the others.
    static I set_first(int32_t x) { return _mm512_zextsi128_si512(_mm_cvtsi32_si128(x)); }
    static uint32_t sum(I v) { return static_cast<uint32_t>(_mm512_reduce_add_epi32(v)); }

  private:
    static M less(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
    static constexpr int32_t kBf16Mask = static_cast<int32_t>(0xFFFF0000);
    // The nearest bf16 in the upper half of each lane; the lower half has no meaning.
    static I nearest_bf16(I bits) {
        const M is_odd = _mm512_test_epi32_mask(bits, set(0x10000));
        return add_where(is_odd, add(bits, set(0x7FFF)), set(1));
    }
    // Stores the upper halves of the lanes as bf16, and 0x7FC0 where v is a NaN.
    static void store_upper(uint16_t* p, F v, I upper) {
        const M is_nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
        store_u16(p, select(is_nan, set(0x7FC0), shift_right<16>(upper)));
    }
    static __mmask32 load_mask16(const uint8_t* bits) {
        uint32_t mask;
        __builtin_memcpy(&mask, bits, sizeof(mask));
        return mask;
    }
    static __m256i to_half(F v) {
        return _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    }
    static __m128i load128(const uint8_t* p) {
        return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    }
    static __m256i load256(const uint16_t* p) {
        return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    }
    static void store256(uint16_t* p, __m256i v) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v);
    }
};

}  // namespace
}  // namespace diloco::codec
