// The kernels of the sparse formats: a CTA of 256 threads for each block of 4096 elements, for
// reduce within the caller's bound. One kernel serves all formats.
#include "cuda/launch.cuh"
#include "cuda/sparse_encode.h"
#include "cuda/sparse_step.h"

namespace diloco::cuda {
namespace {

// x = c(outer) - params + residual, or the weighted sum of runs + residual;  the k largest |x| of a
// block are sent as signs with one scale;  new residual = x minus what was sent.
// fp32 parameters: reads 8n bytes, with error feedback 12n, and writes 4n then. The code takes n /
// 50 bytes (topk64), of which reduce reads W.
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

// g = sum_i c_i decode(payload_i), then as step_kernel of outer_step.cu. Nesterov, fp32 parameters:
// reads 8n bytes and n / 50 a term (topk64), writes 12n.
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

// As arrival_kernel of outer_step.cu.
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

// outs = sum_i c_i decode(payload_i). Reads n / 50 bytes a term (topk64), writes 4n (fp32).
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
