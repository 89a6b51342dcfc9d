#include "cuda/by_format.h"
#include "cuda/launch.cuh"
#include "cuda/step_tile.h"

namespace diloco::cuda {
namespace {

// The number of thread blocks that a multiprocessor is to run at a time: more if a tile's arrays
// leave registers for them. On an H200, with the fp32 wire, the kernel has 97 % of the speed of a
// copy with four blocks, and 82 % with three.
template <Format kFormat, bool kIsAdam>
constexpr int kStepBlocks =
    kIsAdam || (!wire::has_scales(kFormat) && kFormat != Format::kFp32) ? 3 : 4;

// Takes the outer step with gradient g = sum over terms i of c_i decode(payload_i), and merges
// outer into the parameters, as codec::merged() does if alpha is not 0. Traffic for n elements with
// Nesterov, one int8 term and fp32 parameters: reads 9n bytes, or 13n if alpha is not 0, and writes
// 12n; Adam reads and writes 4n more. One warp per tile.
template <Format kFormat, bool kIsAdam>
__global__ void __launch_bounds__(kThreads, kStepBlocks<kFormat, kIsAdam>)
    step_kernel(const __grid_constant__ StepArgs args) {
    if (args.verdict != nullptr && *args.verdict != 0) return;
    Place place;
    __shared__ __align__(16) float stages[kWarps][kStepTile + kStageSlack];
    const WarpLanes lanes(stages[warp_in_block()]);
    each_tile(args.runs, [&](uint32_t i) { step_tile<kFormat, kIsAdam>(lanes, args, i, place); });
}

// kAccumulate adds g to the sum of arrivals; kCommit adds g, and takes the outer step of
// codec::commit_update(). Traffic for n elements of one int8 term: kAccumulate reads 5n bytes and
// writes 4n; kCommit reads 13n and writes 8n. One warp per tile.
template <Format kFormat>
__global__ void __launch_bounds__(kThreads, 4)
    arrival_kernel(const __grid_constant__ StepArgs args) {
    if (args.verdict != nullptr && *args.verdict != 0) return;
    __shared__ __align__(16) float stages[kWarps][kStepTile + kStageSlack];
    const WarpLanes lanes(stages[warp_in_block()]);
    each_tile(args.runs, [&](uint32_t i) { arrival_tile<kFormat>(lanes, args, i); });
}

}  // namespace

void outer_step(const StepArgs& args, Format format, Queue queue) {
    if (wire::is_sparse(format)) return outer_step_sparse(args, queue);
    by_format(format, [&](auto constant) {
        constexpr Format kFormat = decltype(constant)::value;
        if (codec::is_arrival(args.constants.optimizer)) {
            launch(arrival_kernel<kFormat>, num_warps(args.runs), queue, args);
        } else if (args.constants.optimizer == codec::Optimizer::kAdam) {
            launch(step_kernel<kFormat, true>, num_warps(args.runs), queue, args);
        } else {
            launch(step_kernel<kFormat, false>, num_warps(args.runs), queue, args);
        }
    });
}

}  // namespace diloco::cuda
