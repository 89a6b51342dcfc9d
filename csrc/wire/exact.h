// fp32 operations with one IEEE rounding each. The compiler never fuses add(mul(a, b), c) into a
// multiply-add: in CUDA the intrinsics forbid it, on the host the flag -ffp-contract=off. fused()
// is a multiply-add, which is used only if a * b is exact.
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
