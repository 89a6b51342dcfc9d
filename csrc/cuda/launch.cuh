// Launching: a warp for each tile or for a few neighbouring ones; within the queue's bound each
// warp takes every n-th of these. A grid that fills the device and no more, whose warps go on to
// the next tile, was 5 % slower on an H200.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "cuda/kernels.h"
#include "cuda/lanes.h"

namespace diloco::cuda {

// Whether code is compiled that needs more registers than on other devices.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr bool kIsSm8x = true;
#else
constexpr bool kIsSm8x = false;
#endif

constexpr int kThreads = kWarps * kLanes;

// Blocks that a multiprocessor of the device has room for.
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

// Enqueues `kernel` for the work of `num_warps` warps, kNumWarps of them a block.
template <int kNumWarps = kWarps, class... Args>
void launch(void (*kernel)(Args...), int64_t num_warps, Queue queue, const Args&... args) {
    if (num_warps == 0) return;
    check(cudaSetDevice(queue.device), "select the device");
    const auto blocks = static_cast<unsigned>(grid_blocks(num_warps, queue.max_blocks, kNumWarps));
    kernel<<<blocks, kNumWarps * kLanes, 0, static_cast<cudaStream_t>(queue.stream)>>>(args...);
    check(cudaGetLastError(), "launch a kernel");
}

// The warp's place in the grid.
DILOCO_DEVICE uint32_t warp_in_block() { return threadIdx.x / kLanes; }
DILOCO_DEVICE uint32_t first_warp() { return blockIdx.x * kWarps + warp_in_block(); }
DILOCO_DEVICE uint32_t grid_warps() { return gridDim.x * kWarps; }

// Calls f(index, end) for each group of neighbouring tiles of this warp, of all Runs or of the
// Rest; f takes the index to the end.
template <class Tiles, class F>
DILOCO_DEVICE void each_group(const Tiles& tiles, F&& f) {
    const uint32_t group = tiles.tiles_per_warp, skipped = (grid_warps() - 1) * group;
    for (uint32_t index = first_warp() * group; index < tiles.num_tiles; index += skipped) {
        const uint32_t left = tiles.num_tiles - index;
        f(index, index + (left < group ? left : group));
    }
}

// Calls f(index) for each of these tiles.
template <class Tiles, class F>
DILOCO_DEVICE void each_tile(const Tiles& tiles, F&& f) {
    each_group(tiles, [&](uint32_t& index, uint32_t end) {
        for (; index < end; ++index) f(index);
    });
}

}  // namespace diloco::cuda
