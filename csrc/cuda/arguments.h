// The kernels' parameters, passed by value. docs/developers/wire-formats.md explains fragments,
// payloads and runs; indices count elements of the fragment.
//
// A short list of tensors or terms is a part of the parameters, so that a launch needs no copy to
// the device. A longer list is in device memory (upload() in kernels.h).
#pragma once

#include <cstdint>

#include "codec/kernels.h"
#include "wire/format.h"

namespace diloco::cuda {

using codec::DType;

// One tensor of a fragment. `origin` is the tensor's address minus the bytes of `begin` elements,
// so that element e of the fragment is at origin + e * size. `begin` and dtype share a word. A list
// ends with an entry whose begin is the end of the elements that a kernel works on.
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

// The longest lists in the parameters. More than 4 KiB of kernel parameters need CUDA 12.1.
constexpr int kInlineSegments = 320;
constexpr int kInlineTerms = 32;

struct Segments {
    const Segment* in_memory;  // null: the list is inlined
    int32_t count;
    Segment inlined[kInlineSegments + 1];
};

// reduce by dot products (dot_tile.h) reads kDotTerms terms at once, and takes at most
// kMostDotTerms.
constexpr int kDotTerms = 4;
constexpr int kMostDotTerms = 16;

struct Terms {
    const Term* in_memory;  // null: the list is inlined
    int32_t count;
    bool are_aligned;      // whether all payloads are aligned to wire::kAlignment
    int32_t dot_exponent;  // log2 of every coefficient; 1: reduce cannot use dot products
    Term inlined[kInlineTerms];
};

DILOCO_DEVICE int64_t begin_of(const Segment& segment) { return segment.begin_and_dtype >> 2; }
DILOCO_DEVICE DType dtype_of(const Segment& segment) {
    return static_cast<DType>(segment.begin_and_dtype & 3);
}

DILOCO_DEVICE const Segment* list_of(const Segments& segments) {
    return segments.in_memory != nullptr ? segments.in_memory : segments.inlined;
}
// Entry i, which must be the same for all lanes. A list in the parameters is not read through a
// pointer, which would be slower.
DILOCO_DEVICE Segment segment_at(const Segments& segments, int32_t i) {
    if (segments.in_memory == nullptr) return segments.inlined[i];
    return segments.in_memory[i];
}
DILOCO_DEVICE Term term_at(const Terms& terms, int t) {
    if (terms.in_memory == nullptr) return terms.inlined[t];
    return terms.in_memory[t];
}

// The numbers of elements in a tile (tiles.h). A tile of encode and reduce has complete blocks. For
// small blocks the tile is small, so that a multiprocessor has room for more warps; else it is
// large.
constexpr int kEncodeTile = 256;
constexpr int kReduceTile = 512;
constexpr int kLargeTile = 1024;
constexpr bool is_small_tile(int tile, wire::Format format, int64_t block_size) {
    return wire::has_element_codes(format) && block_size <= tile;
}
// The block size for which encode, reduce and decode have kernels for whole tiles (tiles.h).
constexpr int kUsualBlock = 256;
// The number of elements in a tile of outer steps and merge, and of decode in rotated formats.
constexpr int kStepTile = 512;
constexpr int decode_tile_of(wire::Format format) {
    return wire::has_element_codes(format) ? 256 : kStepTile;
}
// The most consecutive tiles that a warp works on. With several tiles, starting the warp and
// finding the tensor costs less per tile. The numbers were measured on an H200
// (docs/measurements/gpu-kernels.md).
constexpr uint32_t kEncodeTilesPerWarp = 16;
constexpr uint32_t kReduceTilesPerWarp = 4;
constexpr uint32_t kDecodeTilesPerWarp = 16;
// The tile of all operators on a sparse wire: one block, on which eight warps work together.
constexpr int kSparseTile = 4096;

// The runs of elements [begin, end), divided into tiles. No tile crosses the end of a run.
struct Runs {
    int64_t begin;
    int64_t end;
    int64_t run_elements;
    int64_t first_run;
    int64_t run_bytes;
    int64_t code_offset;
    int32_t block_size;
    int32_t block_shift;
    int32_t log_kept;  // log2 of the number of elements that a sparse format keeps of a block
    uint32_t tiles_per_run;
    uint32_t num_tiles;
    uint32_t tiles_per_warp;  // consecutive tiles on which a warp works
};

// A range of consecutive tiles, from tile number `first` on. Earlier ranges of the list have
// `before` tiles together.
struct TileRange {
    uint32_t first;
    uint32_t before;
};

// The tiles for the second launch of a kernel: all that may not be whole (tiles.h), because they
// are cut short, have elements of several tensors, or lie in a misaligned tensor.
struct Rest {
    const TileRange* in_memory;  // null: the list is inlined
    int32_t count;               // ranges in the list
    uint32_t num_tiles;          // tiles of all ranges
    uint32_t tiles_per_warp;     // consecutive tiles on which a warp works
    bool is_all;  // all tiles are meant, without a list: no launch for whole tiles is needed
    TileRange inlined[kInlineSegments];
};

struct EncodeTarget {
    Runs runs;
    uint8_t* payload;
    const void* residual;  // or null
    void* new_residual;    // or null
    DType residual_dtype;
    int64_t* nonfinite;    // or null
    uint64_t index_begin;  // the index of element 0 in the fragment, for random bits
    uint64_t key;
};

struct EncodeArgs {
    EncodeTarget target;
    const float* outer;  // or null
    Segments params;
};

// reduce works on a single run; element 0 is the run's first.
struct ReduceArgs {
    EncodeTarget target;
    Terms terms;
};

struct StepArgs {
    Runs runs;
    codec::StepConstants constants;
    const int64_t* verdict;  // in device memory, or null; if not zero, the kernel does nothing
    float* outer;
    float* momentum;  // Adam: the first moment; unused by SGD; may be null for kCommit
    float* second;    // Adam: the second moment; kAccumulate, kCommit: the sum of arrivals, or null
    Segments params;  // unused by kAccumulate and kCommit
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
    double* squares;     // the sum of squares of each chunk of kNormChunk elements
    int64_t* counts;     // the number of bad elements of each chunk
    double* out;         // [2]: the sum of all squares, the number of all bad elements
    Segments params;
};

struct DigestArgs {
    uint64_t data;  // an address
    uint64_t num_bytes;
    uint64_t first_word;
    uint64_t* sums;  // [2]: the sum of products, and the sum of words (wire/digest.h)
};

}  // namespace diloco::cuda
