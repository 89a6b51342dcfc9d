// The kernels of the sparse formats: a thread block of 256 threads for each block of 4096 elements.
// If Queue::max_blocks allows fewer, a thread block takes several. One kernel serves all formats.
#include "cuda/launch.cuh"
#include "cuda/sparse_encode.h"
#include "cuda/sparse_step.h"

namespace diloco::cuda {
namespace {

// Encodes x = c(outer) - params + residual, or the weighted sum of runs + residual: the k largest
// |x| of a block are sent as signs with one scale. The new residual is x minus the decoded values.
// Traffic for n elements, fp32 parameters: reads 8n bytes; error feedback reads and writes 4n more.
// Writes n / 55 bytes of codes (topk64); reduce of W runs reads W n / 55.
template <class Args, class Memory>
__global__ void __launch_bounds__(kBlockThreads, 3)
    sparse_encode_kernel(const __grid_constant__ Args args) {
    __shared__ __align__(16) float stages[kBlockWarps][kSparseStageFloats];
    __shared__ Memory memory;
    const BlockWarps block(stages[0], kSparseStageFloats);
    for (uint32_t i = blockIdx.x; i < args.target.runs.num_tiles; i += gridDim.x) {
        encode_sparse_block(block, args, i, memory);
    }
}

// As step_kernel in outer_step.cu, for sparse payloads. With Nesterov and n fp32 parameters it
// reads 8n bytes, and n / 55 per term (topk64), and writes 12n.
template <bool kIsAdam>
__global__ void __launch_bounds__(kBlockThreads, 2)
    sparse_step_kernel(const __grid_constant__ StepArgs args) {
    if (args.verdict != nullptr && *args.verdict != 0) return;
    __shared__ __align__(16) float stages[kBlockWarps][kSparseStepFloats];
    __shared__ SumMemory memory;
    const BlockWarps block(stages[0], kSparseStepFloats);
    for (uint32_t i = blockIdx.x; i < args.runs.num_tiles; i += gridDim.x) {
        step_sparse_block<kIsAdam>(block, args, i, memory);
    }
}

// As arrival_kernel in outer_step.cu, for sparse payloads.
__global__ void __launch_bounds__(kBlockThreads, 2)
    sparse_arrival_kernel(const __grid_constant__ StepArgs args) {
    if (args.verdict != nullptr && *args.verdict != 0) return;
    __shared__ __align__(16) float stages[kBlockWarps][kSparseStepFloats];
    __shared__ SumMemory memory;
    const BlockWarps block(stages[0], kSparseStepFloats);
    for (uint32_t i = blockIdx.x; i < args.runs.num_tiles; i += gridDim.x) {
        arrive_sparse_block(block, args, i, memory);
    }
}

// outs = sum over terms i of c_i decode(payload_i). For n elements it reads n / 55 bytes per term
// (topk64), and writes 4n (fp32).
__global__ void __launch_bounds__(kBlockThreads, 4)
    sparse_decode_kernel(const __grid_constant__ DecodeArgs args) {
    __shared__ __align__(16) float stages[kBlockWarps][kSparseStepFloats];
    __shared__ SumMemory memory;
    const BlockWarps block(stages[0], kSparseStepFloats);
    for (uint32_t i = blockIdx.x; i < args.runs.num_tiles; i += gridDim.x) {
        decode_sparse_block(block, args, i, memory);
    }
}

template <class Args>
void launch_sparse(void (*kernel)(Args), const Args& args, const Runs& runs, Queue queue) {
    launch<kBlockWarps>(kernel, int64_t{kBlockWarps} * runs.num_tiles, queue, args);
}

}  // namespace

void encode_sparse(const EncodeArgs& args, Queue queue) {
    launch_sparse<EncodeArgs>(sparse_encode_kernel<EncodeArgs, EncodeMemory>, args,
                              args.target.runs, queue);
}

void reduce_sparse(const ReduceArgs& args, Queue queue) {
    launch_sparse<ReduceArgs>(sparse_encode_kernel<ReduceArgs, ReduceMemory>, args,
                              args.target.runs, queue);
}

void outer_step_sparse(const StepArgs& args, Queue queue) {
    if (codec::is_arrival(args.constants.optimizer)) {
        launch_sparse<StepArgs>(sparse_arrival_kernel, args, args.runs, queue);
    } else if (args.constants.optimizer == codec::Optimizer::kAdam) {
        launch_sparse<StepArgs>(sparse_step_kernel<true>, args, args.runs, queue);
    } else {
        launch_sparse<StepArgs>(sparse_step_kernel<false>, args, args.runs, queue);
    }
}

void decode_sparse(const DecodeArgs& args, Queue queue) {
    launch_sparse<DecodeArgs>(sparse_decode_kernel, args, args.runs, queue);
}

}  // namespace diloco::cuda
