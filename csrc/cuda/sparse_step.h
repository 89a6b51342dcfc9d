// The outer step and decode of a block in a sparse format: every warp does its part as the other
// operators do a tile, around the sum that all warps build together.
#pragma once

#include "cuda/sparse_sum.h"

namespace diloco::cuda {

constexpr int kSparseStepFloats = kPart + kStageSlack;

template <class Block>
using BlockArrays = typename Block::template Each<StepArrays<typename Block::Lanes>>;

// Runs load(lanes, part, arrays), the sum over the terms, and finish(warp, lanes, part, arrays) for
// the parts that hold elements.
template <class Block, class Load, class Finish>
DILOCO_DEVICE void with_sum(const Block& block, const Runs& runs, const Terms& terms,
                            uint32_t index, SumMemory& memory, Load&& load, Finish&& finish) {
    const Tile tile = sparse_tile_at(runs, index);
    BlockArrays<Block> arrays;
    BlockQuads<Block> sum;
    block.each_warp([&](int warp, const auto& lanes) {
        const Tile part = part_of(tile, warp);
        if (part.size != 0) load(lanes, part, arrays[warp]);
    });
    sum_sparse(block, runs, terms, tile, memory, sum);
    block.each_warp([&](int warp, const auto& lanes) {
        const Tile part = part_of(tile, warp);
        arrays[warp].g = sum[warp];
        if (part.size != 0) finish(warp, lanes, part, arrays[warp]);
    });
}

template <bool kIsAdam, class Block>
DILOCO_DEVICE void step_sparse_block(const Block& block, const StepArgs& args, uint32_t index,
                                     SumMemory& memory,
                                     typename Block::template Each<Place>& places) {
    with_sum(
        block, args.runs, args.terms, index, memory,
        [&](const auto& lanes, const Tile& part, auto& arrays) {
            load_step<kIsAdam>(lanes, args, part, arrays);
        },
        [&](int warp, const auto& lanes, const Tile& part, auto& arrays) {
            finish_step<kIsAdam>(lanes, args, part, places[warp], arrays);
        });
}

template <class Block>
DILOCO_DEVICE void arrive_sparse_block(const Block& block, const StepArgs& args, uint32_t index,
                                       SumMemory& memory) {
    with_sum(
        block, args.runs, args.terms, index, memory,
        [&](const auto& lanes, const Tile& part, auto& arrays) {
            load_arrival(lanes, args, part, arrays);
        },
        [&](int, const auto& lanes, const Tile& part, auto& arrays) {
            finish_arrival(lanes, args, part, arrays);
        });
}

template <class Block>
DILOCO_DEVICE void decode_sparse_block(const Block& block, const DecodeArgs& args, uint32_t index,
                                       SumMemory& memory,
                                       typename Block::template Each<Place>& places) {
    with_sum(
        block, args.runs, args.terms, index, memory, [](const auto&, const Tile&, auto&) {},
        [&](int warp, const auto& lanes, const Tile& part, auto& arrays) {
            store_tile<kPartQuads>(lanes, args.outs, part, places[warp], arrays.g);
        });
}

}  // namespace diloco::cuda
