// The codes of the rotated formats (wire/rotation.h) on a tile: random signs, the transform, and
// the bits of the code. Row j of a tile has its elements 128 j to 128 j + 127; lane l holds four of
// them, 4 l to 4 l + 3, as its quad j. So the stages of the transform that combine elements 1, 2,
// or 128 and more apart need only a lane's own registers; the five stages between exchange values
// between lanes. Encoding transforms integers. Decoding transforms fp32 numbers, which are integers
// of at most 2560, so every sum is exact.
//
// The code of a block is a bit per coefficient, in int2r two: first the bits for large levels, then
// the bits for negative ones. The four bits of a quad are called its *nibble*. A lane keeps the
// nibbles of its quads in one word, the nibble of row r at bit 4 r.
#pragma once

#include "cuda/tiles.h"
#include "wire/rotation.h"

namespace diloco::cuda {

constexpr int kRow = kQuad * kLanes;

// The numbers that describe how the blocks of a format are laid out in a tile of kQuads rows.
template <Format kFormat, int kQuads>
struct RotatedTile : wire::Rotation<kFormat> {
    using Base = wire::Rotation<kFormat>;
    static constexpr int kBlockRows = Base::kBlock / kRow;
    // Rows of a block that are in the same tile.
    static constexpr int kRows = kBlockRows < kQuads ? kBlockRows : kQuads;
    static constexpr int kBlocks = kQuads / kRows;  // blocks of a tile
    static constexpr int kKeptRows = Base::kKept > kRow ? Base::kKept / kRow : 1;
    static constexpr int kKeptLanes = Base::kKept < kRow ? Base::kKept / kQuad : kLanes;
    // The number of rows of 16 bytes (128 bits) in the code of a block.
    static constexpr int kCodeRows = Base::kHasLevels ? 2 * kKeptRows : kKeptRows;
    static_assert(kQuads % kRows == 0 && kRows % kKeptRows == 0);
};

template <int kRows, class T>
struct Rows {
    T v[kRows][kQuad];
};

DILOCO_DEVICE uint32_t nibble_of(uint32_t word, int row) { return word >> (4 * row) & 0xFu; }

// Gives each lane the random sign bits of its quads, as nibbles. The tile begins at row `first_row`
// of a block.
template <Format kFormat, int kQuads, class Lanes>
DILOCO_DEVICE void signs_of(const Lanes& lanes, uint64_t key, int first_row,
                            typename Lanes::template Of<uint32_t>& signs) {
    constexpr int kBlockRows = RotatedTile<kFormat, kQuads>::kBlockRows;
    // A Philox block has the sign bits of a row. Lane l computes the Philox block for row
    // l % kBlockRows, and provides one of its four words to the other lanes.
    typename Lanes::template Of<uint32_t> words, word;
    lanes.each([&](int lane) {
        const auto row = static_cast<uint64_t>(lane % kBlockRows);
        const wire::PhiloxBlock block = wire::philox(row, key, 1);
        const int which = lane / kBlockRows % 4;
        const uint32_t even = which == 0 ? block.word[0] : block.word[2];
        const uint32_t odd = which == 1 ? block.word[1] : block.word[3];
        words[lane] = which % 2 == 0 ? even : odd;
        signs[lane] = 0;
    });
    DILOCO_UNROLL
    for (int j = 0; j < kQuads; ++j) {
        const int row = (first_row + j) % kBlockRows;
        lanes.pick([&](int lane) -> uint32_t& { return word[lane]; },
                   [&](int lane) { return words[lane]; },
                   [&](int lane) { return row + kBlockRows * (lane / 8); });
        lanes.each([&](int lane) { signs[lane] |= nibble_of(word[lane], lane % 8) << (4 * j); });
    }
}

DILOCO_DEVICE int32_t signed_sum(int32_t own, int32_t sign, int32_t other) {
    return own * sign + other;
}
DILOCO_DEVICE float signed_sum(float own, float sign, float other) {
    return wire::fused(own, sign, other);
}

// Replaces a by a + b, and b by a - b.
template <class T>
DILOCO_DEVICE void butterfly(T& a, T& b) {
    const T sum = a + b;
    b = a - b;
    a = sum;
}

// The Hadamard transform of the kRows rows in the first kNumLanes lanes. If these are half of the
// lanes, the other half has the same values.
template <int kRows, int kNumLanes, class T, class Lanes>
DILOCO_DEVICE void hadamard(const Lanes& lanes, typename Lanes::template Of<Rows<kRows, T>>& y) {
    lanes.each([&](int lane) {
        DILOCO_UNROLL
        for (int r = 0; r < kRows; ++r) {
            butterfly(y[lane].v[r][0], y[lane].v[r][1]);
            butterfly(y[lane].v[r][2], y[lane].v[r][3]);
            butterfly(y[lane].v[r][0], y[lane].v[r][2]);
            butterfly(y[lane].v[r][1], y[lane].v[r][3]);
        }
        DILOCO_UNROLL
        for (int n = 1; n < kRows; n *= 2) {
            DILOCO_UNROLL
            for (int r = 0; r < kRows; ++r) {
                if ((r & n) != 0) continue;
                DILOCO_UNROLL
                for (int i = 0; i < kQuad; ++i) butterfly(y[lane].v[r][i], y[lane].v[r + n][i]);
            }
        }
    });
    DILOCO_UNROLL
    for (int n = 1; n < kNumLanes; n *= 2) {
        DILOCO_UNROLL
        for (int r = 0; r < kRows; ++r) {
            DILOCO_UNROLL
            for (int i = 0; i < kQuad; ++i) {
                typename Lanes::template Of<T> other;
                lanes.each([&](int lane) { other[lane] = y[lane].v[r][i]; });
                lanes.swap(n, [&](int lane) -> T& { return other[lane]; });
                lanes.each([&](int lane) {
                    const T sign = (lane & n) != 0 ? T{-1} : T{1};
                    y[lane].v[r][i] = signed_sum(y[lane].v[r][i], sign, other[lane]);
                });
            }
        }
    }
}

// Writes the code of a block, which is in the nibbles of all lanes.
template <class B, class Lanes>
DILOCO_DEVICE void store_nibbles(const Lanes& lanes, uint8_t* code,
                                 const typename Lanes::template Of<uint32_t>& nibbles) {
    typename Lanes::template Of<uint32_t> other;
    lanes.each([&](int lane) { other[lane] = nibbles[lane]; });
    lanes.swap(1, [&](int lane) -> uint32_t& { return other[lane]; });
    lanes.each([&](int lane) {
        const bool is_odd = lane % 2 != 0;
        const uint32_t low = is_odd ? other[lane] : nibbles[lane];
        const uint32_t high = is_odd ? nibbles[lane] : other[lane];
        if (lane >= B::kKeptLanes) return;
        DILOCO_UNROLL
        for (int pair = 0; pair < B::kCodeRows; pair += 2) {
            const int row = pair + lane % 2;
            const uint32_t byte = nibble_of(low, row) | nibble_of(high, row) << 4;
            if (row >= B::kCodeRows) continue;
            store_global(reinterpret_cast<uint64_t>(code) + 16 * row + lane / 2,
                         static_cast<uint8_t>(byte));
        }
    });
}

template <class B>
DILOCO_DEVICE uint32_t load_nibbles(const uint8_t* code, int lane) {
    uint32_t nibbles = 0;
    DILOCO_UNROLL
    for (int row = 0; row < B::kCodeRows; ++row) {
        const int at = 16 * row + lane % B::kKeptLanes / 2;
        const uint32_t byte = load_global<uint8_t>(reinterpret_cast<uint64_t>(code) + at);
        nibbles |= nibble_of(byte, lane % 2) << (4 * row);
    }
    return nibbles;
}

// Decodes the nibbles to the elements z of a block, before the scale and the random signs. Row r of
// z serves rows r, r + kKeptRows, r + 2 kKeptRows, ... of the block.
template <class B, class Lanes>
DILOCO_DEVICE void decode_nibbles(const Lanes& lanes,
                                  const typename Lanes::template Of<uint32_t>& nibbles,
                                  typename Lanes::template Of<Rows<B::kKeptRows, float>>& z) {
    lanes.each([&](int lane) {
        const uint32_t word = nibbles[lane];
        DILOCO_UNROLL
        for (int r = 0; r < B::kKeptRows; ++r) {
            DILOCO_UNROLL
            for (int i = 0; i < kQuad; ++i) {
                float level = 1.0f;
                int sign_bit = 4 * r + i;
                if constexpr (B::kHasLevels) {
                    const bool is_large = (word >> sign_bit & 1u) != 0;
                    level = static_cast<float>(is_large ? wire::kLargeLevel : wire::kSmallLevel);
                    sign_bit += 4 * B::kKeptRows;
                }
                const uint32_t sign = word << (31 - sign_bit) & 0x80000000u;
                z[lane].v[r][i] = wire::bits_float(wire::float_bits(level) ^ sign);
            }
        }
    });
    hadamard<B::kKeptRows, B::kKeptLanes, float>(lanes, z);
}

// Decodes one element of a rotated block: z (see decode_nibbles) times the scale, with the random
// sign at `bit`. The product needs no rounding, and a zero is always +0.
DILOCO_DEVICE float rotated_value(float z, float scale, uint32_t signs, int bit) {
    const uint32_t sign = signs << (31 - bit) & 0x80000000u;
    return wire::fused(z, wire::bits_float(wire::float_bits(scale) ^ sign), 0.0f);
}

DILOCO_DEVICE uint64_t load_key(const uint8_t* run) {
    const auto address = reinterpret_cast<uint64_t>(run);
    uint64_t key = 0;
    if (address % sizeof(key) == 0) return load_global<uint64_t>(address);
    DILOCO_UNROLL
    for (int i = 7; i >= 0; --i) key = key << 8 | load_global<uint8_t>(address + i);
    return key;
}

}  // namespace diloco::cuda
