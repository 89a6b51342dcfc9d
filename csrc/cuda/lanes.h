// The 32 lanes of a warp. The code of a tile (encode_tile.h, step_tile.h, norms_tile.h) is written
// once against this interface; WarpLanes is a warp, and the tests' EmulatedLanes runs the lanes one
// after the other on the host.
//   Of<T>              a T of each lane
//   each(f)            f(lane) in each lane
//   max_over(n, at)    sets at(lane) to the largest of its aligned group of n lanes
//   swap(at)           exchanges at(lane) with the neighbour's, lane ^ 1
//   add_upper(n, at)   adds at(lane + n) to at(lane), for lanes whose n-th neighbour exists
//   sync()             makes what lanes wrote to `stage` visible to the others
//   count(to, of)      adds the sum of of(lane) to *to
//   stage              kStageFloats of scratch memory, the warp's own
#pragma once

#include "wire/config.h"

namespace diloco::cuda {

constexpr int kLanes = 32;
constexpr int kStageFloats = 1024;

#if defined(__CUDACC__)

class WarpLanes {
  public:
    template <class T>
    struct Of {
        T value;
        DILOCO_DEVICE T& operator[](int) { return value; }
        DILOCO_DEVICE const T& operator[](int) const { return value; }
    };

    __device__ explicit WarpLanes(float* stage) : stage(stage) {}

    template <class F>
    DILOCO_DEVICE void each(F&& f) const {
        f(static_cast<int>(threadIdx.x) % kLanes);
    }
    template <class At>
    DILOCO_DEVICE void max_over(int num_lanes, At&& at) const {
        uint32_t& value = at(0);
        if (num_lanes == kLanes) {
            value = __reduce_max_sync(kAll, value);
            return;
        }
        for (int n = 1; n < num_lanes; n *= 2) {
            const uint32_t other = __shfl_xor_sync(kAll, value, n);
            value = other > value ? other : value;
        }
    }
    template <class At>
    DILOCO_DEVICE void swap(At&& at) const {
        at(0) = __shfl_xor_sync(kAll, at(0), 1);
    }
    template <class At>
    DILOCO_DEVICE void add_upper(int n, At&& at) const {
        at(0) += __shfl_down_sync(kAll, at(0), n);
    }
    DILOCO_DEVICE void sync() const { __syncwarp(); }
    template <class At>
    DILOCO_DEVICE void count(int64_t* to, At&& of) const {
        const uint32_t sum = __reduce_add_sync(kAll, static_cast<uint32_t>(of(0)));
        if (sum != 0 && threadIdx.x % kLanes == 0) {
            atomicAdd(reinterpret_cast<unsigned long long*>(to), sum);
        }
    }

    float* stage;

  private:
    static constexpr uint32_t kAll = 0xFFFFFFFFu;
};

#endif

}  // namespace diloco::cuda
