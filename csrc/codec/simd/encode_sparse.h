// Encoding of the sparse formats over a Vec (vec_avx2.h or vec_avx512.h, included before).
#pragma once

#include <type_traits>

#include "codec/simd/encode.h"

namespace diloco::codec {
namespace {

struct VectorSearch {
    static int above(const float* x, int count, int32_t bound, uint16_t* indices, int32_t* keys) {
        const Vec::I least = Vec::set(bound - 1);
        int num_found = 0;
        for (int i = 0; i < count; i += Vec::kWidth) {
            const Vec::I key = magnitude_of(Vec::load(x + i));
            uint8_t bytes[4] = {};
            Vec::store_mask(bytes, Vec::less(least, key));
            uint32_t bits;
            __builtin_memcpy(&bits, bytes, sizeof(bits));
            for (; bits != 0; bits &= bits - 1) {
                const int at = i + __builtin_ctz(bits);
                indices[num_found] = static_cast<uint16_t>(at);
                keys[num_found++] =
                    static_cast<int32_t>(wire::float_bits(x[at]) & wire::kMagnitudeMask);
            }
        }
        return num_found;
    }
};

template <Format kFormat, class Input>
int64_t encode_sparse_input(const EncodeSpan& span) {
    constexpr int kBlock = wire::Sparse<kFormat>::kBlock;
    alignas(64) float x[kBlock];
    int64_t num_bad = 0;
    for (int64_t block = 0; block < span.num_blocks; ++block) {
        if constexpr (std::is_void_v<Input>) {
            load_sum<kFormat>(span, block, x);
        } else {
            load_block<Input>(span, block, x);
        }
        num_bad += encode_sparse_block<kFormat, VectorSearch>(span, block, x);
        if (span.new_residual == nullptr) continue;
        for (int j = 0; j < kBlock; j += Vec::kWidth) {
            store_residual(span, block * kBlock + j, Vec::load(x + j));
        }
    }
    return num_bad;
}

template <Format kFormat>
int64_t encode_sparse(const EncodeSpan& span) {
    if (span.num_terms > 0) return encode_sparse_input<kFormat, void>(span);
    const bool is_fp32 = span.outer != nullptr && span.param_dtype == DType::kFp32;
    if (is_fp32 && span.residual != nullptr && span.residual_dtype == DType::kFp32) {
        return encode_sparse_input<kFormat, DifferenceInput<DType::kFp32, true>>(span);
    }
    return encode_sparse_input<kFormat, AnyInput>(span);
}

}  // namespace
}  // namespace diloco::codec
