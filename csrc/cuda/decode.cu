// The kernels of decode, merge and norms, and the upload of long lists.
#include <algorithm>
#include <cstring>

#include "cuda/by_format.h"
#include "cuda/launch.cuh"
#include "cuda/norms_tile.h"
#include "cuda/step_tile.h"

namespace diloco::cuda {
namespace {

// The number of thread blocks that a multiprocessor is to run at a time: as many as leave each
// thread the registers for its codes and sums.
template <Format kFormat>
constexpr int kDecodeBlocks = kFormat == Format::kInt8   ? (kIsSm8x ? 12 : 14)
                              : kFormat == Format::kInt4 ? 14
                              : is_fp8(kFormat)          ? 12
                                                         : 8;

// outs = sum over terms i of c_i decode(payload_i), for the tiles of `rest`. For n elements it
// reads n + n / 128 bytes per term (int8, blocks of 256), and writes 4n (fp32).
template <Format kFormat>
__global__ void __launch_bounds__(kThreads, 5)
    decode_kernel(const __grid_constant__ DecodeArgs args, const __grid_constant__ Rest rest) {
    __shared__ __align__(16) float stages[kWarps][kStepTile + kStageSlack];
    const WarpLanes lanes(stages[warp_in_block()]);
    Place place;
    each_tile(rest, [&](uint32_t i) {
        if_left<kFormat, kDecodeQuads<kFormat>>(
            lanes, args, args.runs, rest, i, place,
            [&](const Tile& tile) { decode_tile<kFormat>(lanes, args, tile, place); });
    });
}

// As decode_kernel, for whole tiles; it skips the others.
template <Format kFormat>
__global__ void __launch_bounds__(kThreads, std::min(kDecodeBlocks<kFormat>, kMostBlocks))
    decode_whole_kernel(const __grid_constant__ DecodeArgs args) {
    const WarpLanes lanes(nullptr);
    each_group(args.runs, [&](uint32_t& index, uint32_t end) {
        decode_whole<kFormat>(lanes, args, index, end);
    });
}

// params = alpha params + (1 - alpha) outer, rounded as codec::merged() does. For n fp32 parameters
// it reads 4n bytes, or 8n if alpha is not 0, and writes 4n. One warp per 512 elements.
__global__ void __launch_bounds__(kThreads, 5)
    merge_kernel(const __grid_constant__ MergeArgs args) {
    __shared__ __align__(16) float stages[kWarps][kStepTile + kStageSlack];
    const WarpLanes lanes(stages[warp_in_block()]);
    Place place;
    each_tile(args.runs, [&](uint32_t i) { merge_tile(lanes, args, i, place); });
}

__host__ __device__ int64_t num_norm_chunks(const NormsArgs& args) {
    return (args.num_elements + codec::kNormChunk - 1) / codec::kNormChunk;
}

// The sum of squares and the count of each chunk. Reads 8n bytes for n fp32 parameters. One warp
// per 65536 elements.
__global__ void __launch_bounds__(kThreads, 3)
    norms_kernel(const __grid_constant__ NormsArgs args) {
    __shared__ __align__(16) float stages[kWarps][kNormStageFloats];
    const WarpLanes lanes(stages[warp_in_block()]);
    Place place;
    const int64_t num_chunks = num_norm_chunks(args);
    for (int64_t i = first_warp(); i < num_chunks; i += grid_warps()) {
        norms_chunk(lanes, args, i, place);
    }
}

// The sum over all chunks, in order. Reads 16 bytes per chunk. A single warp.
__global__ void __launch_bounds__(kThreads) total_kernel(const __grid_constant__ NormsArgs args) {
    __shared__ __align__(16) float stage[kTotalStageFloats];
    if (first_warp() == 0) norms_total(WarpLanes(stage), args);
}

struct Packet {
    static constexpr size_t kBytes = 3584;
    uint4* target;
    uint32_t count;
    uint4 words[kBytes / sizeof(uint4)];
};

__global__ void __launch_bounds__(kThreads) upload_kernel(const __grid_constant__ Packet packet) {
    for (uint32_t i = threadIdx.x; i < packet.count; i += kThreads) {
        packet.target[i] = packet.words[i];
    }
}

}  // namespace

void decode(const DecodeArgs& args, const Rest& rest, Format format, Queue queue) {
    if (wire::is_sparse(format)) return decode_sparse(args, queue);
    by_format(format, [&](auto constant) {
        constexpr Format kFormat = decltype(constant)::value;
        if constexpr (wire::has_element_codes(kFormat)) {
            if (!rest.is_all) {
                launch(decode_whole_kernel<kFormat>, num_warps(args.runs), queue, args);
            }
        }
        launch(decode_kernel<kFormat>, num_warps(rest), queue, args, rest);
    });
}

void merge(const MergeArgs& args, Queue queue) {
    launch(merge_kernel, num_warps(args.runs), queue, args);
}

void norms(const NormsArgs& args, Queue queue) {
    launch(norms_kernel, num_norm_chunks(args), queue, args);
    launch(total_kernel, 1, queue, args);
}

void upload(void* target, const void* data, size_t num_bytes, Queue queue) {
    for (size_t at = 0; at < num_bytes; at += Packet::kBytes) {
        const size_t size = num_bytes - at < Packet::kBytes ? num_bytes - at : Packet::kBytes;
        Packet packet;
        packet.target = reinterpret_cast<uint4*>(static_cast<char*>(target) + at);
        packet.count = static_cast<uint32_t>(size / sizeof(uint4));
        std::memcpy(packet.words, static_cast<const char*>(data) + at, size);
        launch(upload_kernel, 1, queue, packet);
    }
}

}  // namespace diloco::cuda
