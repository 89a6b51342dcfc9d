#include "cuda/by_format.h"
#include "cuda/encode_tile.h"
#include "cuda/launch.cuh"

namespace diloco::cuda {
namespace {

// x = sum_i w_i decode(run_i) + residual, encoded once.
// Reads W (n + n / 128) bytes, writes n + n / 128 (int8, blocks of 256). One warp per 1024
// elements.
template <Format kFormat, bool kStochastic>
__global__ void __launch_bounds__(kThreads, 3)
    reduce_kernel(const __grid_constant__ ReduceArgs args) {
    __shared__ __align__(16) float stages[kWarps][kEncodeTile];
    const WarpLanes lanes(stages[warp_in_block()]);
    WarpLanes::Of<int> bad{0};
    for (uint32_t i = first_warp(); i < args.target.runs.num_tiles; i += grid_warps()) {
        reduce_tile<kFormat, kStochastic>(lanes, args, i, bad);
    }
    if (args.target.nonfinite != nullptr) {
        lanes.count(args.target.nonfinite, [&](int lane) { return bad[lane]; });
    }
}

}  // namespace

void reduce(const ReduceArgs& args, Format format, bool is_stochastic, Queue queue) {
    by_rounding(format, is_stochastic, [&](auto constant, auto stochastic) {
        static ResidentBlocks fits{};
        launch<ReduceArgs>(reduce_kernel<decltype(constant)::value, decltype(stochastic)::value>,
                           fits, args, args.target.runs.num_tiles, queue);
    });
}

}  // namespace diloco::cuda
