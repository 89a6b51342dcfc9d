// The warps of a CUDA block (a CTA) that work together on one block of a sparse format. The code of
// sparse_*.h is written once against this interface; BlockWarps is a CTA, and the tests'
// EmulatedWarps runs the warps one after the other on the host.
//   Lanes              the lanes of one warp (lanes.h)
//   Each<T>            a T of each warp
//   each_warp(f)       f(warp, lanes) in each warp; then all warps wait for one another
//   stage(warp)        the stage of that warp, which all warps may read and write
// What a warp writes to shared memory within each_warp, others read in a later one. Between two of
// them every thread may read what neither writes.
#pragma once

#include "cuda/lanes.h"

namespace diloco::cuda {

constexpr int kBlockWarps = 8;
constexpr int kBlockThreads = kBlockWarps * kLanes;

#if defined(__CUDACC__)

class BlockWarps {
  public:
    using Lanes = WarpLanes;

    template <class T>
    struct Each {
        T value;
        DILOCO_DEVICE T& operator[](int) { return value; }
        DILOCO_DEVICE const T& operator[](int) const { return value; }
    };

    // The stages lie one behind the other, each of `stage_floats`.
    __device__ BlockWarps(float* stages, int stage_floats)
        : stages_(stages), stage_floats_(stage_floats) {}

    DILOCO_DEVICE float* stage(int warp) const { return stages_ + warp * stage_floats_; }

    template <class F>
    DILOCO_DEVICE void each_warp(F&& f) const {
        // Opaque to the compiler, which else keeps addresses in registers from tile to tile.
        uint32_t thread = threadIdx.x;
        asm volatile("" : "+r"(thread));
        const int warp = static_cast<int>(thread / kLanes);
        f(warp, WarpLanes(stage(warp)));
        __syncthreads();
    }

  private:
    float* stages_;
    int stage_floats_;
};

// Of shared memory.
DILOCO_DEVICE uint32_t atomic_add(uint32_t* to, uint32_t count) { return atomicAdd(to, count); }
DILOCO_DEVICE void atomic_or(uint32_t* to, uint32_t bits) { atomicOr(to, bits); }

DILOCO_DEVICE int num_ones(uint32_t word) { return __popc(word); }
DILOCO_DEVICE int lowest_one(uint32_t word) { return __ffs(static_cast<int>(word)) - 1; }

#else

inline uint32_t atomic_add(uint32_t* to, uint32_t count) {
    const uint32_t before = *to;
    *to += count;
    return before;
}
inline void atomic_or(uint32_t* to, uint32_t bits) { *to |= bits; }

inline int num_ones(uint32_t word) { return __builtin_popcount(word); }
inline int lowest_one(uint32_t word) { return __builtin_ctz(word); }

#endif

}  // namespace diloco::cuda
