#include "cuda/digest_tile.h"
#include "cuda/launch.cuh"

namespace diloco::cuda {
namespace {

// sums += the digest's sums of the data. Reads each byte once. One warp per 256 words, and two
// atomic additions a warp of the grid.
template <int kAlignment>
__global__ void __launch_bounds__(kThreads) digest_kernel(const __grid_constant__ DigestArgs args) {
    digest_tiles<kAlignment>(WarpLanes(nullptr), args, first_warp(), grid_warps());
}

}  // namespace

void digest(const DigestArgs& args, Queue queue) {
    by_alignment(args, [&](auto alignment) {
        static ResidentBlocks fits{};
        launch<DigestArgs>(digest_kernel<decltype(alignment)::value>, fits, args,
                           static_cast<int64_t>(num_digest_tiles(args)), queue);
    });
}

}  // namespace diloco::cuda
