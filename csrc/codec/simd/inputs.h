// The inputs of an encoder over the class Vec of vec_avx2.h or vec_avx512.h, whichever is included
// before: a difference or a weighted sum of payloads, each with or without a residual, or a tensor.
#pragma once

#include "codec/simd/round.h"

namespace diloco::codec {
namespace {

// Prefetches kUnroll elements that lie kBytesAhead bytes after element i.
template <int kBytesAhead>
DILOCO_INLINE void prefetch_stream(const void* data, int element_bytes, int64_t i) {
    const char* p = static_cast<const char*>(data) + i * element_bytes + kBytesAhead;
    for (int k = 0; k < kUnroll * element_bytes; k += 64) _mm_prefetch(p + k, _MM_HINT_T0);
}

// An Input is a class that loads the values of one block: load(n) returns the vector at element n
// of the block. prefetch(n) asks for the elements from n on; it is needed because loads of the next
// block queue behind instructions that wait for this block's scale. There is a class for each
// common kind of input; AnyInput is the slower class for all others.
template <DType kParams, bool kHasResidual>
class DifferenceInput {
  public:
    DILOCO_INLINE DifferenceInput(const EncodeSpan& span, int64_t block)
        : span_(span), begin_(block * span.block_size) {}
    DILOCO_INLINE Vec::F load(int64_t n) const {
        const int64_t i = begin_ + n;
        const Vec::F x = Vec::sub(as_written(kParams, Vec::load(span_.outer + i)),
                                  load_as(kParams, span_.params, i));
        if constexpr (!kHasResidual) return x;
        return Vec::add(x, Vec::load(static_cast<const float*>(span_.residual) + i));
    }
    template <int kBytesAhead>
    DILOCO_INLINE void prefetch(int64_t n) const {
        if constexpr (kHasResidual) return;  // with three inputs, prefetching does not help
        constexpr int kAhead = kParams == DType::kFp32 ? kBytesAhead : 2048;
        prefetch_stream<kAhead>(span_.outer, 4, begin_ + n);
        prefetch_stream<kAhead>(span_.params, kParams == DType::kFp32 ? 4 : 2, begin_ + n);
    }

  private:
    const EncodeSpan& span_;
    int64_t begin_;
};

// An fp32 tensor, without outer values and residual: all_reduce() encodes such an input.
class TensorInput {
  public:
    DILOCO_INLINE TensorInput(const EncodeSpan& span, int64_t block)
        : params_(static_cast<const float*>(span.params) + block * span.block_size) {}
    DILOCO_INLINE Vec::F load(int64_t n) const { return Vec::load(params_ + n); }
    template <int kBytesAhead>
    DILOCO_INLINE void prefetch(int64_t n) const {
        prefetch_stream<kBytesAhead>(params_, 4, n);
    }

  private:
    const float* params_;
};

class AnyInput {
  public:
    DILOCO_INLINE AnyInput(const EncodeSpan& span, int64_t block)
        : span_(span), begin_(block * span.block_size) {}
    DILOCO_INLINE Vec::F load(int64_t n) const {
        const int64_t i = begin_ + n;
        Vec::F x = load_as(span_.param_dtype, span_.params, i);
        if (span_.outer != nullptr) {
            x = Vec::sub(as_written(span_.param_dtype, Vec::load(span_.outer + i)), x);
        }
        if (span_.residual != nullptr) {
            x = Vec::add(x, load_as(span_.residual_dtype, span_.residual, i));
        }
        return x;
    }
    template <int>
    DILOCO_INLINE void prefetch(int64_t) const {}

  private:
    const EncodeSpan& span_;
    int64_t begin_;
};

// The weighted sum of kTerms payloads.
template <Format kFormat, int kTerms>
class SumInput {
  public:
    DILOCO_INLINE SumInput(const EncodeSpan& span, int64_t block)
        : span_(span), begin_(block * span.block_size), sum_(span.terms, block) {}
    DILOCO_INLINE Vec::F load(int64_t n) const {
        const int64_t i = begin_ + n;
        Vec::F x = wire::has_scales(kFormat) && sum_.has_scale() ? sum_.template at<true>(i)
                                                                 : sum_.template at<false>(i);
        if (span_.residual != nullptr) {
            x = Vec::add(x, load_as(span_.residual_dtype, span_.residual, i));
        }
        return x;
    }
    template <int>
    DILOCO_INLINE void prefetch(int64_t) const {}

  private:
    const EncodeSpan& span_;
    int64_t begin_;
    WeightedSum<kFormat, kTerms> sum_;
};

// Loads kSize elements of the block from element j on to x, and returns for each lane the bits of
// the largest magnitude.
template <int kSize, class Input>
DILOCO_INLINE Vec::I load_unit(const Input& input, int j, float* x) {
    Vec::I largest = Vec::set(0);
#pragma GCC unroll 4
    for (int n = j; n < j + kSize; n += Vec::kWidth) {
        const Vec::F v = input.load(n);
        largest = Vec::max(largest, magnitude_of(v));
        Vec::store(x + n, v);
    }
    return largest;
}

// Loads one block to x, and returns the bits of its largest magnitude.
template <class Input>
uint32_t load_block(const EncodeSpan& span, int64_t block, float* x) {
    const Input input(span, block);
    Vec::I largest = Vec::set(0);
    for (int j = 0; j < span.block_size; j += kUnroll) {
        largest = Vec::max(largest, load_unit<kUnroll>(input, j, x));
    }
    return Vec::largest(largest);
}

template <Format kFormat>
uint32_t load_sum(const EncodeSpan& span, int64_t block, float* x) {
    decode_block<kFormat>(span.terms, span.num_terms, block, span.block_size, x);
    const int64_t begin = block * span.block_size;
    Vec::I largest = Vec::set(0);
    for (int j = 0; j < span.block_size; j += Vec::kWidth) {
        Vec::F v = Vec::load(x + j);
        if (span.residual != nullptr) {
            v = Vec::add(v, load_as(span.residual_dtype, span.residual, begin + j));
            Vec::store(x + j, v);
        }
        largest = Vec::max(largest, magnitude_of(v));
    }
    return Vec::largest(largest);
}

}  // namespace
}  // namespace diloco::codec
