// The rotated formats over a Vec (vec_avx2.h or vec_avx512.h, included before): the transform, and
// the decoding of one block. The formulas are those of wire/rotation.h.
#pragma once

#include "codec/kernels.h"
#include "wire/rotation.h"

namespace diloco::codec {
namespace {

using wire::Format;

// Vectors of a transform that stay in registers: half of those that there are.
constexpr int kHeldVectors = Vec::kWidth;

// One stage of a transform across vectors: sums and differences of those kHalf apart.
template <int kCount, int kHalf>
[[gnu::always_inline]] inline void hadamard_stage(Vec::I (&v)[kCount]) {
#pragma GCC unroll 32
    for (int i = 0; i < kCount; ++i) {
        if ((i & kHalf) != 0) continue;
        const Vec::I low = v[i], high = v[i + kHalf];
        v[i] = Vec::add(low, high);
        v[i + kHalf] = Vec::sub(low, high);
    }
    if constexpr (2 * kHalf < kCount) hadamard_stage<kCount, 2 * kHalf>(v);
}

// The transform of kCount vectors, in place: Y_k = sum (-1)^popcount(k & i) v_i.
template <int kCount>
[[gnu::always_inline]] inline void hadamard(Vec::I* values) {
    if constexpr (kCount > kHeldVectors) {
        constexpr int kHalf = kCount / 2;
        for (int i = 0; i < kHalf; ++i) {
            const Vec::I low = values[i], high = values[i + kHalf];
            values[i] = Vec::add(low, high);
            values[i + kHalf] = Vec::sub(low, high);
        }
        hadamard<kHalf>(values);
        hadamard<kHalf>(values + kHalf);
    } else {
        Vec::I v[kCount];
#pragma GCC unroll 32
        for (int i = 0; i < kCount; ++i) v[i] = values[i];
        hadamard_stage<kCount, 1>(v);
#pragma GCC unroll 32
        for (int i = 0; i < kCount; ++i) {
            v[i] = Vec::butterfly<1>(v[i]);
            v[i] = Vec::butterfly<2>(v[i]);
            v[i] = Vec::butterfly<4>(v[i]);
            if constexpr (Vec::kWidth == 16) v[i] = Vec::butterfly<8>(v[i]);
            values[i] = v[i];
        }
    }
}

template <Format kFormat>
constexpr int kKeptVectors = wire::Rotation<kFormat>::kKept / Vec::kWidth;

// The levels of a code, transformed back: element i of the block is z[i mod kKept], with its sign.
template <Format kFormat>
[[gnu::always_inline]] inline void restore(const uint8_t* code, Vec::I* z) {
    using R = wire::Rotation<kFormat>;
    const uint8_t* negative = R::kHasLevels ? code + R::kKept / 8 : code;
    for (int k = 0; k < kKeptVectors<kFormat>; ++k) {
        const int at = k * Vec::kWidth / 8;
        Vec::I level = Vec::set(1);
        if constexpr (R::kHasLevels) {
            level = Vec::select(Vec::load_mask(code + at), Vec::set(wire::kLargeLevel),
                                Vec::set(wire::kSmallLevel));
        }
        z[k] = Vec::negate_where(Vec::load_mask(negative + at), level);
    }
    hadamard<kKeptVectors<kFormat>>(z);
}

// Calls use(j, x) for each vector of a decoded block, j being its first element.
template <Format kFormat, class Use>
[[gnu::always_inline]] inline void for_each_decoded(const uint8_t* code, const uint8_t* signs,
                                                    float scale, Use&& use) {
    using R = wire::Rotation<kFormat>;
    if (scale == 0.0f) {
        for (int j = 0; j < R::kBlock; j += Vec::kWidth) use(j, Vec::zero());
        return;
    }
    alignas(64) Vec::I z[kKeptVectors<kFormat>];
    restore<kFormat>(code, z);
    const Vec::F factor = Vec::set(scale);
    for (int begin = 0; begin < R::kBlock; begin += R::kKept) {
        for (int k = 0; k < kKeptVectors<kFormat>; ++k) {
            const int j = begin + k * Vec::kWidth;
            const Vec::I value = Vec::negate_where(Vec::load_mask(signs + j / 8), z[k]);
            use(j, Vec::mul(Vec::to_float(value), factor));
        }
    }
}

// The weighted sum of block number `block` of all terms, as fp32.
template <Format kFormat>
void decode_rotated_block(const Term* terms, int num_terms, int64_t block, int size, float* sum) {
    for (int t = 0; t < num_terms; ++t) {
        const Term& term = terms[t];
        uint16_t bits;
        __builtin_memcpy(&bits, term.scales + 2 * block, sizeof(bits));
        const float scale = wire::rotated_scale_value(bits);
        const uint8_t* code = term.codes + block * wire::rotated_bytes(kFormat);
        const Vec::F coefficient = Vec::set(term.coefficient);
        const auto product = [&](Vec::F x) { return Vec::mul(coefficient, x); };
        if (t == 0) {
            for_each_decoded<kFormat>(code, term.signs, scale,
                                      [&](int j, Vec::F x) { Vec::store(sum + j, product(x)); });
        } else {
            for_each_decoded<kFormat>(code, term.signs, scale, [&](int j, Vec::F x) {
                Vec::store(sum + j, Vec::add(Vec::load(sum + j), product(x)));
            });
        }
    }
}

}  // namespace
}  // namespace diloco::codec
