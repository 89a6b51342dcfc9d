// The CUDA operators, without torch. Each enqueues kernels on the stream (a cudaStream_t) of a
// Queue and returns, without allocating or waiting. encode, reduce and decode enqueue up to two
// kernels, one for whole tiles (tiles.h) unless rest.is_all, and one for the other tiles; on sparse
// wires one. norms enqueues two, upload() one for each 3584 bytes, the others one. An error of the
// driver is thrown as a std::runtime_error with its text.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cuda/arguments.h"
#include "wire/format.h"

namespace diloco::cuda {

struct Queue {
    int device;
    void* stream;
    int64_t max_blocks = 0;  // the most thread blocks of a grid; 0: no limit
};

// Returns the CUDA version of the runtime, such as 12090, and of the driver (0: there is none),
// then the architecture of the device, such as 900 for sm_90 (0: the driver is too old to tell),
// then the architectures of the kernels, rising. The last one has PTX, which later devices can
// compile.
std::vector<int64_t> support(int device);

constexpr int kWarps = 4;  // warps of a thread block

// The number of thread blocks of a grid for `num_warps` warps, at most `max_blocks` unless that is
// 0. The kernels do all work with any number of blocks: with fewer, each warp does more.
inline int64_t grid_blocks(int64_t num_warps, int64_t max_blocks, int warps_per_block = kWarps) {
    const int64_t blocks = (num_warps + warps_per_block - 1) / warps_per_block;
    return max_blocks > 0 && blocks > max_blocks ? max_blocks : blocks;
}

// The functions without "_sparse" call the functions with it if the format is sparse.
void encode(const EncodeArgs& args, const Rest& rest, wire::Format format, bool is_stochastic,
            Queue queue);
void reduce(const ReduceArgs& args, const Rest& rest, wire::Format format, bool is_stochastic,
            Queue queue);
void outer_step(const StepArgs& args, wire::Format format, Queue queue);
void decode(const DecodeArgs& args, const Rest& rest, wire::Format format, Queue queue);
void merge(const MergeArgs& args, Queue queue);
void norms(const NormsArgs& args, Queue queue);
void digest(const DigestArgs& args, Queue queue);

void encode_sparse(const EncodeArgs& args, Queue queue);
void reduce_sparse(const ReduceArgs& args, Queue queue);
void outer_step_sparse(const StepArgs& args, Queue queue);
void decode_sparse(const DecodeArgs& args, Queue queue);

// Copies host data to device memory by way of kernel parameters, so that the host's memory is free
// at once, even if the call is captured in a CUDA graph. The size is a multiple of 16 bytes.
void upload(void* target, const void* data, size_t num_bytes, Queue queue);

}  // namespace diloco::cuda
