// Outer optimizers, merge, norms and dot products over the class Vec of vec_avx2.h or vec_avx512.h,
// whichever is included before.
#pragma once

#include "codec/simd/decode.h"

namespace diloco::codec {
namespace {

// The StepConstants, each copied to all lanes of a vector.
struct StepVectors {
    explicit StepVectors(const StepConstants& c)
        : lr(Vec::set(c.lr)),
          mu(Vec::set(c.mu)),
          upper(Vec::set(c.clip)),
          lower(Vec::set(-c.clip)),
          alpha(Vec::set(c.alpha)),
          one_minus_alpha(Vec::set(c.one_minus_alpha)),
          one_minus_beta1(Vec::set(c.one_minus_beta1)),
          beta2(Vec::set(c.beta2)),
          one_minus_beta2(Vec::set(c.one_minus_beta2)),
          sqrt_correction(Vec::set(c.sqrt_correction)),
          eps(Vec::set(c.eps)),
          direct(Vec::set(c.direct)),
          ahead(Vec::set(c.ahead)),
          behind(Vec::set(c.behind)) {}
    Vec::F lr, mu, upper, lower, alpha, one_minus_alpha;
    Vec::F one_minus_beta1, beta2, one_minus_beta2, sqrt_correction, eps;
    Vec::F direct, ahead, behind;
};

// Takes the outer step of one vector with gradient g: writes the momenta, and returns the new outer
// values (step_rule.h has the formulas).
template <Optimizer kOptimizer>
DILOCO_INLINE Vec::F update(const StepSpan& span, const StepVectors& c, int64_t i, Vec::F g) {
    const Vec::F outer = Vec::load(span.outer + i);
    if constexpr (kOptimizer == Optimizer::kSgd) {
        return Vec::sub(outer, Vec::mul(c.lr, g));
    } else if constexpr (kOptimizer == Optimizer::kAdam) {
        const Vec::F m =
            Vec::add(Vec::mul(c.mu, Vec::load(span.momentum + i)), Vec::mul(c.one_minus_beta1, g));
        const Vec::F v = Vec::add(Vec::mul(c.beta2, Vec::load(span.second + i)),
                                  Vec::mul(Vec::mul(c.one_minus_beta2, g), g));
        Vec::store(span.momentum + i, m);
        Vec::store(span.second + i, v);
        const Vec::F root = Vec::div(Vec::sqrt(v), c.sqrt_correction);
        return Vec::sub(outer, Vec::div(Vec::mul(c.lr, m), Vec::add(root, c.eps)));
    } else {
        Vec::F m = Vec::add(Vec::mul(c.mu, Vec::load(span.momentum + i)), g);
        // The bound is the first operand, so that a NaN in m stays a NaN: min and max return their
        // second operand if one is a NaN.
        m = Vec::min(c.upper, Vec::max(c.lower, m));
        Vec::store(span.momentum + i, m);
        const Vec::F step = kOptimizer == Optimizer::kNesterov ? Vec::add(g, Vec::mul(c.mu, m)) : m;
        return Vec::sub(outer, Vec::mul(c.lr, step));
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
    } else if (is_merge) {
        store_toward(kParams, params, i, value, as_written(kParams, outer));
    } else {
        store_as(kParams, params, i, value);
    }
}

using DecodeBlock = void (*)(const Term* terms, int num_terms, int64_t block, int size, float* g);

template <Optimizer kOptimizer, DType kParams>
void step_blocks(const StepSpan& argument, DecodeBlock decode) {
    // Local copies: the compiler knows that stores cannot change them, and keeps them in registers.
    const StepSpan span = argument;
    const StepVectors c(*argument.constants);
    const bool is_merge = argument.constants->alpha != 0.0f;
    for (int64_t block = 0; block < span.num_blocks; ++block) {
        alignas(64) float g[wire::kLargestBlock];
        decode(span.terms, span.num_terms, block, span.block_size, g);
        const int64_t begin = block * span.block_size;
        for (int j = 0; j < span.block_size; j += Vec::kWidth) {
            const int64_t i = begin + j;
            const Vec::F outer = update<kOptimizer>(span, c, i, Vec::load(g + j));
            Vec::store(span.outer + i, outer);
            write_param<kParams>(span.params, i, outer, is_merge, c.alpha, c.one_minus_alpha,
                                 span.streams_params);
        }
    }
}

// kAccumulate and kCommit: d is the sum of earlier arrivals, span.second, plus g. kAccumulate
// stores d there. kCommit takes the step commit_update() of step_rule.h.
template <Optimizer kOptimizer>
void arrival_blocks(const StepSpan& argument, DecodeBlock decode) {
    const StepSpan span = argument;
    const StepVectors c(*argument.constants);
    const bool is_first = argument.constants->is_first;
    const bool has_behind = argument.constants->behind != 0.0f;
    for (int64_t block = 0; block < span.num_blocks; ++block) {
        alignas(64) float g[wire::kLargestBlock];
        decode(span.terms, span.num_terms, block, span.block_size, g);
        const int64_t begin = block * span.block_size;
        for (int j = 0; j < span.block_size; j += Vec::kWidth) {
            const int64_t i = begin + j;
            Vec::F d = Vec::load(g + j);
            if (!is_first) d = Vec::add(Vec::load(span.second + i), d);
            if constexpr (kOptimizer == Optimizer::kAccumulate) {
                Vec::store(span.second + i, d);
            } else {
                Vec::F step = Vec::mul(c.direct, d);
                if (span.momentum != nullptr) {
                    const Vec::F old = Vec::load(span.momentum + i);
                    const Vec::F m = Vec::add(Vec::mul(c.mu, old), d);
                    Vec::store(span.momentum + i, m);
                    step = Vec::add(step, Vec::mul(c.ahead, m));
                    if (has_behind) step = Vec::add(step, Vec::mul(c.behind, old));
                }
                const Vec::F outer = Vec::load(span.outer + i);
                Vec::store(span.outer + i, Vec::sub(outer, Vec::mul(c.lr, step)));
            }
        }
    }
}

using StepBlocks = void (*)(const StepSpan& span, DecodeBlock decode);

template <Optimizer kOptimizer>
StepBlocks step_blocks_for(DType params) {
    return params == DType::kFp32   ? step_blocks<kOptimizer, DType::kFp32>
           : params == DType::kBf16 ? step_blocks<kOptimizer, DType::kBf16>
                                    : step_blocks<kOptimizer, DType::kFp16>;
}

DILOCO_INLINE StepBlocks step_blocks_of(const StepSpan& span) {
    switch (span.constants->optimizer) {
        case Optimizer::kSgd:
            return step_blocks_for<Optimizer::kSgd>(span.param_dtype);
        case Optimizer::kHeavyBall:
            return step_blocks_for<Optimizer::kHeavyBall>(span.param_dtype);
        case Optimizer::kNesterov:
            return step_blocks_for<Optimizer::kNesterov>(span.param_dtype);
        case Optimizer::kAccumulate:
            return arrival_blocks<Optimizer::kAccumulate>;
        case Optimizer::kCommit:
            return arrival_blocks<Optimizer::kCommit>;
        default:
            return step_blocks_for<Optimizer::kAdam>(span.param_dtype);
    }
}

template <Format kFormat>
void step_format(const StepSpan& span) {
    step_blocks_of(span)(span, decode_block<kFormat>);
    if (span.streams_params) _mm_sfence();
}

template <DType kParams>
void merge_params(const MergeSpan& argument) {
    const MergeSpan span = argument;
    const bool is_merge = span.alpha != 0.0f;
    const Vec::F alpha = Vec::set(span.alpha), rest = Vec::set(span.one_minus_alpha);
    for (int64_t i = 0; i < span.num_elements; i += Vec::kWidth) {
        write_param<kParams>(span.params, i, Vec::load(span.outer + i), is_merge, alpha, rest,
                             span.streams_params);
    }
    if (span.streams_params) _mm_sfence();
}

// Adds to 16 sums in fp64, whatever the width of vectors: element i to lane i mod 16.
template <DType kParams>
int64_t norms_params(const NormsSpan& argument) {
    const NormsSpan span = argument;
    constexpr int kVectors = kNormLanes / Vec::kWidth, kHalf = Vec::kWidth / 2;
    Vec::D sums[2 * kVectors];
    for (int k = 0; k < 2 * kVectors; ++k) sums[k] = Vec::load(span.lanes + k * kHalf);
    const Vec::I limit = Vec::set(static_cast<int32_t>(wire::kLargestGoodBits));
    int64_t num_bad = 0;
    for (int64_t i = 0; i < span.num_elements; i += kNormLanes) {
        for (int k = 0; k < kVectors; ++k) {
            const int64_t at = i + k * Vec::kWidth;
            Vec::F x = load_as(kParams, span.params, at);
            if (span.outer != nullptr) {
                x = Vec::sub(as_written(kParams, Vec::load(span.outer + at)), x);
            }
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

// Adds the products to 16 sums, as norms_params() does.
void dot(const DotSpan& argument) {
    const DotSpan span = argument;
    constexpr int kVectors = kNormLanes / Vec::kWidth, kHalf = Vec::kWidth / 2;
    Vec::D sums[2 * kVectors];
    for (int k = 0; k < 2 * kVectors; ++k) sums[k] = Vec::load(span.lanes + k * kHalf);
    for (int64_t i = 0; i < span.num_elements; i += kNormLanes) {
        for (int k = 0; k < kVectors; ++k) {
            const int64_t at = i + k * Vec::kWidth;
            const Vec::F a = Vec::load(span.a + at), b = Vec::load(span.b + at);
            sums[2 * k] = Vec::add(sums[2 * k], Vec::mul(Vec::low(a), Vec::low(b)));
            sums[2 * k + 1] = Vec::add(sums[2 * k + 1], Vec::mul(Vec::high(a), Vec::high(b)));
        }
    }
    for (int k = 0; k < 2 * kVectors; ++k) Vec::store(span.lanes + k * kHalf, sums[k]);
}

}  // namespace
}  // namespace diloco::codec
