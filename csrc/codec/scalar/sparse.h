// The scalar encoding of the sparse formats (wire/sparse.h), for kernels.cpp alone.
#pragma once

#include "codec/kernels.h"
#include "wire/sparse.h"

namespace diloco::codec {
namespace {

// A block is divided into so many groups. The k-th largest of the groups' maxima is a lower bound
// of the k-th largest magnitude of the block.
constexpr int kGroups = 256;

// Writes the largest magnitude (as fp32 bits) of each group of elements g, g + 256, g + 512, ...,
// and returns the largest of the block.
inline uint32_t group_maxima(const float* x, int block, int32_t* maxima) {
    for (int g = 0; g < kGroups; ++g) maxima[g] = 0;
    for (int begin = 0; begin < block; begin += kGroups) {
        for (int g = 0; g < kGroups; ++g) {
            int32_t bits;
            __builtin_memcpy(&bits, x + begin + g, sizeof(bits));
            bits &= static_cast<int32_t>(wire::kMagnitudeMask);
            maxima[g] = bits > maxima[g] ? bits : maxima[g];
        }
    }
    int32_t largest = 0;
    for (int g = 0; g < kGroups; ++g) largest = maxima[g] > largest ? maxima[g] : largest;
    return static_cast<uint32_t>(largest);
}

// The k-th largest of `count` keys, which are not negative.
inline int32_t kth_largest(const int32_t* keys, int count, int k) {
    int32_t found = 0;
    for (int bit = 30; bit >= 0; --bit) {
        const int32_t trial = found | (1 << bit);
        int32_t num_above = 0;
        for (int i = 0; i < count; ++i) num_above += keys[i] >= trial ? 1 : 0;
        if (num_above >= k) found = trial;
    }
    return found;
}

// Finds the elements whose magnitude, as fp32 bits, is at least `bound`: their indices in order,
// and their magnitudes' bits as keys. Returns their number.
inline int find_above(const float* x, int count, int32_t bound, uint16_t* indices, int32_t* keys) {
    int num_found = 0;
    for (int i = 0; i < count; ++i) {
        const auto key = static_cast<int32_t>(wire::float_bits(x[i]) & wire::kMagnitudeMask);
        indices[num_found] = static_cast<uint16_t>(i);
        keys[num_found] = key;
        num_found += key >= bound ? 1 : 0;
    }
    return num_found;
}

// Selects the indices of the kept elements, ascending.
template <wire::Format kFormat>
void select_kept(const float* x, const int32_t* maxima, uint16_t* kept) {
    using S = wire::Sparse<kFormat>;
    uint16_t candidates[S::kBlock];
    int32_t keys[S::kBlock];
    const int32_t bound = kth_largest(maxima, kGroups, S::kKept);
    const int count = find_above(x, S::kBlock, bound, candidates, keys);
    const int32_t least = kth_largest(keys, count, S::kKept);
    int num_ties = S::kKept, num_kept = 0;
    for (int i = 0; i < count; ++i) num_ties -= keys[i] > least ? 1 : 0;
    for (int i = 0; i < count && num_kept < S::kKept; ++i) {
        const bool is_tie = keys[i] == least && num_ties > 0;
        if (keys[i] <= least && !is_tie) continue;
        num_ties -= is_tie ? 1 : 0;
        kept[num_kept++] = candidates[i];
    }
}

// Encodes x, block number `block`, and leaves in x the error of the encoding: x minus the decoded
// values. Returns the number of bad elements.
template <wire::Format kFormat>
int64_t encode_sparse_block(const EncodeSpan& span, int64_t block, float* x) {
    using S = wire::Sparse<kFormat>;
    uint8_t* code = span.codes + block * wire::own_bytes(kFormat);
    __builtin_memset(code, 0, wire::own_bytes(kFormat));
    __builtin_memset(span.scales + 2 * block, 0, 2);
    int32_t maxima[kGroups];
    const uint32_t largest = group_maxima(x, S::kBlock, maxima);
    if (largest > wire::kLargestGoodBits) {
        int64_t num_bad = 0;
        for (int i = 0; i < S::kBlock; ++i) num_bad += wire::is_bad(x[i]);
        return num_bad;
    }
    if (largest == 0) return 0;
    uint16_t kept[S::kKept];
    select_kept<kFormat>(x, maxima, kept);
    const int exponent = wire::block_exponent(largest);
    const float unit = wire::power_of_two(21 - exponent);
    uint32_t sum = 0;
    for (const uint16_t i : kept) {
        sum += static_cast<uint32_t>(__builtin_rintf(__builtin_fabsf(x[i]) * unit));
    }
    const uint16_t scale = wire::sparse_scale<kFormat>(sum, exponent);
    if (scale == 0) return 0;
    __builtin_memcpy(span.scales + 2 * block, &scale, sizeof(scale));
    wire::write_sparse_code<kFormat>(kept, x, code);
    const float value = wire::scale_value(scale);
    for (const uint16_t i : kept) {
        x[i] -= wire::float_bits(x[i]) >> 31 != 0 ? -value : value;
    }
    return 0;
}

}  // namespace
}  // namespace diloco::codec
