// The kernels' parameters, passed by value. Fragments, payloads and runs are as in
// docs/developers/wire-formats.md; indices count elements of the fragment.
//
// The lists of tensors and of terms lie in the parameters up to some length, so that a launch
// needs nothing but itself; longer ones lie in device memory (kernels.h, upload).
#pragma once

#include <cstdint>

#include "codec/kernels.h"
#include "wire/format.h"

namespace diloco::cuda {

using codec::DType;

// One tensor. `origin` is the address that the fragment's element 0 would have if the tensor went
// on before its begin; begin and dtype share a word. A list ends with an entry whose begin is the
// fragment's end.
struct Segment {
    uint64_t origin;
    int64_t begin_and_dtype;

    DILOCO_HD Segment of(const void* data, DType dtype, int64_t begin) {
        const int64_t size = dtype == DType::kFp32 ? 4 : 2;
        return {reinterpret_cast<uint64_t>(data) - static_cast<uint64_t>(begin * size),
                begin * 4 + static_cast<int64_t>(dtype)};
    }
};

struct Term {
    const uint8_t* payload;
    float coefficient;
};

// More than 4 KiB of kernel parameters need CUDA 12.1.
constexpr int kInlineSegments = 320;
constexpr int kInlineTerms = 32;

struct Segments {
    const Segment* in_memory;  // null: the list is inlined
    int32_t count;
    Segment inlined[kInlineSegments + 1];
};

// Terms of dot products (dot_tile.h) that are read at once, and the most that there may be.
constexpr int kDotTerms = 4;
constexpr int kMostDotTerms = 16;

struct Terms {
    const Term* in_memory;
    int32_t count;
    bool are_aligned;      // all payloads, to wire::kAlignment
    int32_t dot_exponent;  // log2 of every coefficient; 1: reduce has no dot products for them
    Term inlined[kInlineTerms];
};

DILOCO_DEVICE int64_t begin_of(const Segment& segment) { return segment.begin_and_dtype >> 2; }
DILOCO_DEVICE DType dtype_of(const Segment& segment) {
    return static_cast<DType>(segment.begin_and_dtype & 3);
}

DILOCO_DEVICE const Segment* list_of(const Segments& segments) {
    return segments.in_memory != nullptr ? segments.in_memory : segments.inlined;
}
// With one index for all lanes; the parameters are not read through a pointer.
DILOCO_DEVICE Segment segment_at(const Segments& segments, int32_t i) {
    if (segments.in_memory == nullptr) return segments.inlined[i];
    return segments.in_memory[i];
}
DILOCO_DEVICE Term term_at(const Terms& terms, int t) {
    if (terms.in_memory == nullptr) return terms.inlined[t];
    return terms.in_memory[t];
}

// Elements of a tile. A tile of encode and reduce holds whole blocks: it is as small as an operator
// likes where the blocks are, so that a multiprocessor has room for more warps, and else large.
constexpr int kEncodeTile = 256;
constexpr int kReduceTile = 512;
constexpr int kLargeTile = 1024;
constexpr bool is_small_tile(int tile, wire::Format format, int64_t block_size) {
    return wire::has_element_codes(format) && block_size <= tile;
}
// The blocks for which encode, reduce and decode have kernels of whole tiles.
constexpr int kUsualBlock = 256;
// A tile of all other operators.
constexpr int kStepTile = 512;
constexpr int decode_tile_of(wire::Format format) {
    return wire::has_element_codes(format) ? 256 : kStepTile;
}
// The most neighbouring tiles of a warp. Where much is computed for a tile, the start of a warp and
// its search for the tensor are worth several tiles; where most of the time is the memory's, one.
// Measured on an H200 (docs/measurements/gpu-kernels.md).
constexpr uint32_t kEncodeTilesPerWarp = 16;
constexpr uint32_t kReduceTilesPerWarp = 4;
constexpr uint32_t kDecodeTilesPerWarp = 16;
// Of any operator on a sparse wire: a block, which eight warps share.
constexpr int kSparseTile = 4096;

// The runs of elements [begin, end), cut into tiles, of which none crosses the end of a run.
struct Runs {
    int64_t begin;
    int64_t end;
    int64_t run_elements;
    int64_t first_run;
    int64_t run_bytes;
    int64_t code_offset;
    int32_t block_size;
    int32_t block_shift;
    int32_t log_kept;  // of the elements that a sparse format keeps of a block
    uint32_t tiles_per_run;
    uint32_t num_tiles;
    uint32_t tiles_per_warp;  // neighbouring ones
};

// Neighbouring tiles: those from number `first` on. `before` of the rest are in earlier ranges.
struct TileRange {
    uint32_t first;
    uint32_t before;
};

// The tiles among which are all that a kernel of whole tiles leaves: that are cut, that lie in
// several tensors, or in one whose address is odd. They are the work of a second launch.
struct Rest {
    const TileRange* in_memory;  // null: the list is inlined
    int32_t count;
    uint32_t num_tiles;       // of all ranges
    uint32_t tiles_per_warp;  // neighbouring ones
    bool is_all;              // all tiles, in no list: there is no launch of whole tiles
    TileRange inlined[kInlineSegments];
};

struct EncodeTarget {
    Runs runs;
    uint8_t* payload;
    const void* residual;  // or null
    void* new_residual;    // or null
    DType residual_dtype;
    int64_t* nonfinite;    // or null
    uint64_t index_begin;  // index in the fragment of element 0
    uint64_t key;
};

struct EncodeArgs {
    EncodeTarget target;
    const float* outer;  // or null
    Segments params;
};

// Element 0 of the run is element 0 here.
struct ReduceArgs {
    EncodeTarget target;
    Terms terms;
};

struct StepArgs {
    Runs runs;
    codec::StepConstants constants;
    const int64_t* verdict;  // or null; nothing is done when it is not zero
    float* outer;
    float* momentum;  // unused by SGD; Adam's first moment; arrivals: or null
    float* second;    // Adam's second moment; what is pending of arrivals, or null
    Segments params;  // unused by arrivals
    Terms terms;
};

struct DecodeArgs {
    Runs runs;
    Segments outs;
    Terms terms;
};

struct MergeArgs {
    Runs runs;
    const float* outer;
    float alpha;
    float one_minus_alpha;
    Segments params;
};

struct NormsArgs {
    int64_t num_elements;
    const float* outer;  // or null
    double* squares;     // one a chunk of kNormChunk elements
    int64_t* counts;     // likewise
    double* out;         // [2]
    Segments params;
};

struct DigestArgs {
    uint64_t data;  // an address
    uint64_t num_bytes;
    uint64_t first_word;
    uint64_t* sums;  // [2]: of products, of words
};

}  // namespace diloco::cuda
