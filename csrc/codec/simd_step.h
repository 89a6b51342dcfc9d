// Outer optimizers, merge and norms over a Vec (vec_avx2.h or vec_avx512.h, included before).
#pragma once

#include "codec/simd_decode.h"

namespace diloco::codec {
namespace {

// outer -= lr * step(g); returns the new outer values of one vector and writes the momenta.
template <Optimizer kOptimizer>
DILOCO_INLINE Vec::F update(const StepSpan& span, const StepConstants& c, int64_t i, Vec::F g) {
    const Vec::F outer = Vec::load(span.outer + i), lr = Vec::set(c.lr);
    if constexpr (kOptimizer == Optimizer::kSgd) {
        return Vec::sub(outer, Vec::mul(lr, g));
    } else if constexpr (kOptimizer == Optimizer::kAdam) {
        Vec::F m = Vec::load(span.momentum + i), v = Vec::load(span.second + i);
        m = Vec::add(Vec::mul(Vec::set(c.mu), m), Vec::mul(Vec::set(c.one_minus_beta1), g));
        v = Vec::add(Vec::mul(Vec::set(c.beta2), v),
                     Vec::mul(Vec::mul(Vec::set(c.one_minus_beta2), g), g));
        Vec::store(span.momentum + i, m);
        Vec::store(span.second + i, v);
        const Vec::F root = Vec::div(Vec::sqrt(v), Vec::set(c.sqrt_correction));
        return Vec::sub(outer, Vec::div(Vec::mul(lr, m), Vec::add(root, Vec::set(c.eps))));
    } else {
        const Vec::F mu = Vec::set(c.mu);
        Vec::F m = Vec::add(Vec::mul(mu, Vec::load(span.momentum + i)), g);
        // The bound comes first: min and max return their second operand when one is a NaN.
        m = Vec::min(Vec::set(c.clip), Vec::max(Vec::set(-c.clip), m));
        Vec::store(span.momentum + i, m);
        const Vec::F step = kOptimizer == Optimizer::kNesterov ? Vec::add(g, Vec::mul(mu, m)) : m;
        return Vec::sub(outer, Vec::mul(lr, step));
    }
}

template <DType kParams>
DILOCO_INLINE void write_param(void* params, int64_t i, Vec::F outer, bool is_merge, Vec::F alpha,
                               Vec::F one_minus_alpha, bool streams) {
    Vec::F value = outer;
    if (is_merge) {
        value = Vec::add(Vec::mul(alpha, load_as(kParams, params, i)),
                         Vec::mul(one_minus_alpha, outer));
    }
    if (kParams == DType::kFp32 && streams) {
        Vec::stream(static_cast<float*>(params) + i, value);
    } else {
        store_as(kParams, params, i, value);
    }
}

template <Optimizer kOptimizer, DType kParams>
void step_block(const StepSpan& span, int64_t begin, const float* g, bool streams) {
    const StepConstants& c = *span.constants;
    const bool is_merge = c.alpha != 0.0f;
    const Vec::F alpha = Vec::set(c.alpha), rest = Vec::set(c.one_minus_alpha);
    for (int j = 0; j < span.block_size; j += Vec::kWidth) {
        const Vec::F outer = update<kOptimizer>(span, c, begin + j, Vec::load(g + j));
        Vec::store(span.outer + begin + j, outer);
        write_param<kParams>(span.params, begin + j, outer, is_merge, alpha, rest, streams);
    }
}

using StepBlock = void (*)(const StepSpan& span, int64_t begin, const float* g, bool streams);

template <Optimizer kOptimizer>
StepBlock step_block_for(DType params) {
    return params == DType::kFp32   ? step_block<kOptimizer, DType::kFp32>
           : params == DType::kBf16 ? step_block<kOptimizer, DType::kBf16>
                                    : step_block<kOptimizer, DType::kFp16>;
}

DILOCO_INLINE StepBlock step_block_of(const StepSpan& span) {
    switch (span.constants->optimizer) {
        case Optimizer::kSgd:
            return step_block_for<Optimizer::kSgd>(span.param_dtype);
        case Optimizer::kHeavyBall:
            return step_block_for<Optimizer::kHeavyBall>(span.param_dtype);
        case Optimizer::kNesterov:
            return step_block_for<Optimizer::kNesterov>(span.param_dtype);
        default:
            return step_block_for<Optimizer::kAdam>(span.param_dtype);
    }
}

template <Format kFormat>
void step_format(const StepSpan& span) {
    const StepBlock step = step_block_of(span);
    for (int64_t block = 0; block < span.num_blocks; ++block) {
        alignas(64) float g[wire::kMaxBlockSize];
        decode_block<kFormat>(span.terms, span.num_terms, block, span.block_size, g);
        step(span, block * span.block_size, g, span.streams_params);
    }
    if (span.streams_params) _mm_sfence();
}

template <DType kParams>
void merge_params(const MergeSpan& span) {
    const bool is_merge = span.alpha != 0.0f;
    const Vec::F alpha = Vec::set(span.alpha), rest = Vec::set(span.one_minus_alpha);
    for (int64_t i = 0; i < span.num_elements; i += Vec::kWidth) {
        write_param<kParams>(span.params, i, Vec::load(span.outer + i), is_merge, alpha, rest,
                             span.streams_params);
    }
    if (span.streams_params) _mm_sfence();
}

// Sixteen sums in fp64, whatever the width: element i goes to lane i mod 16.
template <DType kParams>
int64_t norms_params(const NormsSpan& span) {
    constexpr int kVectors = kNormLanes / Vec::kWidth, kHalf = Vec::kWidth / 2;
    Vec::D sums[2 * kVectors];
    for (int k = 0; k < 2 * kVectors; ++k) sums[k] = Vec::load(span.lanes + k * kHalf);
    const Vec::I limit = Vec::set(static_cast<int32_t>(wire::kLargestGoodBits));
    int64_t num_bad = 0;
    for (int64_t i = 0; i < span.num_elements; i += kNormLanes) {
        for (int k = 0; k < kVectors; ++k) {
            const int64_t at = i + k * Vec::kWidth;
            Vec::F x = load_as(kParams, span.params, at);
            if (span.outer != nullptr) x = Vec::sub(Vec::load(span.outer + at), x);
            const Vec::I magnitude =
                Vec::and_(Vec::as_int(x), Vec::set(static_cast<int32_t>(wire::kMagnitudeMask)));
            const Vec::M is_bad = Vec::less(limit, magnitude);
            num_bad += Vec::count(is_bad);
            x = Vec::zero_where(is_bad, x);
            const Vec::D low = Vec::low(x), high = Vec::high(x);
            sums[2 * k] = Vec::add(sums[2 * k], Vec::mul(low, low));
            sums[2 * k + 1] = Vec::add(sums[2 * k + 1], Vec::mul(high, high));
        }
    }
    for (int k = 0; k < 2 * kVectors; ++k) Vec::store(span.lanes + k * kHalf, sums[k]);
    return num_bad;
}

}  // namespace
}  // namespace diloco::codec
