// The kernels of one instruction set. kernels_avx2.cpp and kernels_avx512.cpp include the header
// with their class Vec, and then this file.
#pragma once

#include "codec/simd/digest.h"
#include "codec/simd/dot_codes.h"
#include "codec/simd/encode_rotated.h"
#include "codec/simd/encode_sparse.h"
#include "codec/simd/floors.h"
#include "codec/simd/step.h"

namespace diloco::codec {
namespace {

template <Format kFormat>
int64_t encode_rounding(const EncodeSpan& span) {
    // Encoding may use non-temporal stores. The fence at the end makes them visible to threads that
    // learn that this call has ended.
    int64_t num_bad;
    if constexpr (wire::is_rotated(kFormat)) {
        num_bad = encode_rotated<kFormat>(span);
    } else if constexpr (wire::is_sparse(kFormat)) {
        num_bad = encode_sparse<kFormat>(span);
    } else {
        num_bad = span.is_stochastic && kFormat != Format::kFp32
                      ? encode_format<kFormat, true>(span)
                      : encode_format<kFormat, false>(span);
    }
    _mm_sfence();
    return num_bad;
}

// A table of functions, one for each format, in the order of the enumeration.
template <class Result, class Span>
using ByFormat = Result (*[wire::kNumFormats])(const Span&);

#define DILOCO_BY_FORMAT(function)                                                      \
    {function<Format::kFp32>,    function<Format::kBf16>,    function<Format::kFp16>,   \
     function<Format::kFp8E4m3>, function<Format::kFp8E5m2>, function<Format::kInt8>,   \
     function<Format::kInt4>,    function<Format::kE3m0>,    function<Format::kInt2r>,  \
     function<Format::kInt1r>,   function<Format::kSub2>,    function<Format::kSub4>,   \
     function<Format::kSub8>,    function<Format::kSub16>,   function<Format::kTopk32>, \
     function<Format::kTopk64>,  function<Format::kTopk128>, function<Format::kTopk256>}
constexpr ByFormat<int64_t, EncodeSpan> kEncode = DILOCO_BY_FORMAT(encode_rounding);
constexpr ByFormat<void, DecodeSpan> kDecode = DILOCO_BY_FORMAT(decode_format);
constexpr ByFormat<void, StepSpan> kStep = DILOCO_BY_FORMAT(step_format);
#undef DILOCO_BY_FORMAT

int64_t encode(const EncodeSpan& span) { return kEncode[static_cast<int>(span.format)](span); }
void decode(const DecodeSpan& span) { kDecode[static_cast<int>(span.format)](span); }
void outer_step(const StepSpan& span) { kStep[static_cast<int>(span.format)](span); }

void merge(const MergeSpan& span) {
    if (span.param_dtype == DType::kFp32) return merge_params<DType::kFp32>(span);
    if (span.param_dtype == DType::kBf16) return merge_params<DType::kBf16>(span);
    merge_params<DType::kFp16>(span);
}

int64_t norms(const NormsSpan& span) {
    if (span.param_dtype == DType::kFp32) return norms_params<DType::kFp32>(span);
    if (span.param_dtype == DType::kBf16) return norms_params<DType::kBf16>(span);
    return norms_params<DType::kFp16>(span);
}

}  // namespace
}  // namespace diloco::codec
