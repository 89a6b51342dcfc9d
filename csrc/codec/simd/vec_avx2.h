// The class Vec for AVX2 with F16C: vectors of eight fp32 lanes. vec_avx512.h has a class with the
// same functions, and the kernels are written once for both. Only kernels_avx2.cpp, which has its
// own compiler flags, includes this file; everything in it has internal linkage.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace diloco::codec {
namespace {

struct Vec {
    static constexpr int kWidth = 8;
    using F = __m256;
    using I = __m256i;
    using M = __m256i;  // lanes of all ones or all zeros
    using D = __m256d;

    static F load(const float* p) { return _mm256_loadu_ps(p); }
    static F load_bf16(const uint16_t* p) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(load_u16(p), 16));
    }
    static F load_fp16(const uint16_t* p) { return _mm256_cvtph_ps(load128(p)); }
    static I load_u16(const uint16_t* p) { return _mm256_cvtepu16_epi32(load128(p)); }
    static I load_i8(const uint8_t* p) { return _mm256_cvtepi8_epi32(load64(p)); }
    // Loads four numbers of 16 bits to lanes of 64 bits.
    static I load_u16_as_64(const uint16_t* p) {
        return _mm256_cvtepu16_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    }
    // Loads eight 4-bit codes to lanes of 32 bits: each byte is widened to 64 bits, and its high
    // nibble moved to the upper half.
    static I load_nibbles(const uint8_t* p) {
        int32_t packed;
        __builtin_memcpy(&packed, p, sizeof(packed));
        const I bytes = _mm256_cvtepu8_epi64(_mm_cvtsi32_si128(packed));
        return and_(or_(bytes, _mm256_slli_epi64(bytes, 28)), set(0xF));
    }
    static F load_e4m3(const uint8_t* p) {
        // The code, shifted to fp16's position, is its value times 2^-8. Only the NaN, 0x7F, must
        // be replaced by a NaN of fp16.
        const __m128i code = _mm_slli_epi16(_mm_cvtepi8_epi16(load64(p)), 7);
        const __m128i half = _mm_and_si128(code, _mm_set1_epi16(static_cast<short>(0xBFFF)));
        const __m128i is_nan =
            _mm_cmpeq_epi16(_mm_and_si128(half, _mm_set1_epi16(0x7FFF)), _mm_set1_epi16(0x3F80));
        const __m128i value = _mm_or_si128(half, _mm_and_si128(is_nan, _mm_set1_epi16(0x7E00)));
        return _mm256_mul_ps(_mm256_cvtph_ps(value), set(256.0f));
    }
    static F load_e5m2(const uint8_t* p) {
        return _mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(load64(p)), 8));
    }
    static F int4_value(I nibble) {
        return to_float(_mm256_srai_epi32(_mm256_slli_epi32(nibble, 28), 28));
    }
    static F e3m0_value(I nibble) {
        const F table = _mm256_setr_ps(0.0f, 0.25f, 0.5f, 1.0f, 2.0f, 4.0f, 8.0f, 16.0f);
        const I sign = _mm256_slli_epi32(_mm256_srli_epi32(nibble, 3), 31);
        return as_float(or_(as_int(_mm256_permutevar8x32_ps(table, nibble)), sign));
    }

    static void store(float* p, F v) { _mm256_storeu_ps(p, v); }
    static void stream(float* p, F v) { _mm256_stream_ps(p, v); }
    static void stream_line(uint8_t* p, const uint8_t* from) {
        for (int half = 0; half < 2; ++half) {
            const auto* source = reinterpret_cast<const __m256i*>(from) + half;
            _mm256_stream_si256(reinterpret_cast<__m256i*>(p) + half, _mm256_load_si256(source));
        }
    }
    static void store_u16(uint16_t* p, I v) {
        // packus packs each 128-bit half by itself, so the halves are put together. The lanes hold
        // at most 0xFFFF.
        const I packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(v, v), 0x08);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
    }
    // Stores the codes of 32 elements, from lanes that hold signed numbers of at most eight bits.
    static void store_bytes(uint8_t* p, const I* v) {
        const I order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
        _mm256_storeu_si256(reinterpret_cast<I*>(p),
                            _mm256_permutevar8x32_epi32(pack_signed(v), order));
    }
    static void store_nibbles(uint8_t* p, const I* v) {
        const I nibbles = and_(pack_signed(v), _mm256_set1_epi8(0xF));
        const I pairs = _mm256_maddubs_epi16(nibbles, _mm256_set1_epi16(0x1001));
        const __m128i bytes =
            _mm_packus_epi16(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
        const __m128i order = _mm_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm_shuffle_epi8(bytes, order));
    }
    static void store_bf16(uint16_t* p, F v) { store_upper(p, v, nearest_bf16(as_int(v))); }
    static void store_fp16(uint16_t* p, F v) { store128(p, to_half(v)); }
    // Store v, rounded in the direction of `target`, which is a value of the dtype. Dropping the
    // low 16 bits rounds toward zero; adding 0xFFFF before rounds away from zero.
    static void store_bf16_toward(uint16_t* p, F v, F target) {
        const F is_away = _mm256_xor_ps(less(v, target), less(v, zero()));
        store_upper(p, v, add(as_int(v), shift_right<16>(as_int(is_away))));
    }
    static void store_fp16_toward(uint16_t* p, F v, F target) {
        const __m128i below = _mm256_cvtps_ph(v, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
        const __m128i above = _mm256_cvtps_ph(v, _MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC);
        const I is_below = as_int(less(v, target));
        const __m128i takes_above = _mm_packs_epi32(_mm256_castsi256_si128(is_below),
                                                    _mm256_extracti128_si256(is_below, 1));
        store128(p, _mm_blendv_epi8(below, above, takes_above));
    }

    static F set(float x) { return _mm256_set1_ps(x); }
    static I set(int32_t x) { return _mm256_set1_epi32(x); }
    static F zero() { return _mm256_setzero_ps(); }

    static I as_int(F v) { return _mm256_castps_si256(v); }
    static F as_float(I v) { return _mm256_castsi256_ps(v); }
    static I round_even(F v) { return _mm256_cvtps_epi32(v); }
    static I round_down(F v) { return _mm256_cvtps_epi32(_mm256_floor_ps(v)); }
    static F to_float(I v) { return _mm256_cvtepi32_ps(v); }
    // Round to the nearest bf16 and fp16; a NaN stays a NaN.
    static F round_bf16(F v) {
        const I upper = and_(nearest_bf16(as_int(v)), set(kBf16Mask));
        return _mm256_or_ps(as_float(upper), _mm256_cmp_ps(v, v, _CMP_UNORD_Q));
    }
    static F round_fp16(F v) { return _mm256_cvtph_ps(to_half(v)); }
    static I to_half_bits(F v) { return _mm256_cvtepu16_epi32(to_half(v)); }

    static F add(F a, F b) { return _mm256_add_ps(a, b); }
    static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
    static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
    static F div(F a, F b) { return _mm256_div_ps(a, b); }
    static F sqrt(F a) { return _mm256_sqrt_ps(a); }
    static F min(F a, F b) { return _mm256_min_ps(a, b); }
    static F max(F a, F b) { return _mm256_max_ps(a, b); }

    static I add(I a, I b) { return _mm256_add_epi32(a, b); }
    static I sub(I a, I b) { return _mm256_sub_epi32(a, b); }
    static I and_(I a, I b) { return _mm256_and_si256(a, b); }
    static I xor_(I a, I b) { return _mm256_xor_si256(a, b); }
    static I or_(I a, I b) { return _mm256_or_si256(a, b); }
    static I min(I a, I b) { return _mm256_min_epi32(a, b); }
    static I max(I a, I b) { return _mm256_max_epi32(a, b); }
    template <int kBits>
    static I shift_left(I a) {
        return _mm256_slli_epi32(a, kBits);
    }
    template <int kBits>
    static I shift_right(I a) {
        return _mm256_srli_epi32(a, kBits);
    }
    template <int kBits>
    static I shift_right_signed(I a) {
        return _mm256_srai_epi32(a, kBits);
    }
    static M less(I a, I b) { return _mm256_cmpgt_epi32(b, a); }
    static I select(M m, I yes, I no) { return _mm256_blendv_epi8(no, yes, m); }
    // The bits of `yes` where `mask` has ones, of `no` elsewhere.
    static I pick_bits(I mask, I yes, I no) {
        return or_(and_(mask, yes), _mm256_andnot_si256(mask, no));
    }
    static F zero_where(M m, F v) { return _mm256_andnot_ps(as_float(m), v); }
    static int count(M m) { return __builtin_popcount(_mm256_movemask_ps(as_float(m))); }
    static uint32_t largest(I v) {
        __m128i m = _mm_max_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
        m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4E));
        m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0xB1));
        return static_cast<uint32_t>(_mm_cvtsi128_si32(m));
    }

    // fp64 arithmetic: low() and high() widen the lower and the upper four lanes.
    static D low(F v) { return _mm256_cvtps_pd(_mm256_castps256_ps128(v)); }
    static D high(F v) { return _mm256_cvtps_pd(_mm256_extractf128_ps(v, 1)); }
    static D add(D a, D b) { return _mm256_add_pd(a, b); }
    static D mul(D a, D b) { return _mm256_mul_pd(a, b); }
    static D load(const double* p) { return _mm256_loadu_pd(p); }
    static void store(double* p, D v) { _mm256_storeu_pd(p, v); }

    // Philox (wire/philox.h) on four counters in 64-bit lanes. Their order is chosen so that
    // store_philox() writes the outputs in the order of the counters.
    static constexpr int kPhiloxLanes = 4;
    static I philox_counters(uint64_t first) {
        return _mm256_add_epi64(set64(first), _mm256_setr_epi64x(0, 2, 1, 3));
    }
    static I high_half(I v) { return _mm256_srli_epi64(v, 32); }
    static I multiply_low(I a, I b) { return _mm256_mul_epu32(a, b); }
    static I set64(uint64_t x) { return _mm256_set1_epi64x(static_cast<long long>(x)); }
    // Loads four words of 64 bits.
    static I load_words(const uint8_t* p) {
        return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    }
    static I lane_numbers() { return _mm256_setr_epi64x(0, 1, 2, 3); }
    // 1 << n in lanes of 64 bits; 0 if n, taken as unsigned, is above 63.
    static I bit64(I n) { return _mm256_sllv_epi64(set64(1), n); }
    static I add64(I a, I b) { return _mm256_add_epi64(a, b); }
    static I multiply64(I a, I b) {
        const I cross = add64(multiply_low(a, high_half(b)), multiply_low(high_half(a), b));
        return add64(multiply_low(a, b), _mm256_slli_epi64(cross, 32));
    }
    template <int kBits>
    static I shift_right64(I a) {
        return _mm256_srli_epi64(a, kBits);
    }
    static uint64_t sum64(I v) {
        alignas(32) uint64_t lanes[4];
        _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), v);
        return lanes[0] + lanes[1] + lanes[2] + lanes[3];
    }
    static I xor3(I a, I b, I c) { return _mm256_xor_si256(_mm256_xor_si256(a, b), c); }
    // Stores the 16 output bytes of each counter.
    static void store_philox(uint8_t* p, I w0, I w1, I w2, I w3) {
        const I a = _mm256_blend_epi32(w0, _mm256_slli_epi64(w1, 32), 0xAA);
        const I b = _mm256_blend_epi32(w2, _mm256_slli_epi64(w3, 32), 0xAA);
        I* out = reinterpret_cast<I*>(p);
        _mm256_storeu_si256(out, _mm256_unpacklo_epi64(a, b));
        _mm256_storeu_si256(out + 1, _mm256_unpackhi_epi64(a, b));
    }
    // Makes the 16 random bits of eight elements from their bytes: an element's own byte above its
    // neighbour's, above 8 zero bits.
    static I load_random(const uint8_t* p) {
        const I order =
            _mm256_setr_epi32(static_cast<int>(0x80000180), static_cast<int>(0x80010080),
                              static_cast<int>(0x80020380), static_cast<int>(0x80030280),
                              static_cast<int>(0x80040580), static_cast<int>(0x80050480),
                              static_cast<int>(0x80060780), static_cast<int>(0x80070680));
        return _mm256_shuffle_epi8(_mm256_broadcastq_epi64(load64(p)), order);
    }

    // For the rotated formats (simd/rotation.h). Lane i of across(v) is lane i ^ kStride of v.
    template <int kStride>
    static I across(I v) {
        if constexpr (kStride == 1) return _mm256_shuffle_epi32(v, 0xB1);
        if constexpr (kStride == 2) return _mm256_shuffle_epi32(v, 0x4E);
        return _mm256_permute2x128_si256(v, v, 0x01);
    }
    // One stage of a transform in lanes of 16 bits. Lane i becomes v[i] + v[i ^ kStride] if i &
    // kStride is 0, else v[i ^ kStride] - v[i]. For lanes of 32 bits see transform_lanes().
    template <int kStride>
    static I butterfly16(I v) {
        const I sign =
            kStride == 1   ? _mm256_set1_epi32(static_cast<int>(0xFFFF0001))
            : kStride == 2 ? _mm256_set1_epi64x(static_cast<long long>(0xFFFFFFFF00010001))
            : kStride == 4 ? _mm256_set_epi64x(-1, 0x0001000100010001, -1, 0x0001000100010001)
                           : _mm256_set_epi64x(-1, -1, 0x0001000100010001, 0x0001000100010001);
        I other;
        if constexpr (kStride == 1) {
            other = or_(_mm256_slli_epi32(v, 16), _mm256_srli_epi32(v, 16));
        } else {
            other = across<kStride / 2>(v);
        }
        return _mm256_add_epi16(other, _mm256_sign_epi16(v, sign));
    }
    static I add16(I a, I b) { return _mm256_add_epi16(a, b); }
    static I sub16(I a, I b) { return _mm256_sub_epi16(a, b); }
    static I negate16_where(const uint8_t* bits, I v) {
        const I mask = load_mask16(bits);
        return _mm256_sub_epi16(xor_(v, mask), mask);
    }
    // Lane i of 16 bits becomes `yes` if bit i is set, else `no`.
    static I pick16(const uint8_t* bits, short yes, short no) {
        return _mm256_blendv_epi8(_mm256_set1_epi16(no), _mm256_set1_epi16(yes), load_mask16(bits));
    }
    static I widen16(const int16_t* p) {
        return _mm256_cvtepi16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    }
    static I abs(I v) { return _mm256_abs_epi32(v); }
    // Bit i of the byte belongs to lane i.
    static M load_mask(const uint8_t* bits) {
        const I bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
        return _mm256_cmpeq_epi32(and_(set(static_cast<int32_t>(*bits)), bit), bit);
    }
    static void store_mask(uint8_t* bits, M mask) {
        *bits = static_cast<uint8_t>(_mm256_movemask_ps(as_float(mask)));
    }
    // The stages of a transform inside vectors. They work on four vectors of consecutive elements
    // at once: vectors first exchange lanes, so that the numbers to be added and subtracted are in
    // the same lanes of two vectors, and no signs need changing. load_halves() exchanges bits 2 and
    // 4 of the elements' indices while it loads; the stage of bit 4 must have been computed before.
    // transform_lanes() computes the stages of bits 0 and 1. After it, bits 0, 1, 2 of a lane's
    // index are bits 1, 3, 4 of the coefficient's index, and bits 0, 1 of the vector's index are
    // its bits 0, 2.
    static constexpr int kLaneVectors = 4;
    static constexpr int kExchanged = 2;  // the distance of vectors that exchange halves
    static void load_halves(const I* from, I* v) {
        const auto broadcast = [](const I* p, int half) __attribute__((always_inline)) {
            return _mm256_broadcastsi128_si256(reinterpret_cast<const __m128i*>(p)[half]);
        };
        for (int i = 0; i < 2; ++i) {
            v[i] = _mm256_blend_epi32(from[i], broadcast(from + i + 2, 0), 0xF0);
            v[i + 2] = _mm256_blend_epi32(broadcast(from + i, 1), from[i + 2], 0xF0);
        }
    }
    static void transform_lanes(I* v) {
        for (int stage = 0; stage < 2; ++stage) {
            for (int i = 0; i < 4; i += 2) {
                const I low = _mm256_unpacklo_epi32(v[i], v[i + 1]);
                const I high = _mm256_unpackhi_epi32(v[i], v[i + 1]);
                v[i] = add(low, high);
                v[i + 1] = sub(low, high);
            }
        }
    }
    // Stores the sign bits of four vectors after transform_lanes(), in the order of the
    // coefficients.
    static void store_signs(uint8_t* bits, const I* v) {
        const I bytes =
            _mm256_packs_epi16(_mm256_packs_epi32(v[0], v[1]), _mm256_packs_epi32(v[2], v[3]));
        const I order = _mm256_setr_epi8(0, 4, 1, 5, 8, 12, 9, 13, 2, 6, 3, 7, 10, 14, 11, 15, 0, 4,
                                         1, 5, 8, 12, 9, 13, 2, 6, 3, 7, 10, 14, 11, 15);
        const int mask = _mm256_movemask_epi8(_mm256_shuffle_epi8(bytes, order));
        __builtin_memcpy(bits, &mask, sizeof(mask));
    }
    // Stores a bit for each element v of four vectors, which is set if v > border, and adds the
    // border - v of the elements with a set bit to `sum`.
    static void store_larger(uint8_t* bits, I border, const I* v, I& sum) {
        I lacking[4];
        for (int i = 0; i < 4; ++i) {
            lacking[i] = sub(border, v[i]);
            sum = add(sum, min(lacking[i], _mm256_setzero_si256()));
        }
        store_signs(bits, lacking);
    }
    // The sum of all elements above the border, from the sum that store_larger() has made.
    static uint32_t sum_of_larger(I sum, int32_t border, int num_larger) {
        return static_cast<uint32_t>(num_larger * border) - Vec::sum(sum);
    }
    static M is_negative(I v) { return _mm256_srai_epi32(v, 31); }
    static I negate_where(M m, I v) { return sub(xor_(v, m), m); }
    static I add_where(M m, I a, I b) { return add(a, and_(m, b)); }
    // Adds the squares of all lanes to 64-bit sums, an even and an odd lane to each.
    static I add_squares(I sum, I v) {
        const I odd = _mm256_srli_epi64(v, 32);
        return _mm256_add_epi64(_mm256_add_epi64(sum, _mm256_mul_epi32(v, v)),
                                _mm256_mul_epi32(odd, odd));
    }
    static float sum(F v) {
        __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
        s = _mm_add_ps(s, _mm_movehl_ps(s, s));
        return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
    }
    // A vector with x in the first lane and 0 in the others.
    static I set_first(int32_t x) { return _mm256_zextsi128_si256(_mm_cvtsi32_si128(x)); }
    static uint32_t sum(I v) {
        __m128i s = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
        s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4E));
        s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0xB1));
        return static_cast<uint32_t>(_mm_cvtsi128_si32(s));
    }

  private:
    // Packs the lanes of four vectors to eight bits: lanes 0 to 3 of each vector, then lanes 4
    // to 7.
    static I pack_signed(const I* v) {
        return _mm256_packs_epi16(_mm256_packs_epi32(v[0], v[1]), _mm256_packs_epi32(v[2], v[3]));
    }
    static F less(F a, F b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
    static constexpr int32_t kBf16Mask = static_cast<int32_t>(0xFFFF0000);
    // The nearest bf16 in the upper half of each lane; the lower half has no meaning.
    static I nearest_bf16(I bits) {
        return add(add(bits, set(0x7FFF)), and_(shift_right<16>(bits), set(1)));
    }
    // Stores the upper halves of the lanes as bf16, and 0x7FC0 where v is a NaN.
    static void store_upper(uint16_t* p, F v, I upper) {
        const M is_nan = as_int(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
        store_u16(p, select(is_nan, set(0x7FC0), shift_right<16>(upper)));
    }
    static void store128(uint16_t* p, __m128i v) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p), v);
    }
    static I load_mask16(const uint8_t* bits) {
        uint16_t word;
        __builtin_memcpy(&word, bits, sizeof(word));
        const I bit = _mm256_setr_epi16(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096,
                                        8192, 16384, static_cast<short>(0x8000));
        return _mm256_cmpeq_epi16(and_(_mm256_set1_epi16(static_cast<short>(word)), bit), bit);
    }
    static __m128i to_half(F v) {
        return _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    }
    static __m128i load64(const uint8_t* p) {
        return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
    }
    static __m128i load128(const uint16_t* p) {
        return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    }
};

}  // namespace
}  // namespace diloco::codec
