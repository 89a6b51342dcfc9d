// The sparse formats send the indices and signs of the k largest of 4096 elements, and one scale,
// which stands for the magnitude of all of them. If magnitudes are equal, lower indices are kept.
// docs/developers/wire-formats.md, Sparse wires, has the same formulas.
//
//   E      exponent of the block's largest magnitude, at least -100
//   A      sum of rint(|x| * 2^(21 - E)) over the kept elements, at most 2^30
//   scale  A * 2^(E - 21) / k, rounded to bf16
//   code   for the kept indices i_0 < i_1 < ..., with l = 12 - log2(k):
//          l times k bits: bit j of the b-th k bits is bit b of i_j
//          2 k bits: the bits (i_j >> l) + j are ones, the others zeros (Elias-Fano code)
//          k bits: the signs
// A block with a bad element (scale.h), or whose scale would be zero or sub-normal, is null: scale
// and code are zeros, and it decodes to +0. A code whose indices do not ascend, or with another
// number of ones than k, decodes to NaN.
#pragma once

#include "wire/rotation.h"

namespace diloco::wire {

template <Format kFormat>
struct Sparse {
    static constexpr int kBlock = own_block(kFormat);
    static constexpr int kKept = num_kept(kFormat);
    static constexpr int kLogKept = __builtin_ctz(static_cast<unsigned>(kKept));
    static constexpr int kLowBits = __builtin_ctz(static_cast<unsigned>(kBlock / kKept));
    static constexpr int kPlaneBytes = kKept / 8;
    static constexpr int kUpper = kLowBits * kPlaneBytes;  // byte at which the 2 k bits begin
    static constexpr int kSigns = kUpper + 2 * kPlaneBytes;
};

// Writes the code of kept elements into zeroed bytes.
template <Format kFormat>
DILOCO_HD void write_sparse_code(const uint16_t* indices, const float* x, uint8_t* code) {
    using S = Sparse<kFormat>;
    const auto set = [code](int region, int bit) {
        code[region + bit / 8] = static_cast<uint8_t>(code[region + bit / 8] | 1 << (bit % 8));
    };
    for (int j = 0; j < S::kKept; ++j) {
        const int index = indices[j];
        for (int b = 0; b < S::kLowBits; ++b) {
            if ((index >> b & 1) != 0) set(b * S::kPlaneBytes, j);
        }
        set(S::kUpper, (index >> S::kLowBits) + j);
        if (float_bits(x[index]) >> 31 != 0) set(S::kSigns, j);
    }
}

// Reads the kept indices; false if no encoder makes the code.
template <Format kFormat>
DILOCO_HD bool read_sparse_indices(const uint8_t* code, uint16_t* indices) {
    using S = Sparse<kFormat>;
    int j = 0, last = -1;
    for (int byte = 0; byte < 2 * S::kPlaneBytes; ++byte) {
        for (uint32_t bits = code[S::kUpper + byte]; bits != 0; bits &= bits - 1) {
            if (j == S::kKept) return false;
            int index = (8 * byte + __builtin_ctz(bits) - j) << S::kLowBits;
            for (int b = 0; b < S::kLowBits; ++b) {
                index |= (code[b * S::kPlaneBytes + j / 8] >> (j % 8) & 1) << b;
            }
            if (index <= last || index >= S::kBlock) return false;
            last = index;
            indices[j++] = static_cast<uint16_t>(index);
        }
    }
    return j == S::kKept;
}

DILOCO_HD uint16_t sparse_scale(uint32_t sum, int exponent, int log_kept) {
    const float mean = mul(static_cast<float>(sum), power_of_two(-log_kept));
    const float scale = mul(mean, power_of_two(exponent - 21));
    const uint16_t bits = bf16_nearest(scale);
    return bits < kSmallestScale ? 0 : bits;
}

template <Format kFormat>
DILOCO_HD uint16_t sparse_scale(uint32_t sum, int exponent) {
    return sparse_scale(sum, exponent, Sparse<kFormat>::kLogKept);
}

}  // namespace diloco::wire
