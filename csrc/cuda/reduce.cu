#include "cuda/encode_kernel.cuh"

namespace diloco::cuda {

void reduce(const ReduceArgs& args, const Rest& rest, Format format, bool is_stochastic,
            Queue queue) {
    if (wire::is_sparse(format)) return reduce_sparse(args, queue);
    launch_encode(args, rest, format, is_stochastic, queue);
}

}  // namespace diloco::cuda
