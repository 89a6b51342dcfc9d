// The 32 lanes of a warp. The code that works on tiles (*_tile.h) is written once for this
// interface. WarpLanes implements it on a device; the tests' EmulatedLanes runs the lanes one after
// the other on the host.
//   Of<T>              a variable of type T for each lane
//   each(f)            runs f(lane) in each lane
//   max_over(n, at)    sets at(lane) to the largest at() of its aligned group of n lanes
//   sum_over(at)       sets at(lane) to the sum of at() over all lanes, in 32 bits
//   scan(at)           adds at() of all lanes before a lane to at(lane), in 32 bits
//   swap(n, at)        exchanges at(lane) with at(lane ^ n)
//   add_upper(n, at)   adds at(lane + n) to at(lane), for lanes whose n-th neighbour exists
//   sync()             makes what lanes have written to `stage` visible to the other lanes
//   count(to, of)      adds the sum of of(lane) to *to, atomically
//   add_all(to, of)    the same for 64-bit numbers mod 2^64
//   num_where(f)       the number of lanes in which f(lane) is true
//   ballot(f)          a word in which bit l says whether f(l) is true
//   pick(to, of, from) sets to(lane) to of(from(lane)), the value of another lane
//   fetch(to, address) in each(): begins to copy 16 bytes of device memory to the stage
//   wait()             waits until the lane's own copies have arrived
//   stage              the warp's own scratch memory, as large as the kernel's tiles need
#pragma once

#include "wire/config.h"

namespace diloco::cuda {

constexpr int kLanes = 32;

// A stage holds the elements of a tile. The elements of a misaligned array begin up to 15 bytes
// later, for which it has kStageSlack floats more.
constexpr int kStageSlack = 4;
constexpr int kStageFloats = 2 * (1024 + kStageSlack);  // the most that any kernel needs

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
    DILOCO_DEVICE void sum_over(At&& at) const {
        at(0) = __reduce_add_sync(kAll, at(0));
    }
    template <class At>
    DILOCO_DEVICE void scan(At&& at) const {
        DILOCO_UNROLL
        for (int n = 1; n < kLanes; n *= 2) {
            const uint32_t other = __shfl_up_sync(kAll, at(0), n);
            if (static_cast<int>(threadIdx.x) % kLanes >= n) at(0) += other;
        }
    }
    template <class At>
    DILOCO_DEVICE void swap(int n, At&& at) const {
        at(0) = __shfl_xor_sync(kAll, at(0), n);
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

    template <class F>
    DILOCO_DEVICE uint32_t ballot(F&& f) const {
        return __ballot_sync(kAll, f(static_cast<int>(threadIdx.x) % kLanes));
    }
    template <class F>
    DILOCO_DEVICE int num_where(F&& f) const {
        return __popc(ballot(f));
    }
    template <class To, class Of, class From>
    DILOCO_DEVICE void pick(To&& to, Of&& of, From&& from) const {
        to(0) = __shfl_sync(kAll, of(0), from(static_cast<int>(threadIdx.x) % kLanes));
    }
    DILOCO_DEVICE void fetch(void* to, uint64_t address) const {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                         static_cast<uint32_t>(__cvta_generic_to_shared(to))),
                     "l"(address)
                     : "memory");
    }
    DILOCO_DEVICE void wait() const { asm volatile("cp.async.wait_all;" ::: "memory"); }

    template <class At>
    DILOCO_DEVICE void add_all(uint64_t* to, At&& of) const {
        auto sum = static_cast<unsigned long long>(of(0));
        DILOCO_UNROLL
        for (int n = kLanes / 2; n > 0; n /= 2) sum += __shfl_down_sync(kAll, sum, n);
        if (threadIdx.x % kLanes == 0) atomicAdd(reinterpret_cast<unsigned long long*>(to), sum);
    }

    float* stage;

  private:
    static constexpr uint32_t kAll = 0xFFFFFFFFu;
};

#endif

}  // namespace diloco::cuda
