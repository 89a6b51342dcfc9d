// The CUDA operators, torch-free: each enqueues a kernel on `stream` (a cudaStream_t) of `device`
// and returns. `norms` enqueues two, and so do encode, reduce and decode: one of the whole tiles,
// unless `rest` is all, and one of the rest. Nothing is allocated, nothing waits. An error of the
// driver is a std::runtime_error with its text.
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
    int64_t max_blocks = 0;  // of the grid; 0: one for each piece of work
};

// Versions of CUDA, such as 12090: the runtime's and the driver's (0: there is none); architecture
// of the device, such as 900 for sm_90 (0: the driver is too old to tell); then each architecture
// of the kernels, rising: the last one has PTX for later devices.
std::vector<int64_t> support(int device);

constexpr int kWarps = 4;  // of a block

// The blocks of a grid for `num_warps` pieces of work, at most `max_blocks` unless that is 0. Each
// warp takes every n-th piece, so any number of blocks will do.
inline int64_t grid_blocks(int64_t num_warps, int64_t max_blocks, int warps_per_block = kWarps) {
    const int64_t blocks = (num_warps + warps_per_block - 1) / warps_per_block;
    return max_blocks > 0 && blocks > max_blocks ? max_blocks : blocks;
}

// By the format they call those of the sparse formats, whose kernels are in sparse.cu.
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

// Copies host data to device memory through kernel parameters, so that nothing refers to the host's
// memory afterwards, also in a captured graph. The size is a multiple of 16 bytes.
void upload(void* target, const void* data, size_t num_bytes, Queue queue);

}  // namespace diloco::cuda
