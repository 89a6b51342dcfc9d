// The weighted sum of decoded payloads over a tile.
#pragma once

#include "cuda/quad_codes.h"
#include "cuda/rotated_tile.h"
#include "cuda/tiles.h"

namespace diloco::cuda {

// The number of terms whose codes a lane reads before it uses the first: they take as many
// registers as the sum. A kernel for whole tiles reads one term at a time, and has more warps
// instead.
template <Format kFormat, class T>
constexpr int kTermsAtOnce = T::kIsWhole ? 1 : kQuad / CodeQuad<kFormat>::kWords;

// The codes and scales of a term that a lane has read.
template <Format kFormat, int kQuads, class T>
struct TermCodes {
    static constexpr int kScales = T::kIsWhole ? kTile<kQuads> / kUsualBlock : 1;
    CodeQuad<kFormat> quads[kQuads];
    // bf16 bits of scales. In a whole tile every lane has the scales of all the tile's blocks; else
    // lane l has the scale of the tile's block l.
    uint32_t scale[kScales];
};

// A sum begins with -0: x + -0 is x for every x, -0 and +0 as well.
constexpr float kEmptySum = -0.0f;

// Adds coefficient * (code * scale) to the first `count` elements of the sum; each product and the
// sum is rounded. The other elements become zero.
template <Format kFormat>
DILOCO_DEVICE void add_term(Quad& sum, const CodeQuad<kFormat>& codes, float scale,
                            float coefficient, int count) {
    const Quad values = values_of<kFormat>(codes);
    DILOCO_UNROLL
    for (int i = 0; i < kQuad; ++i) {
        float value = values.v[i];
        if constexpr (wire::has_scales(kFormat)) value = wire::mul(value, scale);
        value = wire::add(sum.v[i], wire::mul(coefficient, value));
        sum.v[i] = i < count ? value : 0.0f;
    }
}

// Whether code * (coefficient * scale) can be exact in fp32, so that a fused multiply-add gives the
// same result as rounding the product first. It is exact if the coefficient is a power of two from
// 2^-7 to 1, as for equal weights of 2, 4, 8... replicas, and the scale is at most 2^118: code and
// scale have at most 8 significant bits each, and no bit below 2^-9 and 2^-133.
template <Format kFormat>
constexpr bool kCanFuse = wire::has_scales(kFormat) && kFormat != Format::kFp8E5m2;
constexpr uint32_t kLargestFusedScale = 0x7A80;  // 2^118 in bf16; negative ones are above

DILOCO_DEVICE bool is_exact_coefficient(float coefficient) {
    const uint32_t bits = wire::float_bits(coefficient);
    return (bits & 0x007FFFFFu) == 0 && bits >= (127u - 7u) << 23 && bits <= 127u << 23;
}

// Adds code * factor to each element of the sum, by a fused multiply-add.
template <Format kFormat>
DILOCO_DEVICE void fuse_term(Quad& sum, const CodeQuad<kFormat>& codes, float factor) {
    const Quad values = values_of<kFormat>(codes);
    DILOCO_UNROLL
    for (int i = 0; i < kQuad; ++i) sum.v[i] = wire::fused(values.v[i], factor, sum.v[i]);
}

// Begins to read the codes and scales of a complete tile of an aligned payload. Scales are not used
// here, so that no read waits for another.
template <Format kFormat, int kQuads, class T>
DILOCO_DEVICE void load_term(const Runs& runs, const Term& term, const T& tile, int lane,
                             TermCodes<kFormat, kQuads, T>& to) {
    constexpr int kBytes = CodeQuad<kFormat>::kBytes;
    const uint8_t* own = term.payload + tile.codes + static_cast<uint32_t>(kBytes * lane);
    DILOCO_UNROLL
    for (int j = 0; j < kQuads; ++j) {
        to.quads[j] = load_codes<kFormat>(own + kBytes * kLanes * j, true);
    }
    const auto scales = reinterpret_cast<uint64_t>(term.payload + tile.scales);
    if constexpr (!wire::has_scales(kFormat)) {
        to.scale[0] = 0;
    } else if constexpr (T::kIsWhole) {
        DILOCO_UNROLL
        for (int b = 0; b < to.kScales; ++b) to.scale[b] = load_global<uint16_t>(scales + 2 * b);
    } else {
        const bool has_own = lane << runs.block_shift < kTile<kQuads>;
        to.scale[0] = has_own ? load_global<uint16_t>(scales + 2 * lane) : 0;
    }
}

// Adds a term whose codes load_term() has read.
template <Format kFormat, int kQuads, bool kFuses, class T, class Lanes>
DILOCO_DEVICE void add_codes(
    const Lanes& lanes, const Runs& runs, float coefficient,
    const typename Lanes::template Of<TermCodes<kFormat, kQuads, T>>& codes,
    typename Lanes::template Of<Quads<kQuads>>& sum) {
    DILOCO_UNROLL
    for (int j = 0; j < kQuads; ++j) {
        typename Lanes::template Of<uint32_t> bits;
        if constexpr (T::kIsWhole && wire::has_scales(kFormat)) {
            constexpr int kPerBlock = kUsualBlock / (kQuad * kLanes);
            lanes.each([&](int lane) { bits[lane] = codes[lane].scale[j / kPerBlock]; });
        } else if constexpr (wire::has_scales(kFormat)) {
            lanes.pick([&](int lane) -> uint32_t& { return bits[lane]; },
                       [&](int lane) { return codes[lane].scale[0]; },
                       [&](int lane) { return quad_at(lane, j) >> runs.block_shift; });
        }
        lanes.each([&](int lane) {
            float scale = 0.0f;
            if constexpr (wire::has_scales(kFormat)) scale = wire::bits_float(bits[lane] << 16);
            if constexpr (kFuses) {
                fuse_term<kFormat>(sum[lane].q[j], codes[lane].quads[j],
                                   wire::mul(coefficient, scale));
            } else {
                add_term<kFormat>(sum[lane].q[j], codes[lane].quads[j], scale, coefficient, kQuad);
            }
        });
    }
}

// Adds terms t to t + kTerms - 1. There is no branch between the reads of their codes, because a
// branch would make the next read wait for the one before.
template <Format kFormat, int kQuads, int kTerms, class Lanes, class T>
DILOCO_DEVICE void add_batch(const Lanes& lanes, const Runs& runs, const Terms& terms, int t,
                             const T& tile, typename Lanes::template Of<Quads<kQuads>>& sum) {
    using Codes = TermCodes<kFormat, kQuads, T>;
    Term batch[kTerms];
    DILOCO_UNROLL
    for (int k = 0; k < kTerms; ++k) batch[k] = term_at(terms, t + k);
    typename Lanes::template Of<Codes> codes[kTerms];
    DILOCO_UNROLL
    for (int k = 0; k < kTerms; ++k) {
        lanes.each([&](int lane) {
            load_term<kFormat, kQuads>(runs, batch[k], tile, lane, codes[k][lane]);
        });
    }
    DILOCO_UNROLL
    for (int k = 0; k < kTerms; ++k) {
        const float coefficient = batch[k].coefficient;
        bool fuses = false;
        if constexpr (kCanFuse<kFormat>) {
            const int too_large = lanes.num_where([&](int lane) {
                uint32_t most = 0;
                for (const uint32_t bits : codes[k][lane].scale) most = bits > most ? bits : most;
                return most > kLargestFusedScale;
            });
            fuses = is_exact_coefficient(coefficient) && too_large == 0;
        }
        if (fuses) {
            add_codes<kFormat, kQuads, kCanFuse<kFormat>, T>(lanes, runs, coefficient, codes[k],
                                                             sum);
        } else {
            add_codes<kFormat, kQuads, false, T>(lanes, runs, coefficient, codes[k], sum);
        }
    }
}

// The sum over a tile that has all its elements, if all payloads are aligned.
template <Format kFormat, int kQuads, class Lanes, class T>
DILOCO_DEVICE void sum_whole(const Lanes& lanes, const Runs& runs, const Terms& terms,
                             const T& tile, typename Lanes::template Of<Quads<kQuads>>& sum) {
    constexpr int kBatch = kTermsAtOnce<kFormat, T>;
    lanes.each([&](int lane) {
        DILOCO_UNROLL
        for (int j = 0; j < kQuads; ++j) {
            sum[lane].q[j] = {{kEmptySum, kEmptySum, kEmptySum, kEmptySum}};
        }
    });
    int t = 0;
    for (; t + kBatch <= terms.count; t += kBatch) {
        add_batch<kFormat, kQuads, kBatch>(lanes, runs, terms, t, tile, sum);
    }
    if constexpr (kBatch > 2) {
        if (t + 2 <= terms.count) {
            add_batch<kFormat, kQuads, 2>(lanes, runs, terms, t, tile, sum);
            t += 2;
        }
    }
    if constexpr (kBatch > 1) {
        if (t < terms.count) add_batch<kFormat, kQuads, 1>(lanes, runs, terms, t, tile, sum);
    }
}

// The sum over any tile, of any payloads, quad by quad by way of the stage.
template <Format kFormat, int kQuads, class Lanes>
DILOCO_DEVICE void sum_any(const Lanes& lanes, const Runs& runs, const Terms& terms,
                           const Tile& tile, typename Lanes::template Of<Quads<kQuads>>& sum) {
    DILOCO_NO_UNROLL
    for (int j = 0; j < kQuads; ++j) {
        lanes.each([&](int lane) {
            const int count = tile.count(lane, j), at = quad_at(lane, j);
            Quad own{};
            if (count > 0) own = {{kEmptySum, kEmptySum, kEmptySum, kEmptySum}};
            DILOCO_NO_UNROLL
            for (int t = 0; t < terms.count && count > 0; ++t) {
                const Term term = term_at(terms, t);
                const bool is_aligned =
                    reinterpret_cast<uint64_t>(term.payload) % wire::kAlignment == 0;
                const CodeQuad<kFormat> codes = load_codes<kFormat>(
                    term.payload + tile.codes + at * wire::code_bits(kFormat) / 8, is_aligned);
                float scale = 0.0f;
                if constexpr (wire::has_scales(kFormat)) {
                    scale = load_scale(term.payload + tile.scales + 2 * (at >> runs.block_shift),
                                       is_aligned);
                }
                add_term<kFormat>(own, codes, scale, term.coefficient, count);
            }
            store_staged(lanes.stage + at, own);
        });
    }
    unstage<kQuads>(lanes, sum);
}

// The weighted sum of all terms' decoded values. Each product is rounded, and the products are
// added in order. Elements after the tile's last are zero.
template <Format kFormat, int kQuads, class Lanes, class T>
DILOCO_DEVICE void sum_terms(const Lanes& lanes, const Runs& runs, const Terms& terms,
                             const T& tile, typename Lanes::template Of<Quads<kQuads>>& sum) {
    if constexpr (wire::is_rotated(kFormat)) {
        sum_rotated<kFormat, kQuads>(lanes, terms, tile, sum);
    } else {
        if (T::kIsWhole || (terms.are_aligned && tile.size == kTile<kQuads>)) {
            sum_whole<kFormat, kQuads>(lanes, runs, terms, tile, sum);
        } else if constexpr (!T::kIsWhole) {
            sum_any<kFormat, kQuads>(lanes, runs, terms, tile, sum);
        }
    }
}

}  // namespace diloco::cuda
