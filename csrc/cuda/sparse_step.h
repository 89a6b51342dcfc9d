// The outer step and decode of a block in a sparse format. All warps compute the weighted sum
// together; then each warp handles its 512 elements as a tile of step_tile.h.
#pragma once

#include "cuda/sparse_sum.h"

namespace diloco::cuda {

constexpr int kSparseStepFloats = kPart + kStageSlack;

// Computes the sum over the terms, then calls finish(lanes, part, place, sum) in each warp that has
// elements of the block. Other arrays are read only after the sum, which needs the registers;
// meanwhile other thread blocks keep the memory busy.
template <class Block, class Finish>
DILOCO_DEVICE void with_sum(const Block& block, const Runs& runs, const Terms& terms,
                            uint32_t index, SumMemory& memory, Finish&& finish) {
    const Tile tile = sparse_tile_at(runs, index);
    BlockQuads<Block> sum;
    sum_sparse(block, runs, terms, tile, memory, sum);
    block.each_warp([&](int warp, const auto& lanes) {
        const Tile part = part_of(tile, warp);
        Place place;
        if (part.size != 0) finish(lanes, part, place, sum[warp]);
    });
}

template <bool kIsAdam, class Block>
DILOCO_DEVICE void step_sparse_block(const Block& block, const StepArgs& args, uint32_t index,
                                     SumMemory& memory) {
    with_sum(block, args.runs, args.terms, index, memory,
             [&](const auto& lanes, const Tile& part, Place& place, const auto& sum) {
                 StepArrays<typename Block::Lanes> arrays;
                 load_step<kIsAdam>(lanes, args, part, arrays);
                 arrays.g = sum;
                 finish_step<kIsAdam>(lanes, args, part, place, arrays);
             });
}

template <class Block>
DILOCO_DEVICE void arrive_sparse_block(const Block& block, const StepArgs& args, uint32_t index,
                                       SumMemory& memory) {
    with_sum(block, args.runs, args.terms, index, memory,
             [&](const auto& lanes, const Tile& part, Place&, const auto& sum) {
                 StepArrays<typename Block::Lanes> arrays;
                 load_arrival(lanes, args, part, arrays);
                 arrays.g = sum;
                 finish_arrival(lanes, args, part, arrays);
             });
}

template <class Block>
DILOCO_DEVICE void decode_sparse_block(const Block& block, const DecodeArgs& args, uint32_t index,
                                       SumMemory& memory) {
    with_sum(block, args.runs, args.terms, index, memory,
             [&](const auto& lanes, const Tile& part, Place& place, const auto& sum) {
                 store_tile<kPartQuads>(lanes, args.outs, part, place, sum);
             });
}

}  // namespace diloco::cuda
