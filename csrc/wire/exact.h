// fp32 operations with one IEEE rounding each: nothing that is written with these is fused into a
// multiply-add, whatever the compiler's flags. On the host the flags of the file see to that
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
#else
DILOCO_HD float add(float a, float b) { return a + b; }
DILOCO_HD float sub(float a, float b) { return a - b; }
DILOCO_HD float mul(float a, float b) { return a * b; }
DILOCO_HD float div(float a, float b) { return a / b; }
DILOCO_HD float root(float a) { return __builtin_sqrtf(a); }
#endif

}  // namespace diloco::wire
