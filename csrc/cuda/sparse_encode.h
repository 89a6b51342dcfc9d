// Encoding of a block in a sparse format (wire/sparse.h) by the warps of a thread block.
#pragma once

#include "cuda/encode_tile.h"
#include "cuda/sparse_choice.h"
#include "cuda/sparse_sum.h"

namespace diloco::cuda {

// The floats of a warp's stage: its 512 elements of x, and a residual that is being copied.
constexpr int kSparseStageFloats = 2 * (kPart + kStageSlack);

// Writes a warp's 512 elements x to its stage, finds their largest magnitude, and clears `memory`.
template <class Lanes>
DILOCO_DEVICE void begin_encoding(const Lanes& lanes, int warp, const StepQuads<Lanes>& x,
                                  ChoiceMemory& memory) {
    typename Lanes::template Of<uint32_t> largest;
    lanes.each([&](int lane) { largest[lane] = 0; });
    each_element(lanes, [&](int lane, int j, int i) {
        const uint32_t key = key_of(x[lane].q[j].v[i]);
        largest[lane] = key > largest[lane] ? key : largest[lane];
    });
    stage<kPartQuads>(lanes, x);
    lanes.max_over(kLanes, [&](int lane) -> uint32_t& { return largest[lane]; });
    lanes.each([&](int lane) {
        const int thread = kLanes * warp + lane;
        if (lane == 0) memory.largest[warp] = largest[lane];
        memory.quad_bins[thread] = memory.list_bins[thread] = 0;
        if (thread < kKeptWords) memory.kept[thread] = 0;
        if (thread < kNumCounts) memory.counts[thread] = 0;
        if (thread < kMostUpperWords) memory.upper[thread] = 0;
        if (thread == 0) memory.num_listed = memory.num_ties = memory.sum = 0;
    });
}

// Adds the number of bad elements of a block to *nonfinite.
template <class Block>
DILOCO_DEVICE void count_bad(const Block& block, int64_t* nonfinite) {
    if (nonfinite == nullptr) return;
    block.each_warp([&](int, const auto& lanes) {
        typename Block::Lanes::template Of<int> bad;
        lanes.each([&](int lane) {
            bad[lane] = 0;
            each_staged(lanes.stage, lane,
                        [&](int, int, float value) { bad[lane] += wire::is_bad(value) ? 1 : 0; });
        });
        lanes.count(nonfinite, [&](int lane) { return bad[lane]; });
    });
}

// Writes the kept indices to memory.indices in order, makes the 2 k bits of the code
// (memory.upper), and adds up the kept magnitudes (memory.sum).
template <class Block>
DILOCO_DEVICE void order_kept(const Block& block, SparseCode code, uint32_t largest,
                              ChoiceMemory& memory) {
    const float unit = wire::power_of_two(21 - wire::block_exponent(largest));
    const uint32_t num_listed = memory.num_listed;
    block.each_warp([&](int warp, const auto& lanes) {
        typename Block::Lanes::template Of<uint32_t> sum;
        lanes.each([&](int lane) { sum[lane] = 0; });
        each_listed(lanes, warp, memory, num_listed, [&](int lane, uint32_t index) {
            const uint32_t word = memory.kept[index / 32], from_here = word >> (index % 32);
            if ((from_here & 1u) == 0) return;
            const auto j = static_cast<int>(memory.kept_before[index / 32]) + num_ones(word) -
                           num_ones(from_here);
            const uint32_t bits = wire::float_bits(staged(block, index));
            memory.indices[j] = static_cast<uint16_t>(bits >> 31 << 15 | index);
            const int place = static_cast<int>(index >> code.low_bits()) + j;
            atomic_or(&memory.upper[place / 32], 1u << (place % 32));
            // Adding the constant rounds `scaled`, at most 2^22, into the low bits of the sum.
            const float scaled = wire::mul(wire::bits_float(bits & wire::kMagnitudeMask), unit);
            sum[lane] += wire::float_bits(wire::add(scaled, kRoundingMagic)) -
                         wire::float_bits(kRoundingMagic);
        });
        lanes.sum_over([&](int lane) -> uint32_t& { return sum[lane]; });
        lanes.each([&](int lane) {
            if (lane == 0) atomic_add(&memory.sum, sum[lane]);
        });
    });
}

// Writes the scale and the code of a block, made from the kept indices; zeros if the scale is zero.
template <class Lanes>
DILOCO_DEVICE void store_code(const Lanes& lanes, int warp, SparseCode code,
                              const ChoiceMemory& memory, uint16_t scale, uint8_t* scale_at,
                              uint8_t* code_at, bool is_aligned) {
    typename Lanes::template Of<uint32_t> own{};
    const int num_planes = code.low_bits() + 1;  // the signs are the last
    if (warp < code.plane_words()) {
        DILOCO_NO_UNROLL
        for (int plane = 0; plane < num_planes; ++plane) {
            const int bit = plane == num_planes - 1 ? 15 : plane;
            const uint32_t word = lanes.ballot(
                [&](int lane) { return (memory.indices[kLanes * warp + lane] >> bit & 1) != 0; });
            lanes.each([&](int lane) {
                if (lane == plane) own[lane] = word;
            });
        }
        lanes.each([&](int lane) {
            if (lane >= num_planes) return;
            const int first = lane == num_planes - 1 ? code.sign_word() : lane * code.plane_words();
            store_word(code_at + 4 * (first + warp), scale == 0 ? 0 : own[lane], is_aligned);
        });
    }
    lanes.each([&](int lane) {
        if (warp != kBlockWarps - 1) return;
        if (lane < 2 * code.plane_words()) {
            store_word(code_at + 4 * (code.upper_word() + lane),
                       scale == 0 ? 0 : memory.upper[lane], is_aligned);
        }
        if (lane == kLanes - 1) store_scale(scale_at, scale, is_aligned);
    });
}

// The error of the encoding: a warp's elements on its stage minus their decoded values.
template <class Lanes>
DILOCO_DEVICE void take_rest(const Lanes& lanes, int warp, const ChoiceMemory& memory,
                             uint16_t scale, StepQuads<Lanes>& rest) {
    lanes.each([&](int lane) {
        uint32_t kept[kPartQuads];
        DILOCO_UNROLL
        for (int j = 0; j < kPartQuads; ++j) {
            const int word = (kPart * warp + kQuad * kLanes * j) / 32 + kQuad * lane / 32;
            kept[j] = scale == 0 ? 0 : memory.kept[word] >> (kQuad * lane % 32);
        }
        each_staged(lanes.stage, lane, [&](int j, int i, float value) {
            const uint32_t sign = wire::float_bits(value) & 0x80000000u;
            const uint32_t sent = wire::float_bits(wire::scale_value(scale)) | sign;
            const bool is_kept = (kept[j] >> i & 1u) != 0;
            rest[lane].q[j].v[i] = is_kept ? wire::sub(value, wire::bits_float(sent)) : value;
        });
    });
    lanes.sync();
}

// Encodes the block that is on the stages, and writes the error of the encoding to the new
// residual, if there is one.
template <class Block>
DILOCO_DEVICE void encode_staged(const Block& block, const EncodeTarget& target, const Tile& tile,
                                 ChoiceMemory& memory) {
    const SparseCode code{target.runs.log_kept};
    uint32_t largest = 0;
    DILOCO_UNROLL
    for (int warp = 0; warp < kBlockWarps; ++warp) {
        largest = memory.largest[warp] > largest ? memory.largest[warp] : largest;
    }
    if (largest > wire::kLargestGoodBits) {
        count_bad(block, target.nonfinite);
    } else if (largest != 0) {
        choose(block, code, largest, memory);
        order_kept(block, code, largest, memory);
    }
    // If no elements were chosen, the sum is zero, and so is the scale.
    const uint16_t scale =
        wire::sparse_scale(memory.sum, wire::block_exponent(largest), code.log_kept);
    block.each_warp([&](int warp, const auto& lanes) {
        store_code(lanes, warp, code, memory, scale, target.payload + tile.scales,
                   target.payload + tile.codes, is_aligned(target.payload));
        const Tile part = part_of(tile, warp);
        if (target.new_residual == nullptr || part.size == 0) return;
        StepQuads<typename Block::Lanes> rest;
        take_rest(lanes, warp, memory, scale, rest);
        store_residual<kPartQuads>(lanes, target, part, rest);
    });
}

struct EncodeMemory {
    ChoiceMemory choice;
};
struct ReduceMemory {
    ChoiceMemory choice;
    SumMemory sum;
};

// One block of encode: writes the code of c(outer) - params + residual, or of params + residual.
template <class Block>
DILOCO_DEVICE void encode_sparse_block(const Block& block, const EncodeArgs& args, uint32_t index,
                                       EncodeMemory& memory) {
    const Tile tile = sparse_tile_at(args.target.runs, index);
    block.each_warp([&](int warp, const auto& lanes) {
        const Tile part = part_of(tile, warp);
        StepQuads<typename Block::Lanes> x;
        Place place;
        if (part.size == 0) {
            lanes.each([&](int lane) { x[lane] = {}; });
        } else {
            load_values<kPartQuads>(lanes, args, part, place, x);
        }
        begin_encoding(lanes, warp, x, memory.choice);
    });
    encode_staged(block, args.target, tile, memory.choice);
}

// One block of reduce: writes the code of the weighted sum of the runs plus residual.
template <class Block>
DILOCO_DEVICE void encode_sparse_block(const Block& block, const ReduceArgs& args, uint32_t index,
                                       ReduceMemory& memory) {
    const Tile tile = sparse_tile_at(args.target.runs, index);
    BlockQuads<Block> x;
    block.each_warp([&](int warp, const auto& lanes) {
        fetch_residual<kPartQuads>(lanes, args.target, part_of(tile, warp));
    });
    sum_sparse(block, args.target.runs, args.terms, tile, memory.sum, x);
    block.each_warp([&](int warp, const auto& lanes) {
        add_residual<kPartQuads>(lanes, args.target, part_of(tile, warp), x[warp]);
        begin_encoding(lanes, warp, x[warp], memory.choice);
    });
    encode_staged(block, args.target, tile, memory.choice);
}

}  // namespace diloco::cuda
