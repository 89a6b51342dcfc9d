// Rounding of scaled values to codes, and the random bits for it, over the class Vec of vec_avx2.h
// or vec_avx512.h, whichever is included before. wire/codes.h, wire/philox.h and
// wire/stochastic.h have the formulas.
#pragma once

#include "codec/simd/decode.h"
#include "wire/stochastic.h"

namespace diloco::codec {
namespace {

DILOCO_INLINE Vec::I magnitude_of(Vec::F v) {
    return Vec::and_(Vec::as_int(v), Vec::set(static_cast<int32_t>(wire::kMagnitudeMask)));
}

// The keys of all Philox rounds. They stay in memory, from where vector instructions read them, and
// take no registers.
struct PhiloxKeys {
    uint64_t k0[wire::kPhiloxRounds], k1[wire::kPhiloxRounds];
    explicit PhiloxKeys(uint64_t key) {
        uint32_t low = static_cast<uint32_t>(key), high = static_cast<uint32_t>(key >> 32);
        for (int round = 0; round < wire::kPhiloxRounds; ++round) {
            k0[round] = low;
            k1[round] = high;
            low += wire::kPhiloxW0;
            high += wire::kPhiloxW1;
        }
    }
};

// Writes the random bytes of `size` elements (wire/philox.h), one byte each. More bytes may be
// written, up to a multiple of 128.
DILOCO_INLINE void fill_random(uint64_t element, const PhiloxKeys& keys, int size,
                               uint8_t* random) {
    const Vec::I m0 = Vec::set64(wire::kPhiloxM0), m1 = Vec::set64(wire::kPhiloxM1);
    constexpr int kStep = Vec::kPhiloxLanes * wire::kElementsPerPhilox;
    for (int j = 0; j < size; j += kStep) {
        const uint64_t first = (element + static_cast<uint64_t>(j)) / wire::kElementsPerPhilox;
        // Each word is in the lower half of a 64-bit lane; the upper half may have any bits. The
        // first two rounds are simplified: two words of the counter are 0, and the word `upper` is
        // the same for all lanes, so terms made of these are scalars. (Lanes whose counter passes a
        // multiple of 2^32 lie after the last element, since units are aligned.)
        const uint64_t upper = first >> 32;
        const Vec::I p = Vec::multiply_low(Vec::philox_counters(first), m0);
        const Vec::I x = Vec::xor_(Vec::high_half(p), Vec::set64(keys.k1[0]));
        const uint64_t q = (upper ^ keys.k0[0]) * wire::kPhiloxM0;
        const Vec::I product = Vec::multiply_low(x, m1);
        Vec::I c0 = Vec::xor_(Vec::high_half(product), Vec::set64(keys.k0[1])), c1 = product;
        Vec::I c2 = Vec::xor_(p, Vec::set64((q >> 32) ^ keys.k1[1])), c3 = Vec::set64(q);
        for (int round = 2; round < wire::kPhiloxRounds; ++round) {
            const Vec::I p0 = Vec::multiply_low(c0, m0), p1 = Vec::multiply_low(c2, m1);
            c0 = Vec::xor3(Vec::high_half(p1), c1, Vec::set64(keys.k0[round]));
            c1 = p1;
            c2 = Vec::xor3(Vec::high_half(p0), c3, Vec::set64(keys.k1[round]));
            c3 = p0;
        }
        Vec::store_philox(random + j, c0, c1, c2, c3);
    }
}

// The functions below take r as Vec::load_random() returns it: 16 random bits above 8 zero bits.
// uniform_of() is u = (2 r + 1) * 2^-17, exactly: it makes 1 + u from bits, and subtracts 1.
DILOCO_INLINE Vec::F uniform_of(Vec::I r) {
    const Vec::I bits = Vec::or_(Vec::shift_right<1>(r), Vec::set(0x3F800040));
    return Vec::sub(Vec::as_float(bits), Vec::set(1.0f));
}

template <int kShift>
DILOCO_INLINE Vec::F grid_uniform_of(Vec::I r) {
    if constexpr (kShift > 16) {
        return uniform_of(r);
    } else {
        const Vec::I odd =
            Vec::or_(Vec::shift_left<1>(Vec::shift_right<24 - kShift>(r)), Vec::set(1));
        return Vec::mul(Vec::to_float(odd),
                        Vec::set(wire::bits_float(static_cast<uint32_t>(126 - kShift) << 23)));
    }
}

template <int kShift>
DILOCO_INLINE Vec::I dropped_bits(Vec::I r) {
    if constexpr (kShift > 16) {
        return Vec::or_(Vec::shift_right<24 - kShift>(r), Vec::set(1 << (kShift - 17)));
    } else {
        return Vec::shift_right<24 - kShift>(r);
    }
}

// The magnitude of the nearest code of a scaled minifloat (wire/codes.h), in the low byte of each
// lane; the upper bits have no meaning. |y| is added to a number so large that the last bit of the
// fp32 sum is worth the distance of the format's values around y: so the addition rounds, half to
// even. The low bits of that number are the number of codes below the power of two under y.
template <Format kFormat>
DILOCO_INLINE Vec::I nearest_magnitude(Vec::F y) {
    using L = wire::MinifloatLayout<kFormat>;
    constexpr uint32_t kCodesBelow = (0 - (L::kSmallestNormalBits >> L::kShift)) & 0xFF;
    constexpr uint32_t kMagic = (static_cast<uint32_t>(L::kShift) << 23) + kCodesBelow;
    const Vec::I power = Vec::max(Vec::and_(Vec::as_int(y), Vec::set(0x7F800000)),
                                  Vec::set(static_cast<int32_t>(L::kSmallestNormalBits)));
    const Vec::I large = Vec::add(Vec::add(power, Vec::set(static_cast<int32_t>(kMagic))),
                                  Vec::shift_right<L::kShift>(power));
    return Vec::as_int(Vec::add(Vec::as_float(magnitude_of(y)), Vec::as_float(large)));
}

// The magnitude of a minifloat's code, rounded with 16 random bits (wire/stochastic.h), and not
// clamped to the largest code.
template <Format kFormat>
DILOCO_INLINE Vec::I stochastic_magnitude(Vec::I magnitude, Vec::I r) {
    using L = wire::MinifloatLayout<kFormat>;
    const Vec::F grid =
        Vec::mul(Vec::as_float(magnitude), Vec::set(wire::bits_float(L::kSubnormalScaleBits)));
    const Vec::I tiny = Vec::round_down(Vec::add(grid, grid_uniform_of<L::kShift>(r)));
    const Vec::I sum = Vec::add(magnitude, dropped_bits<L::kShift>(r));
    const Vec::I normal =
        Vec::sub(Vec::shift_right<L::kShift>(sum), Vec::set(static_cast<int32_t>(L::kRebias)));
    const Vec::M is_tiny =
        Vec::less(magnitude, Vec::set(static_cast<int32_t>(L::kSmallestNormalBits)));
    return Vec::select(is_tiny, tiny, normal);
}

// The sign bit of y at the position of the code's sign bit; for fp8 also in all bits above it. For
// e3m0, zero has no sign.
template <Format kFormat>
DILOCO_INLINE Vec::I minifloat_sign(Vec::I bits, Vec::I magnitude) {
    using L = wire::MinifloatLayout<kFormat>;
    constexpr int kPosition = L::kSign == 0x8000 ? 15 : 3;
    if constexpr (L::kSign == 0x80) {
        return Vec::and_(Vec::shift_right_signed<31>(bits), Vec::set(~0x7F));
    }
    const Vec::I sign =
        Vec::and_(Vec::shift_right<31 - kPosition>(bits), Vec::set(static_cast<int32_t>(L::kSign)));
    if constexpr (kFormat != Format::kE3m0) return sign;
    return Vec::select(Vec::less(Vec::set(0), magnitude), sign, Vec::set(0));
}

// code(): the codes of one vector, as signed numbers for codes of at most a byte, and as bits for
// the others. value(): the values of such codes, before the scale.
template <Format kFormat, bool kIsStochastic>
struct Rounding {
    DILOCO_INLINE static Vec::I code(Vec::F y, Vec::I r) {
        if constexpr (kFormat == Format::kFp32) {
            return Vec::as_int(y);
        } else if constexpr (kFormat == Format::kInt8 || kFormat == Format::kInt4) {
            // The scale is rounded up, so |y| <= qmax * (1 + 2^-22): the nearest code never clips.
            if constexpr (!kIsStochastic) return Vec::round_even(y);
            // Shift the code to the top of the lane, so that r, below it, carries into it.
            const Vec::I bits = Vec::as_int(Vec::add(y, Vec::set(wire::kIntegerMagic)));
            const Vec::I raised = Vec::shift_left<24 - wire::kIntegerShift>(bits);
            return Vec::shift_right_signed<24>(Vec::add(raised, r));
        } else if constexpr (kFormat == Format::kBf16) {
            const Vec::I bits = Vec::as_int(y);
            const Vec::I half =
                Vec::add(Vec::and_(Vec::shift_right<16>(bits), Vec::set(1)), Vec::set(0x7FFF));
            return Vec::shift_right<16>(
                Vec::add(bits, kIsStochastic ? Vec::shift_right<8>(r) : half));
        } else if constexpr (kFormat == Format::kFp16 && !kIsStochastic) {
            return Vec::to_half_bits(y);
        } else if constexpr (kFormat == Format::kE3m0 && !kIsStochastic) {
            const Vec::I magnitude = Vec::and_(nearest_magnitude<kFormat>(y), Vec::set(7));
            return Vec::or_(magnitude, minifloat_sign<kFormat>(Vec::as_int(y), magnitude));
        } else if constexpr (!kIsStochastic) {
            // As above, the nearest code never clips.
            const Vec::I sign = Vec::shift_right_signed<31>(Vec::as_int(y));
            return Vec::pick_bits(Vec::set(0x7F), nearest_magnitude<kFormat>(y), sign);
        } else {
            const Vec::I absolute = magnitude_of(y);
            const Vec::I magnitude =
                Vec::min(stochastic_magnitude<kFormat>(absolute, r),
                         Vec::set(static_cast<int32_t>(wire::MinifloatLayout<kFormat>::kLargest)));
            return Vec::or_(magnitude, minifloat_sign<kFormat>(Vec::as_int(y), magnitude));
        }
    }

    DILOCO_INLINE static Vec::F value(Vec::I code) {
        if constexpr (kFormat == Format::kFp32) {
            return Vec::as_float(code);
        } else if constexpr (kFormat == Format::kInt8 || kFormat == Format::kInt4) {
            return Vec::to_float(code);
        } else if constexpr (kFormat == Format::kBf16) {
            return Vec::as_float(Vec::shift_left<16>(code));
        } else {
            using L = wire::MinifloatLayout<kFormat>;
            constexpr int kPosition = L::kSign == 0x8000 ? 15 : L::kSign == 0x80 ? 7 : 3;
            const Vec::I magnitude = Vec::and_(code, Vec::set(static_cast<int32_t>(L::kSign - 1)));
            const Vec::F value = Vec::mul(Vec::as_float(Vec::shift_left<L::kShift>(magnitude)),
                                          Vec::set(wire::bits_float(L::kValueScaleBits)));
            const Vec::I sign = Vec::shift_left<31>(Vec::shift_right<kPosition>(code));
            return Vec::as_float(Vec::or_(Vec::as_int(value), sign));
        }
    }
};

}  // namespace
}  // namespace diloco::codec
