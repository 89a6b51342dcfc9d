// Encoding over a Vec (vec_avx2.h or vec_avx512.h, included before). A block's input is read once,
// into the first-level cache, while its largest magnitude is found; then it is scaled, rounded and
// packed from there.
#pragma once

#include "codec/simd_decode.h"
#include "wire/stochastic.h"

namespace diloco::codec {
namespace {

// x of one block, with the largest magnitude's bits.
using LoadBlock = uint32_t (*)(const EncodeSpan& span, int64_t block, float* x);

inline Vec::I magnitude_of(Vec::F v) {
    return Vec::and_(Vec::as_int(v), Vec::set(static_cast<int32_t>(wire::kMagnitudeMask)));
}

template <DType kParams, bool kHasOuter, bool kHasResidual>
uint32_t load_difference(const EncodeSpan& span, int64_t block, float* x) {
    const int64_t begin = block * span.block_size;
    Vec::I largest = Vec::set(0);
    for (int j = 0; j < span.block_size; j += Vec::kWidth) {
        Vec::F v = load_as(kParams, span.params, begin + j);
        if constexpr (kHasOuter) v = Vec::sub(Vec::load(span.outer + begin + j), v);
        if constexpr (kHasResidual) {
            v = Vec::add(v, load_as(span.residual_dtype, span.residual, begin + j));
        }
        largest = Vec::max(largest, magnitude_of(v));
        Vec::store(x + j, v);
    }
    return Vec::largest(largest);
}

template <Format kFormat>
uint32_t load_sum(const EncodeSpan& span, int64_t block, float* x) {
    decode_block<kFormat>(span.terms, span.num_terms, block, span.block_size, x);
    const int64_t begin = block * span.block_size;
    Vec::I largest = Vec::set(0);
    for (int j = 0; j < span.block_size; j += Vec::kWidth) {
        Vec::F v = Vec::load(x + j);
        if (span.residual != nullptr) {
            v = Vec::add(v, load_as(span.residual_dtype, span.residual, begin + j));
            Vec::store(x + j, v);
        }
        largest = Vec::max(largest, magnitude_of(v));
    }
    return Vec::largest(largest);
}

template <DType kParams>
LoadBlock difference_loader(const EncodeSpan& span) {
    if (span.outer != nullptr) {
        return span.residual != nullptr ? load_difference<kParams, true, true>
                                        : load_difference<kParams, true, false>;
    }
    return span.residual != nullptr ? load_difference<kParams, false, true>
                                    : load_difference<kParams, false, false>;
}

template <Format kFormat>
LoadBlock loader_of(const EncodeSpan& span) {
    if (span.num_terms > 0) return load_sum<kFormat>;
    return span.param_dtype == DType::kFp32   ? difference_loader<DType::kFp32>(span)
           : span.param_dtype == DType::kBf16 ? difference_loader<DType::kBf16>(span)
                                              : difference_loader<DType::kFp16>(span);
}

// The 16 random bits of `size` elements (wire/philox.h); more may be written, up to a multiple
// of 64.
inline void fill_random(uint64_t element, uint64_t key, int size, uint16_t* random) {
    const Vec::I m0 = Vec::set64(wire::kPhiloxM0), m1 = Vec::set64(wire::kPhiloxM1);
    for (int j = 0; j < size; j += Vec::kPhiloxLanes * wire::kElementsPerPhilox) {
        const Vec::I counter =
            Vec::philox_counters((element + static_cast<uint64_t>(j)) / wire::kElementsPerPhilox);
        Vec::I c0 = counter, c1 = Vec::high_half(counter), c2 = Vec::set(0), c3 = Vec::set(0);
        uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
        // Only the lower half of each 64-bit lane counts; what is above it is never looked at.
        for (int round = 0; round < wire::kPhiloxRounds; ++round) {
            const Vec::I p0 = Vec::multiply_low(c0, m0), p1 = Vec::multiply_low(c2, m1);
            c0 = Vec::xor3(Vec::high_half(p1), c1, Vec::set64(k0));
            c1 = p1;
            c2 = Vec::xor3(Vec::high_half(p0), c3, Vec::set64(k1));
            c3 = p0;
            k0 += wire::kPhiloxW0;
            k1 += wire::kPhiloxW1;
        }
        Vec::store_philox(random + j, c0, c1, c2, c3);
    }
}

// u = (2 r + 1) * 2^-17
inline Vec::F uniform_of(Vec::I r) {
    const Vec::I odd = Vec::or_(Vec::shift_left<1>(r), Vec::set(1));
    return Vec::mul(Vec::to_float(odd), Vec::set(0x1p-17f));
}

template <int kShift>
inline Vec::F grid_uniform_of(Vec::I r) {
    if constexpr (kShift > 16) {
        return uniform_of(r);
    } else {
        const Vec::I odd =
            Vec::or_(Vec::shift_left<1>(Vec::shift_right<16 - kShift>(r)), Vec::set(1));
        return Vec::mul(Vec::to_float(odd),
                        Vec::set(wire::bits_float(static_cast<uint32_t>(126 - kShift) << 23)));
    }
}

template <int kShift>
inline Vec::I dropped_bits(Vec::I r) {
    if constexpr (kShift > 16) {
        return Vec::or_(Vec::shift_left<kShift - 16>(r), Vec::set(1 << (kShift - 17)));
    } else {
        return Vec::shift_right<16 - kShift>(r);
    }
}

// The magnitude of a minifloat's code (wire/codes.h, wire/stochastic.h), not clamped.
template <Format kFormat, bool kIsStochastic>
inline Vec::I minifloat_magnitude(Vec::I magnitude, Vec::I r) {
    using L = wire::MinifloatLayout<kFormat>;
    const Vec::F grid =
        Vec::mul(Vec::as_float(magnitude), Vec::set(wire::bits_float(L::kSubnormalScaleBits)));
    Vec::I tiny, added;
    if constexpr (kIsStochastic) {
        tiny = Vec::round_down(Vec::add(grid, grid_uniform_of<L::kShift>(r)));
        added = dropped_bits<L::kShift>(r);
    } else {
        tiny = Vec::round_even(grid);
        const Vec::I lsb = Vec::and_(Vec::shift_right<L::kShift>(magnitude), Vec::set(1));
        added = Vec::add(lsb, Vec::set((1 << (L::kShift - 1)) - 1));
    }
    const Vec::I normal = Vec::sub(Vec::shift_right<L::kShift>(Vec::add(magnitude, added)),
                                   Vec::set(static_cast<int32_t>(L::kRebias)));
    const Vec::M is_tiny =
        Vec::less(magnitude, Vec::set(static_cast<int32_t>(L::kSmallestNormalBits)));
    return Vec::select(is_tiny, tiny, normal);
}

// The sign bit of y moved to the code's; none for a zero of e3m0.
template <Format kFormat>
inline Vec::I minifloat_sign(Vec::I bits, Vec::I magnitude) {
    using L = wire::MinifloatLayout<kFormat>;
    constexpr int kPosition = L::kSign == 0x8000 ? 15 : L::kSign == 0x80 ? 7 : 3;
    const Vec::I sign =
        Vec::and_(Vec::shift_right<31 - kPosition>(bits), Vec::set(static_cast<int32_t>(L::kSign)));
    if constexpr (kFormat != Format::kE3m0) return sign;
    return Vec::select(Vec::less(Vec::set(0), magnitude), sign, Vec::set(0));
}

// Codes of one vector: signed numbers for int8 and int4, code bits for the others; and what they
// stand for.
template <Format kFormat, bool kIsStochastic>
struct Rounding {
    static Vec::I code(Vec::F y, Vec::I r) {
        if constexpr (kFormat == Format::kFp32) {
            return Vec::as_int(y);
        } else if constexpr (kFormat == Format::kInt8 || kFormat == Format::kInt4) {
            constexpr int32_t kLimit = kFormat == Format::kInt8 ? 127 : 7;
            const Vec::I rounded =
                kIsStochastic ? Vec::round_down(Vec::add(y, uniform_of(r))) : Vec::round_even(y);
            return Vec::max(Vec::min(rounded, Vec::set(kLimit)), Vec::set(-kLimit));
        } else if constexpr (kFormat == Format::kBf16) {
            const Vec::I bits = Vec::as_int(y);
            const Vec::I half =
                Vec::add(Vec::and_(Vec::shift_right<16>(bits), Vec::set(1)), Vec::set(0x7FFF));
            return Vec::shift_right<16>(Vec::add(bits, kIsStochastic ? r : half));
        } else if constexpr (kFormat == Format::kFp16 && !kIsStochastic) {
            return Vec::to_half_bits(y);
        } else {
            const Vec::I bits = Vec::as_int(y);
            const Vec::I absolute = magnitude_of(y);
            Vec::I magnitude = minifloat_magnitude<kFormat, kIsStochastic>(absolute, r);
            magnitude =
                Vec::min(magnitude,
                         Vec::set(static_cast<int32_t>(wire::MinifloatLayout<kFormat>::kLargest)));
            return Vec::or_(magnitude, minifloat_sign<kFormat>(bits, magnitude));
        }
    }

    static Vec::F value(Vec::I code) {
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

template <Format kFormat>
inline void store_codes(uint8_t* codes, int64_t i, Vec::I code) {
    constexpr int kBits = wire::code_bits(kFormat);
    if constexpr (kBits == 32) {
        Vec::store(reinterpret_cast<float*>(codes) + i, Vec::as_float(code));
    } else if constexpr (kBits == 16) {
        Vec::store_u16(reinterpret_cast<uint16_t*>(codes) + i, code);
    } else if constexpr (kBits == 8) {
        Vec::store_bytes(codes + i, code);
    } else {
        Vec::store_nibbles(codes + i / 2, Vec::and_(code, Vec::set(0xF)));
    }
}

inline void store_residual(const EncodeSpan& span, int64_t i, Vec::F value) {
    if (span.residual_dtype == DType::kFp32) {
        Vec::store(static_cast<float*>(span.new_residual) + i, value);
    } else {
        Vec::store_bf16(static_cast<uint16_t*>(span.new_residual) + i, value);
    }
}

template <Format kFormat, bool kIsStochastic, bool kHasNewResidual>
inline void quantise_block(const EncodeSpan& span, int64_t block, const float* x, float scale) {
    using Round = Rounding<kFormat, kIsStochastic>;
    const int64_t begin = block * span.block_size;
    alignas(64) uint16_t random[kIsStochastic ? wire::kMaxBlockSize : 1];
    if constexpr (kIsStochastic) {
        fill_random(span.element + static_cast<uint64_t>(begin), span.key, span.block_size, random);
    }
    const Vec::F factor = Vec::set(scale), inverse = Vec::set(1.0f / scale);
    for (int j = 0; j < span.block_size; j += Vec::kWidth) {
        const Vec::F value = Vec::load(x + j);
        const Vec::F y = wire::has_scales(kFormat) ? Vec::mul(value, inverse) : value;
        const Vec::I r = kIsStochastic ? Vec::load_u16(random + j) : Vec::set(0);
        const Vec::I code = Round::code(y, r);
        store_codes<kFormat>(span.codes, begin + j, code);
        if constexpr (kHasNewResidual) {
            Vec::F decoded = Round::value(code);
            if constexpr (wire::has_scales(kFormat)) decoded = Vec::mul(decoded, factor);
            store_residual(span, begin + j, Vec::sub(value, decoded));
        }
    }
}

// A block that holds a bad element: rare, so element by element.
template <Format kFormat, bool kIsStochastic>
[[gnu::noinline, gnu::cold]] int64_t encode_bad_block(const EncodeSpan& span, int64_t block,
                                                      const float* x) {
    const int64_t begin = block * span.block_size;
    int64_t num_bad = 0;
    for (int j = 0; j < span.block_size; ++j) {
        uint32_t code = 0;
        bool is_bad = wire::is_bad(x[j]);
        if constexpr (!wire::has_scales(kFormat)) {
            constexpr int kBytes = wire::code_bits(kFormat) / 8;
            const uint64_t element = span.element + static_cast<uint64_t>(begin + j);
            if (!is_bad) {
                code = kIsStochastic ? wire::encode_stochastic<kFormat>(
                                           x[j], wire::random16(element, span.key))
                                     : wire::encode_nearest<kFormat>(x[j]);
            }
            is_bad = is_bad || wire::is_code_bad<kFormat>(code);
            if (is_bad) code = 0;
            __builtin_memcpy(span.codes + (begin + j) * kBytes, &code, kBytes);
        }
        num_bad += is_bad;
        if (span.new_residual == nullptr) continue;
        const float rest = x[j] - wire::code_value<kFormat>(code);
        if (span.residual_dtype == DType::kFp32) {
            static_cast<float*>(span.new_residual)[begin + j] = rest;
        } else {
            static_cast<uint16_t*>(span.new_residual)[begin + j] = wire::bf16_nearest(rest);
        }
    }
    if constexpr (wire::has_scales(kFormat)) {
        __builtin_memset(span.codes + wire::code_bytes(kFormat, begin), 0,
                         static_cast<size_t>(wire::code_bytes(kFormat, span.block_size)));
    }
    return num_bad;
}

// The largest magnitude with which no element of a block can be bad.
constexpr uint32_t good_limit(Format format) {
    return format == Format::kFp16 ? 0x477FE000u /* 65504 */ : wire::kLargestGoodBits;
}

template <Format kFormat, bool kIsStochastic, bool kHasNewResidual>
int64_t encode_format(const EncodeSpan& span) {
    const LoadBlock load = loader_of<kFormat>(span);
    int64_t num_bad = 0;
    for (int64_t block = 0; block < span.num_blocks; ++block) {
        alignas(64) float x[wire::kMaxBlockSize];
        const uint32_t largest = load(span, block, x);
        const bool is_good = largest <= good_limit(kFormat);
        float scale = 1.0f;
        if constexpr (wire::has_scales(kFormat)) {
            const uint16_t bits =
                is_good ? wire::scale_of(wire::bits_float(largest), wire::qmax(kFormat))
                        : wire::kSmallestScale;
            __builtin_memcpy(span.scales + 2 * block, &bits, sizeof(bits));
            scale = wire::scale_value(bits);
        }
        if (is_good) {
            quantise_block<kFormat, kIsStochastic, kHasNewResidual>(span, block, x, scale);
        } else {
            num_bad += encode_bad_block<kFormat, kIsStochastic>(span, block, x);
        }
    }
    return num_bad;
}

}  // namespace
}  // namespace diloco::codec
