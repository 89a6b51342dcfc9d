// Rounding to a parameter's dtype, the outer optimizers and the merge, one element at a time; in
// C++ and in CUDA alike.
#pragma once

#include "codec/kernels.h"
#include "wire/codes.h"
#include "wire/exact.h"

namespace diloco::codec {

// The value of a bf16 or an fp16.
DILOCO_HD float half_value(DType dtype, uint32_t bits) {
    return dtype == DType::kBf16 ? wire::code_value<wire::Format::kBf16>(bits)
                                 : wire::code_value<wire::Format::kFp16>(bits);
}

// The nearest bf16 or fp16.
DILOCO_HD uint32_t half_bits(DType dtype, float value) {
    return dtype == DType::kBf16 ? wire::bf16_nearest(value) : wire::fp16_nearest(value);
}

// c(x): x as a parameter of the dtype holds it.
DILOCO_HD float as_written(DType dtype, float x) {
    return dtype == DType::kFp32 ? x : half_value(dtype, half_bits(dtype, x));
}

// x rounded to the dtype in the direction of the target, a value of the dtype: the nearest value,
// or its neighbour on the target's side where the nearest value lies on the other side of x.
DILOCO_HD float rounded_toward(DType dtype, float x, float target) {
    if (dtype == DType::kFp32) return x;
    const uint32_t nearest = half_bits(dtype, x);
    const float value = half_value(dtype, nearest);
    const bool is_beyond = x >= target ? value > x : value < x;
    if (!is_beyond) return value;
    // The magnitudes of a sign are in the order of their bits.
    const bool is_smaller = __builtin_fabsf(value) < __builtin_fabsf(x);
    return half_value(dtype, is_smaller ? nearest + 1 : nearest - 1);
}

// m' = beta1 m + (1 - beta1) g;  v' = beta2 v + ((1 - beta2) g) g;  returns lr m' / (sqrt(v') /
// correction + eps), with lr and correction as StepConstants has them.
DILOCO_HD float adam_update(const StepConstants& c, float& m, float& v, float g) {
    using wire::add, wire::div, wire::mul;
    m = add(mul(c.mu, m), mul(c.one_minus_beta1, g));
    v = add(mul(c.beta2, v), mul(mul(c.one_minus_beta2, g), g));
    return div(mul(c.lr, m), add(div(wire::root(v), c.sqrt_correction), c.eps));
}

// m' = clip(mu m + g);  returns lr m', or lr (g + mu m') for Nesterov.
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

// The step that ends a period of arrivals, d being what was added up: m' = mu m + d; returns
// lr (direct d + ahead m' + behind m). Without a momentum, m is neither read nor written.
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

// alpha local + (1 - alpha) outer, rounded toward c(outer); callers take outer itself when alpha is
// zero.
DILOCO_HD float merged(DType dtype, float local, float outer, float alpha, float one_minus_alpha) {
    const float sum = wire::add(wire::mul(alpha, local), wire::mul(one_minus_alpha, outer));
    return rounded_toward(dtype, sum, as_written(dtype, outer));
}

}  // namespace diloco::codec
