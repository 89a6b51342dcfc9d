// Rounding to a parameter's dtype, the outer optimizers and the merge, for one element. The scalar
// C++ kernels and the CUDA kernels share these functions; simd/step.h repeats the formulas for AVX2
// and AVX-512.
#pragma once

#include "codec/kernels.h"
#include "wire/codes.h"
#include "wire/exact.h"

namespace diloco::codec {

// The value of the bits of a bf16 or fp16.
DILOCO_HD float half_value(DType dtype, uint32_t bits) {
    return dtype == DType::kBf16 ? wire::code_value<wire::Format::kBf16>(bits)
                                 : wire::code_value<wire::Format::kFp16>(bits);
}

// The bits of the nearest bf16 or fp16.
DILOCO_HD uint32_t half_bits(DType dtype, float value) {
    return dtype == DType::kBf16 ? wire::bf16_nearest(value) : wire::fp16_nearest(value);
}

// c(x): the value that a parameter of this dtype has after x was written to it.
DILOCO_HD float as_written(DType dtype, float x) {
    return dtype == DType::kFp32 ? x : half_value(dtype, half_bits(dtype, x));
}

// Rounds x to the dtype, never away from `target`, which is a value of the dtype: returns the value
// nearest to x, or if that lies on the other side of x, its neighbour on the target's side.
DILOCO_HD float rounded_toward(DType dtype, float x, float target) {
    if (dtype == DType::kFp32) return x;
    const uint32_t nearest = half_bits(dtype, x);
    const float value = half_value(dtype, nearest);
    const bool is_beyond = x >= target ? value > x : value < x;
    if (!is_beyond) return value;
    // Bits of the same sign rise with the magnitude, so +-1 is the neighbouring value.
    const bool is_smaller = __builtin_fabsf(value) < __builtin_fabsf(x);
    return half_value(dtype, is_smaller ? nearest + 1 : nearest - 1);
}

// Adam with gradient g and state m, v: m = beta1 m + (1 - beta1) g; v = beta2 v + (1 - beta2) g g.
// Returns lr m / (sqrt(v) / sqrt_correction + eps), which the caller subtracts; see StepConstants.
DILOCO_HD float adam_update(const StepConstants& c, float& m, float& v, float g) {
    using wire::add, wire::div, wire::mul;
    m = add(mul(c.mu, m), mul(c.one_minus_beta1, g));
    v = add(mul(c.beta2, v), mul(mul(c.one_minus_beta2, g), g));
    return div(mul(c.lr, m), add(div(wire::root(v), c.sqrt_correction), c.eps));
}

// Heavy ball or Nesterov with gradient g: m becomes mu m + g, clipped to [-clip, clip]. Returns
// lr m, or lr (g + mu m) for Nesterov, which the caller subtracts.
DILOCO_HD float momentum_update(const StepConstants& c, float& m, float g) {
    using wire::add, wire::mul;
    m = add(mul(c.mu, m), g);
    m = -c.clip > m ? -c.clip : m;
    m = c.clip < m ? c.clip : m;
    return mul(c.lr, c.optimizer == Optimizer::kNesterov ? add(g, mul(c.mu, m)) : m);
}

DILOCO_HD bool is_arrival(Optimizer optimizer) {
    return optimizer == Optimizer::kAccumulate || optimizer == Optimizer::kCommit;
}

// The step of kCommit, where d is the sum of arrivals: m' = mu m + d is the new momentum. Returns
// lr (direct d + ahead m' + behind m). Without momentum, m is neither read nor written, and only d
// counts.
DILOCO_HD float commit_update(const StepConstants& c, bool has_momentum, float& m, float d) {
    using wire::add, wire::mul;
    float step = mul(c.direct, d);
    if (has_momentum) {
        const float old = m;
        m = add(mul(c.mu, old), d);
        step = add(step, mul(c.ahead, m));
        if (c.behind != 0.0f) step = add(step, mul(c.behind, old));
    }
    return mul(c.lr, step);
}

// alpha local + (1 - alpha) outer, rounded toward c(outer). If alpha is 0, callers write outer
// itself instead.
DILOCO_HD float merged(DType dtype, float local, float outer, float alpha, float one_minus_alpha) {
    const float sum = wire::add(wire::mul(alpha, local), wire::mul(one_minus_alpha, outer));
    return rounded_toward(dtype, sum, as_written(dtype, outer));
}

}  // namespace diloco::codec
