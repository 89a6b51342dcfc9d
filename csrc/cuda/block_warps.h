// The warps of a CUDA thread block (a CTA) that work together on one block of a sparse format. The
// code in sparse_*.h is written once for this interface. BlockWarps implements it on a device; the
// tests' EmulatedWarps runs the warps one after the other on the host.
//   Lanes              the lanes of one warp (lanes.h)
//   Each<T>            a variable of type T for each warp
//   each_warp(f)       runs f(warp, lanes) in each warp, then waits until all warps have ended it
//   stage(warp)        the shared memory of that warp, which all warps may read and write
// Shared memory that a warp has written in one each_warp() may be read by others only after it.
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

    // The stages of all warps follow each other at `stages`, each with `stage_floats` floats.
    __device__ BlockWarps(float* stages, int stage_floats)
        : stages_(stages), stage_floats_(stage_floats) {}

    DILOCO_DEVICE float* stage(int warp) const { return stages_ + warp * stage_floats_; }

    template <class F>
    DILOCO_DEVICE void each_warp(F&& f) const {
        // The empty assembly hides the value from the compiler, which else would keep addresses
        // made of it in registers from tile to tile.
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

// Atomic operations on shared memory.
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
