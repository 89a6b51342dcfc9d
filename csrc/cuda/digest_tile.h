// The two sums of a digest (wire/digest.h) over the tiles of a warp. They are sums mod 2^64, so
// that neither the order nor the number of warps changes them.
#pragma once

#include <type_traits>

#include "cuda/lanes.h"
#include "cuda/quads.h"
#include "wire/digest.h"

namespace diloco::cuda {

constexpr int kDigestPairs = 4;  // pairs of words that a lane reads before it uses the first
constexpr int kDigestTile = 2 * kDigestPairs * kLanes;  // words of a tile

struct WordPair {
    uint64_t v[2];
};

DILOCO_DEVICE void add_word(codec::DigestSums& sums, uint64_t word, uint64_t key) {
    sums.product += wire::digest_product(word, key);
    sums.sum += word;
}

// Reads a 64-bit word at an address that is a multiple of sizeof(Unit).
template <class Unit>
DILOCO_DEVICE uint64_t load_word(uint64_t address) {
    uint64_t word = 0;
    DILOCO_UNROLL
    for (int i = 0; i < static_cast<int>(8 / sizeof(Unit)); ++i) {
        const uint64_t part = load_global<Unit>(address + i * sizeof(Unit));
        word |= part << (8 * sizeof(Unit) * i);
    }
    return word;
}

// Reads the last word, of which only `count` bytes exist; the others are zero.
DILOCO_DEVICE uint64_t load_rest(uint64_t address, int count) {
    uint64_t word = 0;
    for (int i = 0; i < count; ++i) {
        word |= static_cast<uint64_t>(load_global<uint8_t>(address + i)) << (8 * i);
    }
    return word;
}

// Reads two words at an address that is a multiple of kAlignment: 16, 4 or 1.
template <int kAlignment>
DILOCO_DEVICE WordPair load_pair(uint64_t address) {
    if constexpr (kAlignment == 16) {
        const uint4 w = load_global<uint4>(address);
        return {{w.x | static_cast<uint64_t>(w.y) << 32, w.z | static_cast<uint64_t>(w.w) << 32}};
    } else if constexpr (kAlignment == 4) {
        return {{load_word<uint32_t>(address), load_word<uint32_t>(address + 8)}};
    } else {
        return {{load_word<uint8_t>(address), load_word<uint8_t>(address + 8)}};
    }
}

// Adds a tile that has all its words.
template <int kAlignment, class Lanes, class Sums>
DILOCO_DEVICE void digest_whole(const Lanes& lanes, const DigestArgs& args, uint64_t first,
                                Sums& sums) {
    lanes.each([&](int lane) {
        WordPair pairs[kDigestPairs];
        const uint64_t begin = first + 2 * static_cast<uint64_t>(lane);
        DILOCO_UNROLL
        for (int i = 0; i < kDigestPairs; ++i) {
            pairs[i] = load_pair<kAlignment>(args.data + 8 * (begin + 2 * kLanes * i));
        }
        uint64_t key = wire::digest_key(args.first_word + begin);
        DILOCO_UNROLL
        for (int i = 0; i < kDigestPairs; ++i) {
            add_word(sums[lane], pairs[i].v[0], key);
            add_word(sums[lane], pairs[i].v[1], key + wire::kDigestStep);
            key += 2 * kLanes * wire::kDigestStep;
        }
    });
}

// Adds the last tile word by word; its last word may be cut short.
template <class Lanes, class Sums>
DILOCO_DEVICE void digest_end(const Lanes& lanes, const DigestArgs& args, uint64_t first,
                              Sums& sums) {
    lanes.each([&](int lane) {
        for (uint64_t i = first + lane; 8 * i < args.num_bytes; i += kLanes) {
            const uint64_t left = args.num_bytes - 8 * i, address = args.data + 8 * i;
            const uint64_t word =
                left < 8 ? load_rest(address, static_cast<int>(left)) : load_word<uint8_t>(address);
            add_word(sums[lane], word, wire::digest_key(args.first_word + i));
        }
    });
}

DILOCO_HD uint64_t num_digest_tiles(const DigestArgs& args) {
    return (args.num_bytes + 8 * kDigestTile - 1) / (8 * kDigestTile);
}

// Adds the tiles begin, begin + stride, begin + 2 stride, ... to the sums.
template <int kAlignment, class Lanes>
DILOCO_DEVICE void digest_tiles(const Lanes& lanes, const DigestArgs& args, uint64_t begin,
                                uint64_t stride) {
    typename Lanes::template Of<codec::DigestSums> sums;
    lanes.each([&](int lane) { sums[lane] = {0, 0}; });
    for (uint64_t i = begin; i < num_digest_tiles(args); i += stride) {
        const uint64_t first = i * kDigestTile;
        if (8 * (first + kDigestTile) <= args.num_bytes) {
            digest_whole<kAlignment>(lanes, args, first, sums);
        } else {
            digest_end(lanes, args, first, sums);
        }
    }
    lanes.add_all(args.sums, [&](int lane) { return sums[lane].product; });
    lanes.add_all(args.sums + 1, [&](int lane) { return sums[lane].sum; });
}

// Calls f with the alignment of the data as a compile-time constant.
template <class F>
void by_alignment(const DigestArgs& args, F&& f) {
    if (args.data % 16 == 0) {
        f(std::integral_constant<int, 16>());
    } else if (args.data % 4 == 0) {
        f(std::integral_constant<int, 4>());
    } else {
        f(std::integral_constant<int, 1>());
    }
}

}  // namespace diloco::cuda
