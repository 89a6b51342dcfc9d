// A block of a sparse format (wire/sparse.h) on a CUDA thread block: each of its eight warps has a
// part of 512 of the 4096 elements, and holds it as a tile (tiles.h). The number of kept elements
// is an argument, so that one kernel serves all sparse formats.
//
// A word is 32 bits of the code. Every region of the code begins with a new word.
#pragma once

#include "cuda/block_warps.h"
#include "cuda/step_tile.h"
#include "wire/sparse.h"

namespace diloco::cuda {

constexpr int kPartQuads = kStepQuads;
constexpr int kPart = kStepTile;
static_assert(kPart * kBlockWarps == kSparseTile &&
              kSparseTile == wire::own_block(Format::kTopk64));

template <class Block>
using BlockQuads = typename Block::template Each<StepQuads<typename Block::Lanes>>;

// The layout of a code in a sparse format, in words.
struct SparseCode {
    int log_kept;

    DILOCO_DEVICE int num_kept() const { return 1 << log_kept; }
    DILOCO_DEVICE int low_bits() const { return 12 - log_kept; }
    DILOCO_DEVICE int plane_words() const { return num_kept() / 32; }
    DILOCO_DEVICE int upper_word() const { return low_bits() * plane_words(); }
    DILOCO_DEVICE int sign_word() const { return upper_word() + 2 * plane_words(); }
    DILOCO_DEVICE int num_words() const { return sign_word() + plane_words(); }
};

constexpr int kMostKept = 256;
constexpr int kMostWords = wire::own_bytes(Format::kTopk256) / 4;
constexpr int kMostUpperWords = 2 * kMostKept / 32;

DILOCO_DEVICE Tile sparse_tile_at(const Runs& runs, uint32_t index) {
    const uint32_t run = index / runs.tiles_per_run;
    const uint32_t block = index - run * runs.tiles_per_run;
    const int64_t within = static_cast<int64_t>(block) * kSparseTile;
    const int64_t run_begin = runs.begin + run * runs.run_elements;
    const int64_t run_end = run_begin + runs.run_elements;
    const int64_t left = (run_end < runs.end ? run_end : runs.end) - run_begin - within;
    const int64_t start = (runs.first_run + run) * runs.run_bytes;
    const int64_t code_bytes = 4 * SparseCode{runs.log_kept}.num_words();
    Tile tile;
    tile.first = run_begin + within;
    tile.size = static_cast<int32_t>(left < kSparseTile ? left : kSparseTile);
    tile.scales = start + 2 * static_cast<int64_t>(block);
    tile.codes = start + runs.code_offset + block * code_bytes;
    tile.run = start;
    tile.first_row = 0;
    return tile;
}

// The part of a block that belongs to a warp; its size may be 0.
DILOCO_DEVICE Tile part_of(const Tile& tile, int warp) {
    Tile part = tile;
    const int32_t left = tile.size - kPart * warp;
    part.first += kPart * warp;
    part.size = left < 0 ? 0 : left < kPart ? left : kPart;
    return part;
}

// Element `index` of the block, which is on the stage of the warp that has this part.
template <class Block>
DILOCO_DEVICE float& staged(const Block& block, uint32_t index) {
    return block.stage(static_cast<int>(index / kPart))[index % kPart];
}

DILOCO_DEVICE bool is_aligned(const uint8_t* payload) {
    return reinterpret_cast<uint64_t>(payload) % wire::kAlignment == 0;
}

DILOCO_DEVICE uint32_t load_word(const uint8_t* p, bool is_aligned) {
    const auto address = reinterpret_cast<uint64_t>(p);
    if (is_aligned) return load_global<uint32_t>(address);
    uint32_t word = 0;
    DILOCO_UNROLL
    for (int b = 0; b < 4; ++b) {
        word |= static_cast<uint32_t>(load_global<uint8_t>(address + b)) << (8 * b);
    }
    return word;
}

DILOCO_DEVICE void store_word(uint8_t* p, uint32_t word, bool is_aligned) {
    const auto address = reinterpret_cast<uint64_t>(p);
    if (is_aligned) return store_global(address, word);
    DILOCO_UNROLL
    for (int b = 0; b < 4; ++b) store_global(address + b, static_cast<uint8_t>(word >> (8 * b)));
}

}  // namespace diloco::cuda
