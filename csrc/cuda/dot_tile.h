// reduce by integer dot products, if all weights equal the same power of two c. The mean of an
// element is the sum over terms t of c s_t q_t, with scale s_t and integer code q_t. A scale is
// m_t 2^e_t with m_t of 8 bits. With F_t = m_t 2^(e_t - least e), the mean is the integer
// N = sum F_t q_t times a power of two. If the exponents e_t of a block's scales are close enough
// to each other, |N| < 2^24. Then all sums and products of the defined order (each product rounded,
// then added in order) are exact in fp32, so that computing N gives the same bytes.
#pragma once

#include <cmath>

#include "cuda/quad_codes.h"
#include "cuda/tiles.h"

namespace diloco::cuda {

template <Format kFormat>
constexpr bool kHasDots = is_integer(kFormat);
// The number of tiles for which a lane reads 16 bytes of each term.
template <Format kFormat>
constexpr int kDotTiles = 16 * kLanes * 8 / wire::code_bits(kFormat) / kReduceTile;

// The largest difference between the exponents of a block's scales, for which
// num_terms * (255 << spread) * 127 < 2^24.
DILOCO_HD constexpr uint32_t dot_spread(int num_terms) {
    return num_terms <= 4 ? 7 : num_terms <= 8 ? 6 : 5;
}
constexpr bool is_below_2_24(int num_terms) {
    return num_terms * (255 << dot_spread(num_terms)) * 127 < 1 << 24;
}
static_assert(is_below_2_24(4) && is_below_2_24(8) && is_below_2_24(kMostDotTerms));
constexpr uint32_t kLargestDotExponent = 240;  // keeps the sum of 16 terms below 2^126

// A word of four bytes, each chosen by a nibble of `selector`: 0 to 3 are the bytes of a, 4 to 7
// the bytes of b.
DILOCO_HD uint32_t pick_bytes(uint32_t a, uint32_t b, uint32_t selector) {
#if defined(__CUDA_ARCH__)
    return __byte_perm(a, b, selector);
#else
    const uint64_t both = static_cast<uint64_t>(b) << 32 | a;
    uint32_t bytes = 0;
    for (int i = 0; i < 4; ++i) {
        bytes |= static_cast<uint32_t>(both >> 8 * (selector >> 4 * i & 7) & 0xFF) << 8 * i;
    }
    return bytes;
#endif
}

// sum + f0 * c0 + f1 * c1, where f0 and f1 are the low and high halves of `factors`, and c0 and c1
// are bytes 2 kPair and 2 kPair + 1 of `codes`.
template <int kPair, bool kIsSigned>
DILOCO_HD int32_t dot(uint32_t factors, uint32_t codes, int32_t sum) {
#if defined(__CUDA_ARCH__)
    if constexpr (kIsSigned) {
        if constexpr (kPair == 0) return __dp2a_lo(int(factors), int(codes), sum);
        return __dp2a_hi(int(factors), int(codes), sum);
    } else {
        if constexpr (kPair == 0) return int(__dp2a_lo(factors, codes, uint32_t(sum)));
        return int(__dp2a_hi(factors, codes, uint32_t(sum)));
    }
#else
    for (int i = 0; i < 2; ++i) {
        const uint32_t byte = codes >> 8 * (2 * kPair + i) & 0xFF;
        const auto code = kIsSigned ? static_cast<int8_t>(byte) : static_cast<int32_t>(byte);
        sum += static_cast<int32_t>(factors >> 16 * i & 0xFFFF) * code;
    }
    return sum;
#endif
}

// The codes and scales of kDotTerms terms for kElements consecutive elements, which a lane holds.
template <Format kFormat, int kElements>
struct DotCodes {
    static constexpr int kWords = kElements * wire::code_bits(kFormat) / 32;
    static constexpr int kLanesOfBlock = kUsualBlock / kElements;
    uint32_t w[kDotTerms][kWords];
    uint32_t scale[kDotTerms];

    DILOCO_DEVICE void load(const Terms& terms, int t, const Tile& tile, int lane) {
        DILOCO_UNROLL
        for (int k = 0; k < kDotTerms; ++k) {
            const auto payload = reinterpret_cast<uint64_t>(term_at(terms, t + k).payload);
            const uint64_t own = payload + static_cast<uint64_t>(tile.codes) +
                                 static_cast<uint32_t>(4 * kWords * lane);
            if constexpr (kWords == 4) {
                const uint4 words = load_global<uint4>(own);
                w[k][0] = words.x, w[k][1] = words.y, w[k][2] = words.z, w[k][3] = words.w;
            } else {
                const uint2 words = load_global<uint2>(own);
                w[k][0] = words.x, w[k][1] = words.y;
            }
            scale[k] = load_scale_of(payload, tile, lane);
        }
    }

    DILOCO_DEVICE static uint32_t load_scale_of(uint64_t payload, const Tile& tile, int lane) {
        return load_global<uint16_t>(payload + static_cast<uint64_t>(tile.scales) +
                                     static_cast<uint32_t>(2 * (lane / kLanesOfBlock)));
    }
};

struct DotRange {
    uint32_t least, most;  // exponents of scales; for a negative scale a number above 255

    DILOCO_DEVICE void add(uint32_t scale) {
        const uint32_t exponent = scale >> 7;
        least = exponent < least ? exponent : least;
        most = exponent > most ? exponent : most;
    }
};

// The sums N of a lane's elements, in the order of the codes' bytes. For int4, the elements in the
// low nibbles of a word come before the elements in its high nibbles.
template <Format kFormat, int kElements>
struct DotSums {
    static constexpr bool kIsInt4 = kFormat == Format::kInt4;
    // For int4 |N| < 2^22, so a sum can be kept as the bits of the fp32 number 1.5 * 2^23 + N.
    static constexpr int32_t kZero = kIsInt4 ? 0x4B400000 : 0;
    int32_t n[kElements];

    DILOCO_DEVICE void add(const DotCodes<kFormat, kElements>& codes, uint32_t least) {
        uint32_t f[kDotTerms];
        int32_t bias = 0;
        DILOCO_UNROLL
        for (int k = 0; k < kDotTerms; ++k) {
            f[k] = ((codes.scale[k] & 0x7F) | 0x80) << ((codes.scale[k] >> 7) - least);
            bias -= 8 * static_cast<int32_t>(f[k]);
        }
        const uint32_t f01 = f[0] | f[1] << 16, f23 = f[2] | f[3] << 16;
        constexpr int kHalves = kIsInt4 ? 2 : 1;
        DILOCO_UNROLL
        for (int at = 0; at < kElements; at += 2) {
            const int word = at / (4 * kHalves), half = at % (4 * kHalves) / 4;
            const int pair = at % 4 / 2;
            uint32_t a[kDotTerms];
            DILOCO_UNROLL
            for (int k = 0; k < kDotTerms; ++k) {
                a[k] = codes.w[k][word];
                if constexpr (kIsInt4) a[k] = (a[k] >> 4 * half ^ 0x88888888u) & 0x0F0F0F0Fu;
            }
            const uint32_t selector = pair == 0 ? 0x5140 : 0x7362;
            const uint32_t b01 = pick_bytes(a[0], a[1], selector);
            const uint32_t b23 = pick_bytes(a[2], a[3], selector);
            int32_t& first = n[at];
            int32_t& second = n[at + 1];
            if constexpr (kIsInt4) {  // int4 codes are multiplied as code + 8; the bias corrects it
                first += bias;
                second += bias;
            }
            first = dot<0, !kIsInt4>(f23, b23, dot<0, !kIsInt4>(f01, b01, first));
            second = dot<1, !kIsInt4>(f23, b23, dot<1, !kIsInt4>(f01, b01, second));
        }
    }

    // The sum N of element `at`, as fp32.
    DILOCO_DEVICE float value(int at) const {
        if constexpr (!kIsInt4) return static_cast<float>(n[at]);
        return wire::sub(wire::bits_float(static_cast<uint32_t>(n[at])), kRoundingMagic);
    }
};

// Encodes the weighted sum of the runs in kTiles consecutive tiles, and returns true. Writes
// nothing and returns false if the exponents of some block's scales are too far apart. With kTiles
// > 1 there are registers for kDotTerms terms only.
template <Format kFormat, int kTiles, class Lanes>
DILOCO_DEVICE bool reduce_dots(const Lanes& lanes, const ReduceArgs& args, const Tile& tile) {
    constexpr int kElements = kTiles * kReduceTile / kLanes;
    using Codes = DotCodes<kFormat, kElements>;
    using Sums = DotSums<kFormat, kElements>;
    constexpr int kDotLanes = Codes::kLanesOfBlock;
    const Terms& terms = args.terms;
    typename Lanes::template Of<Codes> codes;
    typename Lanes::template Of<DotRange> range;
    typename Lanes::template Of<Sums> sums;
    struct Values {
        float v[kElements];
    };
    typename Lanes::template Of<Values> x;
    typename Lanes::template Of<uint32_t> most;
    lanes.each([&](int lane) {
        codes[lane].load(terms, 0, tile, lane);
        range[lane] = {~0u, 0};
        for (int t = kDotTerms; kTiles == 1 && t < terms.count; ++t) {
            const auto payload = reinterpret_cast<uint64_t>(term_at(terms, t).payload);
            range[lane].add(Codes::load_scale_of(payload, tile, lane));
        }
        for (const uint32_t scale : codes[lane].scale) range[lane].add(scale);
    });
    const uint32_t spread = dot_spread(terms.count);
    const int inexact = lanes.num_where([&](int lane) {
        const DotRange& own = range[lane];
        return own.least == 0 || own.most > kLargestDotExponent || own.most - own.least > spread;
    });
    if (inexact != 0) return false;
    lanes.each([&](int lane) {
        DILOCO_UNROLL
        for (int32_t& n : sums[lane].n) n = Sums::kZero;
        sums[lane].add(codes[lane], range[lane].least);
        DILOCO_NO_UNROLL
        for (int t = kDotTerms; kTiles == 1 && t < terms.count; t += kDotTerms) {
            codes[lane].load(terms, t, tile, lane);
            sums[lane].add(codes[lane], range[lane].least);
        }
        float largest = 0.0f;
        DILOCO_UNROLL
        for (int at = 0; at < kElements; ++at) {
            x[lane].v[at] = sums[lane].value(at);
            largest = fmaxf(largest, fabsf(x[lane].v[at]));
        }
        most[lane] = wire::float_bits(largest);
    });
    lanes.max_over(kDotLanes, [&](int lane) -> uint32_t& { return most[lane]; });
    lanes.each([&](int lane) {
        // The exponent of the unit in which the sums are integers.
        const int32_t exponent =
            static_cast<int32_t>(range[lane].least) - 127 - 7 + terms.dot_exponent;
        const int32_t bits = static_cast<int32_t>(most[lane]) + exponent * (1 << 23);
        const uint32_t scale =
            scale_of_bits<kFormat>(most[lane] == 0 || bits < 0 ? 0 : static_cast<uint32_t>(bits));
        // `factor` is a normal number unless all sums are zero, because the sums are at most qmax
        // times the scale.
        const float inverse = inverse_of(wire::scale_value(static_cast<uint16_t>(scale)));
        const float factor = most[lane] == 0
                                 ? 0.0f
                                 : wire::bits_float(wire::float_bits(inverse) +
                                                    static_cast<uint32_t>(exponent * (1 << 23)));
        uint32_t each[kElements];
        DILOCO_UNROLL
        for (int at = 0; at < kElements; ++at) {
            const float y = wire::mul(x[lane].v[at], factor);
            each[at] = wire::float_bits(wire::add(y, kRoundingMagic));
        }
        constexpr int kWords = Codes::kWords;
        uint32_t w[kWords];
        DILOCO_UNROLL
        for (int i = 0; i < kWords; ++i) {
            if constexpr (kFormat == Format::kInt8) {
                w[i] = low_bytes({each[4 * i], each[4 * i + 1], each[4 * i + 2], each[4 * i + 3]});
            } else {
                const uint32_t* e = each + 8 * i;
                w[i] = (low_bytes({e[0], e[1], e[2], e[3]}) & 0x0F0F0F0Fu) |
                       (low_bytes({e[4], e[5], e[6], e[7]}) << 4 & 0xF0F0F0F0u);
            }
        }
        const auto payload = reinterpret_cast<uint64_t>(args.target.payload);
        const uint64_t own =
            payload + static_cast<uint64_t>(tile.codes) + static_cast<uint32_t>(4 * kWords * lane);
        if constexpr (kWords == 4) {
            store_global(own, uint4{w[0], w[1], w[2], w[3]});
        } else {
            store_global(own, uint2{w[0], w[1]});
        }
        if (lane % kDotLanes == 0) {
            store_global(payload + static_cast<uint64_t>(tile.scales) +
                             static_cast<uint32_t>(2 * (lane / kDotLanes)),
                         static_cast<uint16_t>(scale));
        }
    });
    return true;
}

}  // namespace diloco::cuda
