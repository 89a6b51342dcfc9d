// Launching: a persistent grid that fills the device or stays within the queue's bound, each warp
// taking every n-th tile.
#pragma once

#include <cuda_runtime.h>

#include <array>
#include <atomic>
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

// Blocks of `kernel` that the device runs at a time.
template <class Kernel>
int resident_blocks(Kernel kernel, int device, int num_threads) {
    int per_multiprocessor = 0, multiprocessors = 0;
    check(
        cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_multiprocessor, kernel, num_threads, 0),
        "tell how many blocks fit");
    check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device),
          "tell the number of multiprocessors");
    return per_multiprocessor * multiprocessors;
}

// Enqueues `kernel` for the work of `num_warps` warps, kNumWarps of them a block. `fits` keeps
// resident_blocks of each device.
using ResidentBlocks = std::array<std::atomic<int>, 64>;
template <class Args, int kNumWarps = kWarps>
void launch(void (*kernel)(Args), ResidentBlocks& fits, const Args& args, int64_t num_warps,
            Queue queue) {
    constexpr int kNumThreads = kNumWarps * kLanes;
    if (num_warps == 0) return;
    check(cudaSetDevice(queue.device), "select the device");
    std::atomic<int>& cached = fits[static_cast<size_t>(queue.device) % fits.size()];
    if (cached.load() == 0) cached = resident_blocks(kernel, queue.device, kNumThreads);
    const auto blocks =
        static_cast<unsigned>(grid_blocks(num_warps, cached.load(), queue.max_blocks, kNumWarps));
    kernel<<<blocks, kNumThreads, 0, static_cast<cudaStream_t>(queue.stream)>>>(args);
    check(cudaGetLastError(), "launch a kernel");
}

// The warp's place in the grid.
DILOCO_DEVICE uint32_t warp_in_block() { return threadIdx.x / kLanes; }
DILOCO_DEVICE uint32_t first_warp() { return blockIdx.x * kWarps + warp_in_block(); }
DILOCO_DEVICE uint32_t grid_warps() { return gridDim.x * kWarps; }

}  // namespace diloco::cuda
