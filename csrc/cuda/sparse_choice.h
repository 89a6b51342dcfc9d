// Chooses the elements of a block that a sparse format keeps: the k of largest magnitude, and among
// equal ones the lower indices. The block is on the stages of the warps. The choice is exact, and
// takes a fixed number of steps for usual data:
//   1. A histogram counts the largest magnitude of each quad, in bins of a sixteenth of an octave.
//      The bin of the k-th largest quad is a lower bound for the k-th largest element.
//   2. The elements that reach this bound are listed: about 1.2 k elements of Gaussian data.
//   3. A histogram of the listed elements gives the bin of the k-th largest element. All listed
//      elements in bins of larger magnitudes are kept.
//   4. The listed elements of that bin are compared with each other.
// If the histogram does not help (a block of equal values, of few elements, or with one element
// 2^16 times as large as the others), the k-th element is found bit by bit, by counting elements.
#pragma once

#include "cuda/sparse_tile.h"

namespace diloco::cuda {

constexpr int kNumBins = 256;
constexpr int kBinShift = 19;  // the bin of a magnitude is made of its bits above this many
constexpr int kMostListed = 512;
constexpr int kKeyBits = 31, kIndexBits = 12;
constexpr int kNumCounts = kKeyBits + 1 + kIndexBits;
constexpr int kKeptWords = kSparseTile / 32;
static_assert(kNumBins == kBlockThreads && kMostListed == 2 * kBlockThreads);

// The shared memory that the choice and the encoding of a block need.
struct ChoiceMemory {
    alignas(16) uint32_t quad_bins[kNumBins];
    alignas(16) uint32_t list_bins[kNumBins];
    // For each element in the bin of step 4, the low bits of the magnitude, then 4095 - index.
    uint32_t ties[kMostListed];
    uint16_t list[kMostListed];        // indices of the listed elements, in any order
    uint32_t kept[kKeptWords];         // a bit for each element: whether it is kept
    uint32_t kept_before[kKeptWords];  // the number of kept elements before each word of `kept`
    uint32_t counts[kNumCounts];
    uint32_t upper[kMostUpperWords];  // the 2 k bits of the code (wire/sparse.h)
    uint16_t indices[kMostKept];      // the kept indices in order; bit 15: the element is negative
    uint32_t largest[kBlockWarps];    // the bits of each warp's largest magnitude
    uint32_t num_listed, num_ties, num_kept_ties, sum;
};

DILOCO_DEVICE uint32_t key_of(float x) { return wire::float_bits(x) & wire::kMagnitudeMask; }

DILOCO_DEVICE uint32_t bin_of(uint32_t largest, uint32_t key) {
    return (largest >> kBinShift) - (key >> kBinShift);
}

// The bin of the `wanted`-th largest element, and the number of elements in the bins before it.
// Bin 0 has the largest elements.
struct Cut {
    uint32_t bin;  // kNumBins if all bins together have fewer elements
    uint32_t before;
};

template <class Lanes>
DILOCO_DEVICE void find_cut(const Lanes& lanes, const uint32_t* bins, uint32_t wanted,
                            typename Lanes::template Of<Cut>& cut) {
    constexpr int kOwn = kNumBins / kLanes;
    typename Lanes::template Of<uint32_t> upto, before;
    lanes.each([&](int lane) {
        upto[lane] = 0;
        DILOCO_UNROLL
        for (int i = 0; i < kOwn; ++i) upto[lane] += bins[kOwn * lane + i];
    });
    lanes.scan([&](int lane) -> uint32_t& { return upto[lane]; });
    const int found = lanes.num_where([&](int lane) { return upto[lane] < wanted; });
    lanes.pick([&](int lane) -> uint32_t& { return before[lane]; },
               [&](int lane) { return upto[lane]; },
               [&](int) { return found > 0 ? found - 1 : 0; });
    lanes.each([&](int lane) {
        uint32_t sum = found > 0 ? before[lane] : 0;
        cut[lane] = {static_cast<uint32_t>(kOwn * found), sum};
        if (found == kLanes) return;
        DILOCO_UNROLL
        for (int i = 0; i < kOwn; ++i) {
            sum += bins[kOwn * found + i];
            if (sum < wanted) cut[lane] = {static_cast<uint32_t>(kOwn * found + i + 1), sum};
        }
    });
}

// Calls f(j, i, value) for element i of quad j of a lane, for all its elements on the stage.
template <class F>
DILOCO_DEVICE void each_staged(const float* stage, int lane, F&& f) {
    DILOCO_UNROLL
    for (int j = 0; j < kPartQuads; ++j) {
        const Quad quad = load_staged(stage + quad_at(lane, j));
        DILOCO_UNROLL
        for (int i = 0; i < kQuad; ++i) f(j, i, quad.v[i]);
    }
}

// Adds the elements of a warp for which wants(lane, key, index) is true to the list. A key has the
// bits of a magnitude.
template <class Lanes, class F>
DILOCO_DEVICE void list_elements(const Lanes& lanes, int warp, uint32_t largest,
                                 ChoiceMemory& memory, F&& wants) {
    typename Lanes::template Of<uint32_t> wanted, upto, first;
    lanes.each([&](int lane) {
        wanted[lane] = 0;
        each_staged(lanes.stage, lane, [&](int j, int i, float value) {
            const int index = kPart * warp + quad_at(lane, j) + i;
            const bool is_wanted = wants(lane, key_of(value), index);
            wanted[lane] |= is_wanted ? 1u << (kQuad * j + i) : 0;
        });
        upto[lane] = static_cast<uint32_t>(num_ones(wanted[lane]));
    });
    lanes.scan([&](int lane) -> uint32_t& { return upto[lane]; });
    lanes.each([&](int lane) {
        if (lane == kLanes - 1) first[lane] = atomic_add(&memory.num_listed, upto[lane]);
    });
    lanes.pick([&](int lane) -> uint32_t& { return first[lane]; },
               [&](int lane) { return first[lane]; }, [&](int) { return kLanes - 1; });
    lanes.each([&](int lane) {
        uint32_t bits = wanted[lane];
        uint32_t at = first[lane] + upto[lane] - static_cast<uint32_t>(num_ones(bits));
        DILOCO_NO_UNROLL
        for (; bits != 0 && at < kMostListed; bits &= bits - 1, ++at) {
            const int which = lowest_one(bits);
            const int within = quad_at(lane, which / kQuad) + which % kQuad;
            memory.list[at] = static_cast<uint16_t>(kPart * warp + within);
            const uint32_t bin = bin_of(largest, key_of(lanes.stage[within]));
            if (bin < kNumBins) atomic_add(&memory.list_bins[bin], 1);
        }
    });
}

// Lists at least the k largest elements (steps 1 and 2). If num_listed is above kMostListed then,
// the list is incomplete and cannot be used.
template <class Block>
DILOCO_DEVICE void list_largest(const Block& block, SparseCode code, uint32_t largest,
                                ChoiceMemory& memory) {
    using Lanes = typename Block::Lanes;
    block.each_warp([&](int, const auto& lanes) {
        lanes.each([&](int lane) {
            uint32_t keys[kPartQuads] = {};
            each_staged(lanes.stage, lane, [&](int j, int, float value) {
                keys[j] = key_of(value) > keys[j] ? key_of(value) : keys[j];
            });
            DILOCO_UNROLL
            for (int j = 0; j < kPartQuads; ++j) {
                const uint32_t bin = bin_of(largest, keys[j]);
                if (bin < kNumBins) atomic_add(&memory.quad_bins[bin], 1);
            }
        });
    });
    block.each_warp([&](int warp, const auto& lanes) {
        typename Lanes::template Of<Cut> cut;
        find_cut(lanes, memory.quad_bins, static_cast<uint32_t>(code.num_kept()), cut);
        const int num_without =
            lanes.num_where([&](int lane) { return cut[lane].bin == kNumBins; });
        if (num_without != 0) {  // the same in all warps
            lanes.each([&](int lane) {
                if (warp == 0 && lane == 0) memory.num_listed = kMostListed + 1;
            });
            return;
        }
        list_elements(lanes, warp, largest, memory, [&](int lane, uint32_t key, int) {
            return key >> kBinShift >= (largest >> kBinShift) - cut[lane].bin;
        });
    });
}

// The number of elements of the block for which f(key, index) is true. `counter` must be zero, so
// each call needs its own.
template <class Block, class F>
DILOCO_DEVICE int count_elements(const Block& block, uint32_t& counter, F&& f) {
    block.each_warp([&](int warp, const auto& lanes) {
        typename Block::Lanes::template Of<uint32_t> count;
        lanes.each([&](int lane) {
            count[lane] = 0;
            each_staged(lanes.stage, lane, [&](int j, int i, float value) {
                const int index = kPart * warp + quad_at(lane, j) + i;
                count[lane] += f(key_of(value), index) ? 1u : 0u;
            });
        });
        lanes.sum_over([&](int lane) -> uint32_t& { return count[lane]; });
        lanes.each([&](int lane) {
            if (lane == 0) atomic_add(&counter, count[lane]);
        });
    });
    return static_cast<int>(counter);
}

// Lists exactly the k largest elements, found bit by bit.
template <class Block>
DILOCO_DEVICE void list_by_counting(const Block& block, SparseCode code, uint32_t largest,
                                    ChoiceMemory& memory) {
    uint32_t least = 0;
    DILOCO_NO_UNROLL
    for (int bit = kKeyBits - 1; bit >= 0; --bit) {
        const uint32_t trial = least | 1u << bit;
        const int count = count_elements(block, memory.counts[bit],
                                         [&](uint32_t key, int) { return key >= trial; });
        if (count >= code.num_kept()) least = trial;
    }
    const int above = count_elements(block, memory.counts[kKeyBits],
                                     [&](uint32_t key, int) { return key > least; });
    // Find the index of the last element that is kept among those equal to the k-th largest.
    int last = 0;
    DILOCO_NO_UNROLL
    for (int bit = kIndexBits - 1; bit >= 0; --bit) {
        const int trial = last | 1 << bit;
        const int count =
            count_elements(block, memory.counts[kKeyBits + 1 + bit],
                           [&](uint32_t key, int at) { return key == least && at < trial; });
        if (above + count < code.num_kept()) last = trial;
    }
    block.each_warp([&](int warp, const auto& lanes) {
        lanes.each([&](int lane) {
            if (warp == 0 && lane == 0) memory.num_listed = 0;
        });
    });
    block.each_warp([&](int warp, const auto& lanes) {
        list_elements(lanes, warp, largest, memory, [&](int, uint32_t key, int at) {
            return key > least || (key == least && at <= last);
        });
    });
}

DILOCO_DEVICE void keep(ChoiceMemory& memory, uint32_t index) {
    atomic_or(&memory.kept[index / 32], 1u << (index % 32));
}

// Calls f(lane, index) for the listed elements, which are distributed over the lanes of all warps.
template <class Lanes, class F>
DILOCO_DEVICE void each_listed(const Lanes& lanes, int warp, const ChoiceMemory& memory,
                               uint32_t num_listed, F&& f) {
    lanes.each([&](int lane) {
        for (uint32_t at = static_cast<uint32_t>(kLanes * warp + lane); at < num_listed;
             at += kBlockThreads) {
            f(lane, uint32_t{memory.list[at]});
        }
    });
}

// Marks the k largest of the listed elements as kept (steps 3 and 4).
template <class Block>
DILOCO_DEVICE void keep_largest(const Block& block, SparseCode code, uint32_t largest,
                                ChoiceMemory& memory) {
    constexpr uint32_t kLowMask = (1u << kBinShift) - 1, kLastIndex = kSparseTile - 1;
    using Lanes = typename Block::Lanes;
    const auto num_kept = static_cast<uint32_t>(code.num_kept());
    const uint32_t num_listed = memory.num_listed;
    block.each_warp([&](int warp, const auto& lanes) {
        typename Lanes::template Of<Cut> cut;
        if (num_listed == num_kept) {
            lanes.each([&](int lane) { cut[lane] = {kNumBins, 0}; });
        } else {
            find_cut(lanes, memory.list_bins, num_kept, cut);
        }
        each_listed(lanes, warp, memory, num_listed, [&](int lane, uint32_t index) {
            const uint32_t key = key_of(staged(block, index));
            const uint32_t bin = bin_of(largest, key);
            if (cut[lane].bin == kNumBins || bin < cut[lane].bin) return keep(memory, index);
            if (bin > cut[lane].bin) return;
            const uint32_t at = atomic_add(&memory.num_ties, 1);
            memory.ties[at] = (key & kLowMask) << kIndexBits | (kLastIndex - index);
        });
        lanes.each([&](int lane) {
            if (warp == 0 && lane == 0) memory.num_kept_ties = num_kept - cut[lane].before;
        });
    });
    const uint32_t num_ties = memory.num_ties;
    block.each_warp([&](int warp, const auto& lanes) {
        lanes.each([&](int lane) {
            for (uint32_t at = static_cast<uint32_t>(kLanes * warp + lane); at < num_ties;
                 at += kBlockThreads) {
                const uint32_t own = memory.ties[at];
                uint32_t num_larger = 0;
                DILOCO_UNROLL_8
                for (uint32_t other = 0; other < num_ties; ++other) {
                    num_larger += memory.ties[other] > own ? 1 : 0;
                }
                if (num_larger >= memory.num_kept_ties) continue;
                keep(memory, kLastIndex - (own & kLastIndex));
            }
        });
    });
}

// Makes the choice: fills memory.kept and memory.kept_before. Every kept element is in the list.
template <class Block>
DILOCO_DEVICE void choose(const Block& block, SparseCode code, uint32_t largest,
                          ChoiceMemory& memory) {
    list_largest(block, code, largest, memory);
    if (memory.num_listed > kMostListed) list_by_counting(block, code, largest, memory);
    keep_largest(block, code, largest, memory);
    block.each_warp([&](int warp, const auto& lanes) {
        constexpr int kOwn = kKeptWords / kLanes;
        typename Block::Lanes::template Of<uint32_t> upto;
        if (warp != 0) return;
        lanes.each([&](int lane) {
            upto[lane] = 0;
            DILOCO_UNROLL
            for (int i = 0; i < kOwn; ++i) {
                upto[lane] += static_cast<uint32_t>(num_ones(memory.kept[kOwn * lane + i]));
            }
        });
        lanes.scan([&](int lane) -> uint32_t& { return upto[lane]; });
        lanes.each([&](int lane) {
            uint32_t before = upto[lane];
            DILOCO_UNROLL
            for (int i = kOwn - 1; i >= 0; --i) {
                before -= static_cast<uint32_t>(num_ones(memory.kept[kOwn * lane + i]));
                memory.kept_before[kOwn * lane + i] = before;
            }
        });
    });
}

}  // namespace diloco::cuda
