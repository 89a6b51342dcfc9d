// Launching a kernel with a warp for each group of consecutive tiles. If Queue::max_blocks allows
// fewer warps, each warp takes every n-th group. A smaller grid that just fills the device, whose
// warps take many groups each, was 5 % slower on an H200.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "cuda/kernels.h"
#include "cuda/lanes.h"

namespace diloco::cuda {

// Whether the code is compiled for an architecture before sm_90, where it needs more registers.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr bool kIsSm8x = true;
#else
constexpr bool kIsSm8x = false;
#endif

constexpr int kThreads = kWarps * kLanes;

// The most thread blocks that a multiprocessor of the device has room for.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
constexpr int kMostBlocks = 32 / kWarps;
#elif defined(__CUDA_ARCH__) && \
    ((__CUDA_ARCH__ > 800 && __CUDA_ARCH__ < 900) || __CUDA_ARCH__ >= 1100)
constexpr int kMostBlocks = 48 / kWarps;
#else
constexpr int kMostBlocks = 64 / kWarps;
#endif

inline void check(cudaError_t status, const char* what) {
    if (status == cudaSuccess) return;
    throw std::runtime_error(std::string("CUDA could not ") + what + ": " +
                             cudaGetErrorString(status));
}

template <class Tiles>
int64_t num_warps(const Tiles& tiles) {
    return (int64_t{tiles.num_tiles} + tiles.tiles_per_warp - 1) / tiles.tiles_per_warp;
}

// Enqueues `kernel` with at most `num_warps` warps, kNumWarps in each thread block.
template <int kNumWarps = kWarps, class... Args>
void launch(void (*kernel)(Args...), int64_t num_warps, Queue queue, const Args&... args) {
    if (num_warps == 0) return;
    check(cudaSetDevice(queue.device), "select the device");
    const auto blocks = static_cast<unsigned>(grid_blocks(num_warps, queue.max_blocks, kNumWarps));
    kernel<<<blocks, kNumWarps * kLanes, 0, static_cast<cudaStream_t>(queue.stream)>>>(args...);
    check(cudaGetLastError(), "launch a kernel");
}

// The number of this warp in its block and in the grid, and the number of all warps.
DILOCO_DEVICE uint32_t warp_in_block() { return threadIdx.x / kLanes; }
DILOCO_DEVICE uint32_t first_warp() { return blockIdx.x * kWarps + warp_in_block(); }
DILOCO_DEVICE uint32_t grid_warps() { return gridDim.x * kWarps; }

// Calls f(index, end) for each group of consecutive tiles of this warp; f must advance `index` to
// `end`. `tiles` is a Runs or a Rest.
template <class Tiles, class F>
DILOCO_DEVICE void each_group(const Tiles& tiles, F&& f) {
    const uint32_t group = tiles.tiles_per_warp, skipped = (grid_warps() - 1) * group;
    for (uint32_t index = first_warp() * group; index < tiles.num_tiles; index += skipped) {
        const uint32_t left = tiles.num_tiles - index;
        f(index, index + (left < group ? left : group));
    }
}

// Calls f(index) for each tile of this warp.
template <class Tiles, class F>
DILOCO_DEVICE void each_tile(const Tiles& tiles, F&& f) {
    each_group(tiles, [&](uint32_t& index, uint32_t end) {
        for (; index < end; ++index) f(index);
    });
}

}  // namespace diloco::cuda
