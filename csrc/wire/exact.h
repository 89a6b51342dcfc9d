// fp32 operations with one IEEE rounding each: nothing that is written with these is fused into a
// multiply-add, whatever the compiler's flags; `fused` is one, for where a * b is exact. On the
// host the flags of the file see to that
// (-ffp-contract=off).
#pragma once

#include "wire/config.h"

namespace diloco::wire {

#if defined(__CUDA_ARCH__)
DILOCO_HD float add(float a, float b) { return __fadd_rn(a, b); }
DILOCO_HD float sub(float a, float b) { return __fsub_rn(a, b); }
DILOCO_HD float mul(float a, float b) { return __fmul_rn(a, b); }
DILOCO_HD float div(float a, float b) { return __fdiv_rn(a, b); }
DILOCO_HD float root(float a) { return __fsqrt_rn(a); }
DILOCO_HD float fused(float a, float b, float c) { return __fmaf_rn(a, b, c); }
#else
DILOCO_HD float add(float a, float b) { return a + b; }
DILOCO_HD float sub(float a, float b) { return a - b; }
DILOCO_HD float mul(float a, float b) { return a * b; }
DILOCO_HD float div(float a, float b) { return a / b; }
DILOCO_HD float root(float a) { return __builtin_sqrtf(a); }
DILOCO_HD float fused(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#endif

}  // namespace diloco::wire
