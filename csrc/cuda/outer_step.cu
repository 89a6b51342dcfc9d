#include "cuda/by_format.h"
#include "cuda/launch.cuh"
#include "cuda/step_tile.h"

namespace diloco::cuda {
namespace {

// Blocks of a multiprocessor: more where the arrays of a tile leave registers for them. On an H200
// the fp32 wire has 97 % of a copy's speed with four of them, and 82 % with three.
template <Format kFormat, bool kIsAdam>
constexpr int kStepBlocks =
    kIsAdam || (!wire::has_scales(kFormat) && kFormat != Format::kFp32) ? 3 : 4;

// g = sum_i c_i decode(payload_i);  the optimizer's update of outer and its state;  params <-
// outer, or alpha params + (1 - alpha) outer rounded toward c(outer).
// Nesterov, int8, fp32 parameters: reads 9n bytes and writes 12n; Adam 4n more each. alpha reads
// the parameters, too: 4n. One warp per tile.
template <Format kFormat, bool kIsAdam>
__global__ void __launch_bounds__(kThreads, kStepBlocks<kFormat, kIsAdam>)
    step_kernel(const __grid_constant__ StepArgs args) {
    if (args.verdict != nullptr && *args.verdict != 0) return;
    Place place;
    __shared__ __align__(16) float stages[kWarps][kStepTile + kStageSlack];
    const WarpLanes lanes(stages[warp_in_block()]);
    each_tile(args.runs, [&](uint32_t i) { step_tile<kFormat, kIsAdam>(lanes, args, i, place); });
}

// d = pending + g: pending <- d, or with the last arrival m' = mu m + d and outer -= lr (direct d +
// ahead m' + behind m). int8, blocks of 256: reads 5n bytes and writes 4n; the last one reads 13n
// and writes 8n. One warp per tile.
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
