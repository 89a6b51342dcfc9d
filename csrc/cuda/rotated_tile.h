// Encoding and decoding a tile in a rotated format (rotated_codes.h).
#pragma once

#include "cuda/rotated_codes.h"

namespace diloco::cuda {

// The weighted sum of all terms' decoded values. Each product is rounded, and the products are
// added in order. Elements after the tile's last are zero.
template <Format kFormat, int kQuads, class Lanes>
DILOCO_DEVICE void sum_rotated(const Lanes& lanes, const Terms& terms, const Tile& tile,
                               typename Lanes::template Of<Quads<kQuads>>& sum) {
    using B = RotatedTile<kFormat, kQuads>;
    lanes.each([&](int lane) { sum[lane] = {}; });
    DILOCO_NO_UNROLL
    for (int t = 0; t < terms.count; ++t) {
        const Term term = term_at(terms, t);
        const bool is_aligned = reinterpret_cast<uint64_t>(term.payload) % wire::kAlignment == 0;
        typename Lanes::template Of<uint32_t> nibbles[B::kBlocks], signs;
        DILOCO_UNROLL
        for (int b = 0; b < B::kBlocks; ++b) {
            if (b * B::kBlock >= tile.size) break;
            const uint8_t* code = term.payload + tile.codes + b * wire::own_bytes(kFormat);
            lanes.each([&](int lane) { nibbles[b][lane] = load_nibbles<B>(code, lane); });
        }
        signs_of<kFormat, kQuads>(lanes, load_key(term.payload + tile.run), tile.first_row, signs);
        DILOCO_UNROLL
        for (int b = 0; b < B::kBlocks; ++b) {
            if (b * B::kBlock >= tile.size) break;
            typename Lanes::template Of<Rows<B::kKeptRows, float>> z;
            decode_nibbles<B>(lanes, nibbles[b], z);
            const uint16_t bits = load_scale_bits(term.payload + tile.scales + 2 * b, is_aligned);
            const float scale = wire::received_scale(bits, B::kLargest);
            lanes.each([&](int lane) {
                DILOCO_UNROLL
                for (int r = 0; r < B::kRows; ++r) {
                    const int j = b * B::kRows + r, count = tile.count(lane, j);
                    DILOCO_UNROLL
                    for (int i = 0; i < kQuad; ++i) {
                        const float d = rotated_value(z[lane].v[r % B::kKeptRows][i], scale,
                                                      signs[lane], 4 * j + i);
                        const float value = wire::mul(term.coefficient, d);
                        float& own = sum[lane].q[j].v[i];
                        const float next = t == 0 ? value : wire::add(own, value);
                        own = i < count ? next : 0.0f;
                    }
                }
            });
        }
    }
}

// Gives every lane the bits of the largest magnitude of block b, and adds the number of bad
// elements to `bad`.
template <class B, int kQuads, class Lanes>
DILOCO_DEVICE void find_largest(const Lanes& lanes, int b,
                                const typename Lanes::template Of<Quads<kQuads>>& x,
                                typename Lanes::template Of<uint32_t>& largest,
                                typename Lanes::template Of<int>& bad) {
    lanes.each([&](int lane) {
        uint32_t most = 0;
        int num_bad = 0;
        DILOCO_UNROLL
        for (int r = 0; r < B::kRows; ++r) {
            DILOCO_UNROLL
            for (int i = 0; i < kQuad; ++i) {
                const float value = x[lane].q[b * B::kRows + r].v[i];
                const uint32_t magnitude = wire::float_bits(value) & wire::kMagnitudeMask;
                most = magnitude > most ? magnitude : most;
                num_bad += magnitude > wire::kLargestRotatedBits;
            }
        }
        largest[lane] = most;
        bad[lane] += num_bad;
    });
    lanes.max_over(kLanes, [&](int lane) -> uint32_t& { return largest[lane]; });
}

// The coefficients Y (wire/rotation.h) of block b; zeros if the block has a bad element. `largest`
// has the bits of the block's largest magnitude.
template <class B, int kQuads, class Lanes>
DILOCO_DEVICE void find_coefficients(const Lanes& lanes, int b,
                                     const typename Lanes::template Of<Quads<kQuads>>& x,
                                     const typename Lanes::template Of<uint32_t>& largest,
                                     const typename Lanes::template Of<uint32_t>& signs,
                                     typename Lanes::template Of<Rows<B::kKeptRows, int32_t>>& y) {
    // The fp32 number 1.5 * 2^23 + n has the integer n in its low bits, rounded half to even.
    constexpr float kMagic = 12582912.0f;
    lanes.each([&](int lane) {
        y[lane] = {};
        const bool is_bad = largest[lane] > wire::kLargestRotatedBits;
        const float unit = wire::power_of_two(B::kBits - wire::block_exponent(largest[lane]));
        DILOCO_UNROLL
        for (int r = 0; r < B::kRows; ++r) {
            const int j = b * B::kRows + r;
            DILOCO_UNROLL
            for (int i = 0; i < kQuad; ++i) {
                const uint32_t sign = signs[lane] << (31 - (4 * j + i)) & 0x80000000u;
                const uint32_t scaled = wire::float_bits(wire::mul(x[lane].q[j].v[i], unit)) ^ sign;
                const uint32_t rounded =
                    wire::float_bits(wire::add(wire::bits_float(scaled), kMagic));
                const auto q = static_cast<int32_t>(rounded - wire::float_bits(kMagic));
                y[lane].v[r % B::kKeptRows][i] += is_bad ? 0 : q;
            }
        }
    });
    DILOCO_UNROLL
    for (int n = B::kKeptLanes; n < kLanes; n *= 2) {
        DILOCO_UNROLL
        for (int i = 0; i < kQuad; ++i) {
            typename Lanes::template Of<int32_t> other;
            lanes.each([&](int lane) { other[lane] = y[lane].v[0][i]; });
            lanes.swap(n, [&](int lane) -> int32_t& { return other[lane]; });
            lanes.each([&](int lane) { y[lane].v[0][i] += other[lane]; });
        }
    }
    hadamard<B::kKeptRows, B::kKeptLanes, int32_t>(lanes, y);
}

DILOCO_DEVICE uint32_t magnitude_of(int32_t y) { return static_cast<uint32_t>(y < 0 ? -y : y); }

// Gives every lane the sums from which the scale is made, and the nibbles of the lane's own quads.
template <class B, class Lanes>
DILOCO_DEVICE void find_sums(const Lanes& lanes,
                             const typename Lanes::template Of<Rows<B::kKeptRows, int32_t>>& y,
                             typename Lanes::template Of<wire::CoefficientSums>& sums,
                             typename Lanes::template Of<uint32_t>& nibbles) {
    // A sum of squares has up to 52 bits, and the warp adds 32-bit numbers: so the lower and upper
    // 26 bits of the lanes' sums are added separately.
    constexpr int kHalf = 26;
    typename Lanes::template Of<uint32_t> low, high, magnitude, large, num_large;
    lanes.each([&](int lane) {
        uint64_t square = 0;
        magnitude[lane] = large[lane] = num_large[lane] = nibbles[lane] = 0;
        DILOCO_UNROLL
        for (int r = 0; r < B::kKeptRows; ++r) {
            DILOCO_UNROLL
            for (int i = 0; i < kQuad; ++i) {
                const uint32_t own = magnitude_of(y[lane].v[r][i]);
                const uint32_t sign = y[lane].v[r][i] < 0 ? 1u : 0u;
                magnitude[lane] += own;
                square += static_cast<uint64_t>(own) * own;
                nibbles[lane] |= sign << (4 * (r + B::kCodeRows - B::kKeptRows) + i);
            }
        }
        const bool counts = lane < B::kKeptLanes;
        magnitude[lane] = counts ? magnitude[lane] : 0;
        low[lane] = counts ? static_cast<uint32_t>(square & ((1u << kHalf) - 1)) : 0;
        high[lane] = counts ? static_cast<uint32_t>(square >> kHalf) : 0;
    });
    lanes.sum_over([&](int lane) -> uint32_t& { return magnitude[lane]; });
    lanes.sum_over([&](int lane) -> uint32_t& { return low[lane]; });
    lanes.sum_over([&](int lane) -> uint32_t& { return high[lane]; });
    if constexpr (B::kHasLevels) {
        lanes.each([&](int lane) {
            const auto border = static_cast<uint32_t>(wire::level_border(magnitude[lane]));
            DILOCO_UNROLL
            for (int r = 0; r < B::kKeptRows; ++r) {
                DILOCO_UNROLL
                for (int i = 0; i < kQuad; ++i) {
                    const uint32_t own = magnitude_of(y[lane].v[r][i]);
                    const uint32_t is_large = own > border ? 1u : 0u;
                    large[lane] += is_large != 0 ? own : 0;
                    num_large[lane] += is_large;
                    nibbles[lane] |= is_large << (4 * r + i);
                }
            }
        });
        lanes.sum_over([&](int lane) -> uint32_t& { return large[lane]; });
        lanes.sum_over([&](int lane) -> uint32_t& { return num_large[lane]; });
    }
    lanes.each([&](int lane) {
        const uint64_t square = (static_cast<uint64_t>(high[lane]) << kHalf) + low[lane];
        sums[lane] = {magnitude[lane], static_cast<int64_t>(square), large[lane],
                      static_cast<int32_t>(num_large[lane])};
    });
}

// Encodes block b of the tile. If there is a new residual, x becomes the error of the encoding.
template <Format kFormat, int kQuads, class Lanes>
DILOCO_DEVICE void encode_rotated_block(const Lanes& lanes, const EncodeTarget& target,
                                        const Tile& tile, int b,
                                        const typename Lanes::template Of<uint32_t>& signs,
                                        typename Lanes::template Of<Quads<kQuads>>& x,
                                        typename Lanes::template Of<int>& bad) {
    using B = RotatedTile<kFormat, kQuads>;
    const bool keeps_rest = target.new_residual != nullptr;
    const bool is_aligned = reinterpret_cast<uint64_t>(target.payload) % wire::kAlignment == 0;
    typename Lanes::template Of<uint32_t> largest, nibbles;
    typename Lanes::template Of<uint16_t> scale;
    typename Lanes::template Of<wire::CoefficientSums> sums;
    find_largest<B, kQuads>(lanes, b, x, largest, bad);
    {
        typename Lanes::template Of<Rows<B::kKeptRows, int32_t>> y;
        find_coefficients<B, kQuads>(lanes, b, x, largest, signs, y);
        find_sums<B>(lanes, y, sums, nibbles);
    }
    lanes.each([&](int lane) {
        // In a block with a bad element all sums are zero, and so is the scale.
        scale[lane] = wire::rotated_scale<kFormat>(sums[lane], wire::block_exponent(largest[lane]),
                                                   keeps_rest);
        if (scale[lane] == 0) nibbles[lane] = 0;
        if (lane == 0) {
            store_scale(target.payload + tile.scales + 2 * b, scale[lane], is_aligned);
        }
    });
    store_nibbles<B>(lanes, target.payload + tile.codes + b * wire::own_bytes(kFormat), nibbles);
    if (!keeps_rest) return;
    typename Lanes::template Of<Rows<B::kKeptRows, float>> z;
    decode_nibbles<B>(lanes, nibbles, z);
    lanes.each([&](int lane) {
        DILOCO_UNROLL
        for (int r = 0; r < B::kRows; ++r) {
            const int j = b * B::kRows + r;
            DILOCO_UNROLL
            for (int i = 0; i < kQuad; ++i) {
                const float d =
                    rotated_value(z[lane].v[r % B::kKeptRows][i], wire::scale_value(scale[lane]),
                                  signs[lane], 4 * j + i);
                x[lane].q[j].v[i] = wire::sub(x[lane].q[j].v[i], d);
            }
        }
    });
}

// Encodes the tile x, which begins with a block, and adds the number of bad elements to `bad`.
template <Format kFormat, int kQuads, class Lanes>
DILOCO_DEVICE void encode_rotated(const Lanes& lanes, const EncodeTarget& target, const Tile& tile,
                                  typename Lanes::template Of<Quads<kQuads>>& x,
                                  typename Lanes::template Of<int>& bad) {
    using B = RotatedTile<kFormat, kQuads>;
    static_assert(B::kRows == B::kBlockRows, "a tile holds whole blocks");
    typename Lanes::template Of<uint32_t> signs;
    signs_of<kFormat, kQuads>(lanes, target.key, 0, signs);
    if (tile.scales == tile.run + wire::scale_offset(kFormat)) {  // the run's first tile
        const auto run = reinterpret_cast<uint64_t>(target.payload + tile.run);
        lanes.each([&](int lane) {
            if (lane >= 8) return;
            store_global(run + lane, static_cast<uint8_t>(target.key >> (8 * lane)));
        });
    }
    DILOCO_UNROLL
    for (int b = 0; b < B::kBlocks; ++b) {
        if (b * B::kBlock >= tile.size) break;
        encode_rotated_block<kFormat, kQuads>(lanes, target, tile, b, signs, x, bad);
    }
}

}  // namespace diloco::cuda
