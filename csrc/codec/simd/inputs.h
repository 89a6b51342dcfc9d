// The values that an encoder reads, over a Vec (vec_avx2.h or vec_avx512.h, included before): a
// difference, a tensor, or the weighted sum of payloads, each with its residual.
#pragma once

#include "codec/simd/round.h"

namespace diloco::codec {
namespace {

// Asks for kUnroll elements that are read so many bytes later.
template <int kBytesAhead>
DILOCO_INLINE void prefetch_stream(const void* data, int element_bytes, int64_t i) {
    const char* p = static_cast<const char*>(data) + i * element_bytes + kBytesAhead;
    for (int k = 0; k < kUnroll * element_bytes; k += 64) _mm_prefetch(p + k, _MM_HINT_T0);
}

// An Input loads x of one block: load(n) is the vector at element n of the block. Loads of the next
// block stand in line behind instructions that wait for the scale of this one, so that too few of
// them are on their way; prefetch(n) asks for elements from n on, and waits for nothing. The common
// inputs are compiled apart from the general one, which looks at the span each time.
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
        if constexpr (kHasResidual) return;  // three streams are enough at once
        constexpr int kAhead = kParams == DType::kFp32 ? kBytesAhead : 2048;
        prefetch_stream<kAhead>(span_.outer, 4, begin_ + n);
        prefetch_stream<kAhead>(span_.params, kParams == DType::kFp32 ? 4 : 2, begin_ + n);
    }

  private:
    const EncodeSpan& span_;
    int64_t begin_;
};

// An fp32 tensor itself: what the public all_reduce encodes.
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

// Loads kSize elements of x from element j of the block on, and returns their largest magnitudes'
// bits.
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

// x of one block, with the largest magnitude's bits.
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
