// Decoding of the sparse formats (wire/sparse.h) on the CPU, one block at a time. Each
// implementation includes this file, and so compiles the loops for its own instruction set.
#pragma once

#include "codec/kernels.h"
#include "wire/sparse.h"

namespace diloco::codec {
namespace {

// Decodes one block. All its elements become NaN if no encoder writes such a scale, or such a code
// with a scale other than 0.
template <wire::Format kFormat>
void decode_sparse(uint16_t scale_bits, const uint8_t* code, float* out) {
    using S = wire::Sparse<kFormat>;
    const float scale = wire::received_scale(scale_bits, 1);
    uint16_t indices[S::kKept];
    const bool is_made =
        scale == 0.0f || (scale == scale && wire::read_sparse_indices<kFormat>(code, indices));
    const float rest = is_made ? 0.0f : wire::bits_float(0x7FC00000u);
    for (int i = 0; i < S::kBlock; ++i) out[i] = rest;
    if (scale == 0.0f || !is_made) return;
    for (int j = 0; j < S::kKept; ++j) {
        out[indices[j]] = wire::is_sign_set(code + S::kSigns, j) ? -scale : scale;
    }
}

// The weighted sum of block number `block` of all terms.
template <wire::Format kFormat>
void sum_sparse_block(const Term* terms, int num_terms, int64_t block, float* sum) {
    constexpr int kBlock = wire::Sparse<kFormat>::kBlock;
    float value[kBlock];
    for (int t = 0; t < num_terms; ++t) {
        uint16_t scale;
        __builtin_memcpy(&scale, terms[t].scales + 2 * block, sizeof(scale));
        decode_sparse<kFormat>(scale, terms[t].codes + block * wire::own_bytes(kFormat), value);
        const float coefficient = terms[t].coefficient;
        if (t == 0) {
            for (int i = 0; i < kBlock; ++i) sum[i] = coefficient * value[i];
        } else {
            for (int i = 0; i < kBlock; ++i) sum[i] += coefficient * value[i];
        }
    }
}

}  // namespace
}  // namespace diloco::codec
