// The rotated formats (wire/rotation.h has the formulas) over the class Vec of vec_avx2.h or
// vec_avx512.h, whichever is included before: the transform, and the decoding of one block.
#pragma once

#include "codec/kernels.h"
#include "wire/rotation.h"

namespace diloco::codec {
namespace {

using wire::Format;

// The number of vectors that a transform holds in registers: half of all vector registers.
constexpr int kHeldVectors = Vec::kWidth;

// Encoding transforms in lanes of 32 bits. Decoding does with 16 bits, because decoded values
// before the scale are at most 2560.
struct WideLanes {
    static constexpr int kWidth = Vec::kWidth;
    static Vec::I add(Vec::I a, Vec::I b) { return Vec::add(a, b); }
    static Vec::I sub(Vec::I a, Vec::I b) { return Vec::sub(a, b); }
};
struct NarrowLanes {
    static constexpr int kWidth = 2 * Vec::kWidth;
    static Vec::I add(Vec::I a, Vec::I b) { return Vec::add16(a, b); }
    static Vec::I sub(Vec::I a, Vec::I b) { return Vec::sub16(a, b); }
    template <int kStride>
    static Vec::I butterfly(Vec::I v) {
        return Vec::butterfly16<kStride>(v);
    }
};

// The stages of a transform that combine different vectors: sums and differences of vectors kHalf
// apart, then 2 * kHalf apart, and so on.
template <class Lanes, int kHalf, int kCount>
[[gnu::always_inline]] inline void transform_across(Vec::I (&v)[kCount]) {
#pragma GCC unroll 32
    for (int i = 0; i < kCount; ++i) {
        if ((i & kHalf) != 0) continue;
        const Vec::I low = v[i], high = v[i + kHalf];
        v[i] = Lanes::add(low, high);
        v[i + kHalf] = Lanes::sub(low, high);
    }
    if constexpr (2 * kHalf < kCount) transform_across<Lanes, 2 * kHalf>(v);
}

// The stages of a transform that combine lanes of the same vector, from a distance of kStride on.
template <class Lanes, int kStride, int kCount>
[[gnu::always_inline]] inline void transform_inside(Vec::I (&v)[kCount]) {
#pragma GCC unroll 32
    for (int i = 0; i < kCount; ++i) v[i] = Lanes::template butterfly<kStride>(v[i]);
    if constexpr (2 * kStride < Lanes::kWidth) transform_inside<Lanes, 2 * kStride>(v);
}

// The Hadamard transform of kCount vectors in place: value k becomes the sum over i of
// (-1)^popcount(k & i) value_i.
template <class Lanes, int kCount>
[[gnu::always_inline]] inline void hadamard(Vec::I* values) {
    if constexpr (kCount > kHeldVectors) {
        constexpr int kHalf = kCount / 2;
        for (int i = 0; i < kHalf; ++i) {
            const Vec::I low = values[i], high = values[i + kHalf];
            values[i] = Lanes::add(low, high);
            values[i + kHalf] = Lanes::sub(low, high);
        }
        hadamard<Lanes, kHalf>(values);
        hadamard<Lanes, kHalf>(values + kHalf);
    } else {
        Vec::I v[kCount];
#pragma GCC unroll 32
        for (int i = 0; i < kCount; ++i) v[i] = values[i];
        transform_across<Lanes, 1>(v);
        transform_inside<Lanes, 1>(v);
#pragma GCC unroll 32
        for (int i = 0; i < kCount; ++i) values[i] = v[i];
    }
}

template <Format kFormat>
constexpr int kKeptVectors = wire::Rotation<kFormat>::kKept / Vec::kWidth;

// Decodes a code without the scale: element i of the block is z[i mod kKept], negated if its sign
// bit is set. In formats without folds the signs are applied to z here.
template <Format kFormat>
[[gnu::always_inline]] inline void restore(const uint8_t* code, const uint8_t* signs, int16_t* z) {
    using R = wire::Rotation<kFormat>;
    constexpr int kCount = kKeptVectors<kFormat> / 2, kBytes = NarrowLanes::kWidth / 8;
    const uint8_t* negative = R::kHasLevels ? code + R::kKept / 8 : code;
    Vec::I v[kCount];
#pragma GCC unroll 32
    for (int k = 0; k < kCount; ++k) {
        if constexpr (R::kHasLevels) {
            const Vec::I level =
                Vec::pick16(code + k * kBytes, wire::kLargeLevel, wire::kSmallLevel);
            v[k] = Vec::negate16_where(negative + k * kBytes, level);
        } else {
            v[k] = Vec::pick16(negative + k * kBytes, -1, 1);
        }
    }
    hadamard<NarrowLanes, kCount>(v);
#pragma GCC unroll 32
    for (int k = 0; k < kCount; ++k) {
        if constexpr (R::kFolds == 1) v[k] = Vec::negate16_where(signs + k * kBytes, v[k]);
        __builtin_memcpy(z + k * NarrowLanes::kWidth, &v[k], sizeof(v[k]));
    }
}

// Decodes a block, and calls use(j, x) for each vector x of it, where j is the index of x's first
// element.
template <Format kFormat, class Use>
[[gnu::always_inline]] inline void for_each_decoded(const uint8_t* code, const uint8_t* signs,
                                                    float scale, Use&& use) {
    using R = wire::Rotation<kFormat>;
    if (scale == 0.0f) {
        for (int j = 0; j < R::kBlock; j += Vec::kWidth) use(j, Vec::zero());
        return;
    }
    alignas(64) int16_t z[R::kKept];
    restore<kFormat>(code, signs, z);
    const Vec::F factor = Vec::set(scale);
    for (int begin = 0; begin < R::kBlock; begin += R::kKept) {
        for (int k = 0; k < R::kKept; k += Vec::kWidth) {
            const int j = begin + k;
            Vec::I value = Vec::widen16(z + k);
            if constexpr (R::kFolds > 1) {
                value = Vec::negate_where(Vec::load_mask(signs + j / 8), value);
            }
            use(j, Vec::mul(Vec::to_float(value), factor));
        }
    }
}

// Decodes block number `block` of one term, multiplies by its coefficient, and writes the result to
// `sum` (kIsFirst) or adds it.
template <Format kFormat, bool kIsFirst>
[[gnu::always_inline]] inline void add_rotated(const Term& term, int64_t block, float* sum) {
    uint16_t bits;
    __builtin_memcpy(&bits, term.scales + 2 * block, sizeof(bits));
    const float scale = wire::received_scale(bits, wire::Rotation<kFormat>::kLargest);
    const uint8_t* code = term.codes + block * wire::own_bytes(kFormat);
    const Vec::F coefficient = Vec::set(term.coefficient);
    for_each_decoded<kFormat>(code, term.signs, scale, [&](int j, Vec::F x) {
        const Vec::F product = Vec::mul(coefficient, x);
        Vec::store(sum + j, kIsFirst ? product : Vec::add(Vec::load(sum + j), product));
    });
}

// The weighted sum of block number `block` of all terms, as fp32.
template <Format kFormat>
void decode_rotated_block(const Term* terms, int num_terms, int64_t block, int size, float* sum) {
    add_rotated<kFormat, true>(terms[0], block, sum);
    for (int t = 1; t < num_terms; ++t) add_rotated<kFormat, false>(terms[t], block, sum);
}

}  // namespace
}  // namespace diloco::codec
