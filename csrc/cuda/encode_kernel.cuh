// The kernels of encode and of reduce. They differ only in how a tile's values are loaded.
#pragma once

#include "cuda/by_format.h"
#include "cuda/encode_tile.h"
#include "cuda/launch.cuh"

namespace diloco::cuda {
namespace {

// The number of thread blocks that a multiprocessor is to run at a time: as many as leave each
// thread enough registers.
template <int kQuads, bool kStochastic>
constexpr int kEncodeBlocks = kQuads == 2   ? 8
                              : kQuads == 4 ? (kStochastic ? 4 : 5)
                                            : 3;
template <int kQuads, bool kStochastic>
constexpr int kWholeBlocks = kQuads == 2              ? (kStochastic ? 9 : 10)
                             : kStochastic || kIsSm8x ? 8
                                                      : 9;

// Encodes x = c(outer) - params + residual, or the weighted sum of runs + residual: for each block
// scale = absmax / qmax, then code = round(x / scale). Takes the tiles of `rest`.
// Traffic for n elements in int8, blocks of 256, fp32 parameters: encode reads 8n bytes, reduce of
// W runs reads W (n + n / 128); both write n + n / 128. Error feedback reads and writes 4n more.
template <Format kFormat, bool kStochastic, int kQuads, class Args>
__global__ void __launch_bounds__(kThreads, kEncodeBlocks<kQuads, kStochastic>)
    encode_kernel(const __grid_constant__ Args args, const __grid_constant__ Rest rest) {
    __shared__ __align__(16) float stages[kWarps][kEncodeStageFloats<kQuads>];
    const WarpLanes lanes(stages[warp_in_block()]);
    WarpLanes::Of<int> bad{0};
    Place place;
    each_tile(rest, [&](uint32_t i) {
        if_left<kFormat, kQuads>(
            lanes, args, args.target.runs, rest, i, place, [&](const Tile& tile) {
                encode_tile<kFormat, kStochastic, kQuads>(lanes, args, tile, place, bad);
            });
    });
    count_bad(lanes, args.target, bad);
}

// As encode_kernel, for whole tiles; it skips the others.
template <Format kFormat, bool kStochastic, int kQuads, class Args>
__global__ void __launch_bounds__(kThreads, kWholeBlocks<kQuads, kStochastic>)
    encode_whole_kernel(const __grid_constant__ Args args) {
    const WarpLanes lanes(nullptr);
    WarpLanes::Of<int> bad{0};
    each_group(args.target.runs, [&](uint32_t& index, uint32_t end) {
        encode_whole<kFormat, kStochastic, kQuads>(lanes, args, index, end, bad);
    });
    count_bad(lanes, args.target, bad);
}

template <class Args>
void launch_encode(const Args& args, const Rest& rest, Format format, bool is_stochastic,
                   Queue queue) {
    by_tile(args, format, is_stochastic, [&](auto constant, auto stochastic, auto quads) {
        constexpr Format kFormat = decltype(constant)::value;
        constexpr bool kStochastic = decltype(stochastic)::value;
        constexpr int kQuads = decltype(quads)::value;
        if constexpr (kQuads != kLargeQuads) {
            if (!rest.is_all) {
                launch(encode_whole_kernel<kFormat, kStochastic, kQuads, Args>,
                       num_warps(args.target.runs), queue, args);
            }
        }
        launch(encode_kernel<kFormat, kStochastic, kQuads, Args>, num_warps(rest), queue, args,
               rest);
    });
}

}  // namespace
}  // namespace diloco::cuda
