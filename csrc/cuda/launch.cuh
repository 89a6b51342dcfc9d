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

constexpr int kThreads = kWarps * kLanes;

inline void check(cudaError_t status, const char* what) {
    if (status == cudaSuccess) return;
    throw std::runtime_error(std::string("CUDA could not ") + what + ": " +
                             cudaGetErrorString(status));
}

inline int64_t num_warps(const Runs& runs) {
    return (int64_t{runs.num_tiles} + runs.tiles_per_warp - 1) / runs.tiles_per_warp;
}

// Enqueues `kernel` for the work of `num_warps` warps, kNumWarps of them a block.
template <class Args, int kNumWarps = kWarps>
void launch(void (*kernel)(Args), const Args& args, int64_t num_warps, Queue queue) {
    if (num_warps == 0) return;
    check(cudaSetDevice(queue.device), "select the device");
    const auto blocks = static_cast<unsigned>(grid_blocks(num_warps, queue.max_blocks, kNumWarps));
    kernel<<<blocks, kNumWarps * kLanes, 0, static_cast<cudaStream_t>(queue.stream)>>>(args);
    check(cudaGetLastError(), "launch a kernel");
}

// The warp's place in the grid.
DILOCO_DEVICE uint32_t warp_in_block() { return threadIdx.x / kLanes; }
DILOCO_DEVICE uint32_t first_warp() { return blockIdx.x * kWarps + warp_in_block(); }
DILOCO_DEVICE uint32_t grid_warps() { return gridDim.x * kWarps; }

// Calls f(index) for the tiles of this warp.
template <class F>
DILOCO_DEVICE void each_tile(const Runs& runs, F&& f) {
    const uint32_t step = grid_warps() * runs.tiles_per_warp;
    for (uint32_t first = first_warp() * runs.tiles_per_warp; first < runs.num_tiles;
         first += step) {
        const uint32_t left = runs.num_tiles - first;
        const uint32_t count = left < runs.tiles_per_warp ? left : runs.tiles_per_warp;
        for (uint32_t i = 0; i < count; ++i) f(first + i);
    }
}

}  // namespace diloco::cuda
