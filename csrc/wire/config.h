// Macros that every file of csrc/wire may use, in C++ and in CUDA alike; no torch, no CUDA header.
// All functions are `static`: each translation unit keeps its own copy, so code compiled for one
// instruction set can never be linked into another (one-definition rule).
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__CUDACC__) || defined(__HIPCC__)
#define DILOCO_HD __host__ __device__ static inline
#define DILOCO_DEVICE __device__ __forceinline__
#define DILOCO_UNROLL _Pragma("unroll")
#define DILOCO_UNROLL_8 _Pragma("unroll 8")
#define DILOCO_NO_UNROLL _Pragma("unroll 1")
#else
#define DILOCO_HD [[maybe_unused]] static inline
#define DILOCO_DEVICE inline
#define DILOCO_UNROLL
#define DILOCO_UNROLL_8
#define DILOCO_NO_UNROLL
#endif

namespace diloco::wire {

DILOCO_HD uint32_t float_bits(float value) {
    uint32_t bits;
    __builtin_memcpy(&bits, &value, sizeof(bits));
    return bits;
}

DILOCO_HD float bits_float(uint32_t bits) {
    float value;
    __builtin_memcpy(&value, &bits, sizeof(value));
    return value;
}

}  // namespace diloco::wire
