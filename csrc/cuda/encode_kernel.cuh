// The kernel of encode and of reduce, which differ in where a tile's values come from.
#pragma once

#include "cuda/by_format.h"
#include "cuda/encode_tile.h"
#include "cuda/launch.cuh"

namespace diloco::cuda {
namespace {

// Blocks of a multiprocessor, for which registers are set aside: as many as leave enough of them.
// Small tiles with eight instead of seven are up to 6 % faster on an H200, though codes of eight
// bits then spill a register.
template <int kQuads, bool kStochastic>
constexpr int kEncodeBlocks = kQuads == 2   ? 8
                              : kQuads == 4 ? (kStochastic ? 4 : 5)
                                            : 3;

// x = c(outer) - params + residual, or the weighted sum of runs + residual;  scale = absmax / qmax;
// code = round(x / scale), by blocks.
// int8, blocks of 256, fp32 parameters: encode reads 8n bytes, reduce W (n + n / 128); both write
// n + n / 128; error feedback reads and writes 4n more each. A warp takes 16 tiles at most
// (reduce: 4), for reduce within the caller's bound.
template <Format kFormat, bool kStochastic, int kQuads, class Args>
__global__ void __launch_bounds__(kThreads, kEncodeBlocks<kQuads, kStochastic>)
    encode_kernel(const __grid_constant__ Args args) {
    __shared__ __align__(16) float stages[kWarps][kEncodeStageFloats<kQuads>];
    const WarpLanes lanes(stages[warp_in_block()]);
    WarpLanes::Of<int> bad{0};
    Place place;
    each_tile(args.target.runs, [&](uint32_t i) {
        encode_tile<kFormat, kStochastic, kQuads>(lanes, args, i, place, bad);
    });
    if (args.target.nonfinite != nullptr) {
        lanes.count(args.target.nonfinite, [&](int lane) { return bad[lane]; });
    }
}

template <class Args>
void launch_encode(const Args& args, Format format, bool is_stochastic, Queue queue) {
    by_tile(args, format, is_stochastic, [&](auto constant, auto stochastic, auto quads) {
        launch<Args>(encode_kernel<decltype(constant)::value, decltype(stochastic)::value,
                                   decltype(quads)::value, Args>,
                     args, num_warps(args.target.runs), queue);
    });
}

}  // namespace
}  // namespace diloco::cuda
