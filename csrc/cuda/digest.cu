#include <array>
#include <atomic>

#include "cuda/digest_tile.h"
#include "cuda/launch.cuh"

namespace diloco::cuda {
namespace {

// Adds the two sums of a digest over the data to args.sums. Reads each byte once. One warp per 256
// words, but at most as many as the device runs at a time; each warp does two atomic additions.
template <int kAlignment>
__global__ void __launch_bounds__(kThreads) digest_kernel(const __grid_constant__ DigestArgs args) {
    digest_tiles<kAlignment>(WarpLanes(nullptr), args, first_warp(), grid_warps());
}

int attribute(cudaDeviceAttr which, int device) {
    int value = 0;
    check(cudaDeviceGetAttribute(&value, which, device), "ask for a property of the device");
    return value;
}

// The number of thread blocks of `kernel` that the device runs at a time; more blocks would only do
// more atomic additions. `known` caches the number of each device.
template <class Kernel>
int64_t resident_blocks(Kernel kernel, int device, std::array<std::atomic<int>, 64>& known) {
    std::atomic<int>& blocks = known[static_cast<size_t>(device) % known.size()];
    if (blocks.load() == 0) {
        int each = 0;
        check(cudaSetDevice(device), "select the device");
        check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&each, kernel, kThreads, 0),
              "tell how many blocks fit");
        blocks = each * attribute(cudaDevAttrMultiProcessorCount, device);
    }
    return blocks.load();
}

}  // namespace

std::vector<int64_t> support(int device) {
    int driver = 0;
    int arch = 0;
    check(cudaDriverGetVersion(&driver), "ask for the driver's version");
    if (driver / 1000 >= CUDART_VERSION / 1000) {
        arch = 100 * attribute(cudaDevAttrComputeCapabilityMajor, device) +
               10 * attribute(cudaDevAttrComputeCapabilityMinor, device);
    }
    return {CUDART_VERSION, driver, arch, __CUDA_ARCH_LIST__};
}

void digest(const DigestArgs& args, Queue queue) {
    by_alignment(args, [&](auto alignment) {
        static std::array<std::atomic<int>, 64> known{};
        const auto kernel = digest_kernel<decltype(alignment)::value>;
        const int64_t resident = resident_blocks(kernel, queue.device, known);
        if (queue.max_blocks == 0 || queue.max_blocks > resident) queue.max_blocks = resident;
        launch(kernel, static_cast<int64_t>(num_digest_tiles(args)), queue, args);
    });
}

}  // namespace diloco::cuda
