// Encoding of the sparse formats over the class Vec of vec_avx2.h or vec_avx512.h, whichever is
// included before; scalar/sparse.h is a simpler implementation. While a block is read, the largest
// magnitude of each group of its elements is found, and the residual of the block before is stored.
// The k-th largest of the groups' maxima is a lower bound of the k-th largest magnitude. Few
// elements of a block reach this bound, and only these candidates are looked at again.
#pragma once

#include <type_traits>

#include "codec/simd/encode.h"
#include "codec/sparse.h"

namespace diloco::codec {
namespace {

// A group has the elements in one lane of kGroupSize consecutive vectors.
constexpr int kGroupSize = 16;
constexpr int kGroupElements = kGroupSize * Vec::kWidth;

template <Format kFormat>
struct SparseBlock {
    static constexpr int kBlock = wire::Sparse<kFormat>::kBlock;
    static constexpr int kGroups = kBlock / kGroupSize;
    // x is longer than the block, so that the two blocks in use differ in the 12 low bits of their
    // addresses: a load would wait for a store with the same bits (see Scratch).
    alignas(64) float x[kBlock + 8 * Vec::kWidth];
    alignas(64) int32_t maxima[kGroups];
};

DILOCO_INLINE Vec::I load_keys(const int32_t* keys) {
    Vec::I v;
    __builtin_memcpy(&v, keys, sizeof(v));
    return v;
}

// Reads block number `block`. With kStores it also writes `before`, the errors of the block before,
// to the new residual.
template <Format kFormat, bool kStores, class Input>
void load_sparse(const EncodeSpan& span, int64_t block, SparseBlock<kFormat>& to,
                 const float* before) {
    using B = SparseBlock<kFormat>;
    const Input input(span, block);
    const int64_t begin = (block - 1) * B::kBlock;
    for (int group = 0; group < B::kBlock; group += kGroupElements) {
        Vec::I largest = Vec::set(0);
#pragma GCC unroll 4
        for (int j = group; j < group + kGroupElements; j += Vec::kWidth) {
            const Vec::F v = input.load(j);
            largest = Vec::max(largest, magnitude_of(v));
            if constexpr (kStores) store_residual(span, begin + j, Vec::load(before + j));
            Vec::store(to.x + j, v);
        }
        __builtin_memcpy(to.maxima + group / kGroupSize, &largest, sizeof(largest));
    }
}

// As load_sparse(), for a weighted sum of payloads, which is decoded first.
template <Format kFormat>
void load_sparse_sum(const EncodeSpan& span, int64_t block, SparseBlock<kFormat>& to) {
    using B = SparseBlock<kFormat>;
    load_sum<kFormat>(span, block, to.x);
    for (int group = 0; group < B::kBlock; group += kGroupElements) {
        Vec::I largest = Vec::set(0);
        for (int j = group; j < group + kGroupElements; j += Vec::kWidth) {
            largest = Vec::max(largest, magnitude_of(Vec::load(to.x + j)));
        }
        __builtin_memcpy(to.maxima + group / kGroupSize, &largest, sizeof(largest));
    }
}

template <Format kFormat>
void store_rest(const EncodeSpan& span, int64_t block, const float* x) {
    constexpr int kBlock = wire::Sparse<kFormat>::kBlock;
    for (int j = 0; j < kBlock; j += Vec::kWidth) {
        store_residual(span, block * kBlock + j, Vec::load(x + j));
    }
}

// The number of keys that are at least `bound`; `size` is a multiple of Vec::kWidth.
DILOCO_INLINE int count_from(const int32_t* keys, int size, int32_t bound) {
    const Vec::I below = Vec::set(bound - 1), one = Vec::set(1);
    Vec::I counts = Vec::set(0);
    for (int i = 0; i < size; i += Vec::kWidth) {
        counts = Vec::add_where(Vec::less(below, load_keys(keys + i)), counts, one);
    }
    return static_cast<int>(Vec::sum(counts));
}

struct Bound {
    int32_t value;
    int count;  // the number of keys that are at least `value`
};

// Finds a bound that at least k and at most `most` keys reach. If equal keys make that impossible,
// the result is the k-th largest key. At least k keys must reach `low`, and no key may be above
// `largest`.
DILOCO_INLINE Bound find_bound(const int32_t* keys, int size, int k, int most, Bound low,
                               int32_t largest) {
    int32_t high = largest + 1;
    while (low.count > most && high - low.value > 1) {
        const int32_t middle = low.value + (high - low.value) / 2;
        const int count = count_from(keys, size, middle);
        if (count >= k) {
            low = {middle, count};
        } else {
            high = middle;
        }
    }
    return low;
}

// Writes the indices of the elements whose magnitude is at least `bound`, ascending, and returns
// their number. Up to 4 entries more may be written.
template <int kBlock>
DILOCO_INLINE int find_candidates(const float* x, int32_t bound, uint16_t* indices) {
    alignas(64) uint8_t mask[kBlock / 8];
    const Vec::I below = Vec::set(bound - 1);
    for (int i = 0; i < kBlock; i += Vec::kWidth) {
        Vec::store_mask(mask + i / 8, Vec::less(below, magnitude_of(Vec::load(x + i))));
    }
    // Most words have few set bits. So kUsual bits are taken without a branch, which would often be
    // mispredicted.
    constexpr int kUsual = 4;
    int num_found = 0;
    for (int begin = 0; begin < kBlock; begin += 64) {
        uint64_t bits;
        __builtin_memcpy(&bits, mask + begin / 8, sizeof(bits));
        const int end = num_found + __builtin_popcountll(bits);
        for (int n = 0; n < kUsual; ++n) {
            const int at = __builtin_ctzll(bits | uint64_t{1} << 63);
            indices[num_found + n] = static_cast<uint16_t>(begin + at);
            bits &= bits - 1;
        }
        for (int n = num_found + kUsual; n < end; ++n) {
            indices[n] = static_cast<uint16_t>(begin + __builtin_ctzll(bits));
            bits &= bits - 1;
        }
        num_found = end;
    }
    return num_found;
}

// Writes the indices of the kept elements, ascending. One entry more may be written.
template <Format kFormat>
DILOCO_INLINE void select_largest(const SparseBlock<kFormat>& block, int32_t largest,
                                  uint16_t* kept) {
    using B = SparseBlock<kFormat>;
    constexpr int kKept = wire::Sparse<kFormat>::kKept;
    Vec::I spread = Vec::set(0);
    for (int g = 0; g < B::kGroups; g += Vec::kWidth) {
        spread = Vec::max(spread, Vec::sub(Vec::set(largest), load_keys(block.maxima + g)));
    }
    const int32_t smallest = largest - static_cast<int32_t>(Vec::largest(spread));
    const int32_t bound = find_bound(block.maxima, B::kGroups, kKept, kKept + kKept / 8,
                                     {smallest, B::kGroups}, largest)
                              .value;
    uint16_t candidates[B::kBlock + 4];
    alignas(64) int32_t keys[B::kBlock + Vec::kWidth];
    const int count = find_candidates<B::kBlock>(block.x, bound, candidates);
    for (int i = 0; i < count; ++i) {
        keys[i] =
            static_cast<int32_t>(wire::float_bits(block.x[candidates[i]]) & wire::kMagnitudeMask);
    }
    const Vec::I none = Vec::set(-1);
    __builtin_memcpy(keys + count, &none, sizeof(none));
    const int size = (count + Vec::kWidth - 1) / Vec::kWidth * Vec::kWidth;
    const Bound least = find_bound(keys, size, kKept, kKept, {bound, count}, largest);
    int num_kept = 0;
    if (least.count == kKept) {
        for (int i = 0; i < count; ++i) {
            kept[num_kept] = candidates[i];
            num_kept += keys[i] >= least.value ? 1 : 0;
        }
        return;
    }
    int num_ties = kKept - count_from(keys, size, least.value + 1);
    for (int i = 0; num_kept < kKept; ++i) {
        const bool is_tie = keys[i] == least.value && num_ties > 0;
        num_ties -= is_tie ? 1 : 0;
        kept[num_kept] = candidates[i];
        num_kept += keys[i] > least.value || is_tie ? 1 : 0;
    }
}

// Writes the code of the kept elements, as wire::write_sparse_code() does. `values` are the
// elements' fp32 bits.
template <Format kFormat>
DILOCO_INLINE void write_kept(const uint16_t* kept, const int32_t* values, uint8_t* code) {
    using S = wire::Sparse<kFormat>;
    alignas(64) uint16_t places[S::kKept];
    for (int j = 0; j < S::kKept; ++j) {
        places[j] = static_cast<uint16_t>((kept[j] >> S::kLowBits) + j);
    }
    for (int j = 0; j < S::kKept; j += Vec::kWidth) {
        const Vec::I index = Vec::load_u16(kept + j);
        for (int b = 0; b < S::kLowBits; ++b) {
            const Vec::I bit = Vec::and_(index, Vec::set(1 << b));
            Vec::store_mask(code + b * S::kPlaneBytes + j / 8, Vec::less(Vec::set(0), bit));
        }
        Vec::store_mask(code + S::kSigns + j / 8, Vec::is_negative(load_keys(values + j)));
    }
    for (int begin = 0; begin < 2 * S::kKept; begin += 64) {
        const Vec::I first = Vec::set64(static_cast<uint64_t>(-static_cast<int64_t>(begin)));
        Vec::I bits = Vec::set64(0);
        for (int j = 0; j < S::kKept; j += Vec::kWidth / 2) {
            // All these bits differ, so their sum is the same as their union.
            bits = Vec::add64(bits, Vec::bit64(Vec::add64(Vec::load_u16_as_64(places + j), first)));
        }
        const uint64_t word = Vec::sum64(bits);
        __builtin_memcpy(code + S::kUpper + begin / 8, &word, sizeof(word));
    }
}

[[gnu::noinline, gnu::cold]] inline int64_t count_bad_elements(const float* x, int size) {
    int64_t num_bad = 0;
    for (int i = 0; i < size; ++i) num_bad += wire::is_bad(x[i]);
    return num_bad;
}

// Encodes block number `number`, and leaves in block.x the error of the encoding. Returns the
// number of bad elements.
template <Format kFormat>
int64_t encode_sparse_block(const EncodeSpan& span, int64_t number, SparseBlock<kFormat>& block) {
    using S = wire::Sparse<kFormat>;
    uint8_t* code = span.codes + number * wire::own_bytes(kFormat);
    Vec::I maxima = Vec::set(0);
    for (int g = 0; g < SparseBlock<kFormat>::kGroups; g += Vec::kWidth) {
        maxima = Vec::max(maxima, load_keys(block.maxima + g));
    }
    const uint32_t largest = Vec::largest(maxima);
    uint16_t scale = 0;
    int64_t num_bad = 0;
    if (largest > wire::kLargestGoodBits) {
        num_bad = count_bad_elements(block.x, S::kBlock);
    } else if (largest != 0) {
        uint16_t kept[S::kKept + 1];
        alignas(64) int32_t values[S::kKept];
        select_largest<kFormat>(block, static_cast<int32_t>(largest), kept);
        for (int j = 0; j < S::kKept; ++j) {
            values[j] = static_cast<int32_t>(wire::float_bits(block.x[kept[j]]));
        }
        const int exponent = wire::block_exponent(largest);
        const Vec::F unit = Vec::set(wire::power_of_two(21 - exponent));
        Vec::I sum = Vec::set(0);
        for (int j = 0; j < S::kKept; j += Vec::kWidth) {
            const Vec::F magnitude =
                Vec::as_float(magnitude_of(Vec::as_float(load_keys(values + j))));
            sum = Vec::add(sum, Vec::round_even(Vec::mul(magnitude, unit)));
        }
        scale = wire::sparse_scale<kFormat>(Vec::sum(sum), exponent);
        if (scale != 0) {
            write_kept<kFormat>(kept, values, code);
            const Vec::I sign = Vec::set(static_cast<int32_t>(0x80000000u));
            const Vec::I value = Vec::as_int(Vec::set(wire::scale_value(scale)));
            alignas(64) float rest[S::kKept];
            for (int j = 0; j < S::kKept; j += Vec::kWidth) {
                const Vec::I x = load_keys(values + j);
                const Vec::I sent = Vec::or_(Vec::and_(x, sign), value);
                Vec::store(rest + j, Vec::sub(Vec::as_float(x), Vec::as_float(sent)));
            }
            for (int j = 0; j < S::kKept; ++j) block.x[kept[j]] = rest[j];
        }
    }
    if (scale == 0) __builtin_memset(code, 0, wire::own_bytes(kFormat));
    __builtin_memcpy(span.scales + 2 * number, &scale, sizeof(scale));
    return num_bad;
}

// Encodes all blocks of an Input (inputs.h), or of the weighted sum of payloads if `Input` is void.
template <Format kFormat, bool kStores, class Input>
int64_t encode_sparse_input(const EncodeSpan& argument) {
    const EncodeSpan span = argument;
    SparseBlock<kFormat> blocks[2];
    int64_t num_bad = 0;
    for (int64_t block = 0; block < span.num_blocks; ++block) {
        SparseBlock<kFormat>& current = blocks[block & 1];
        const float* before = blocks[(block + 1) & 1].x;
        if constexpr (std::is_void_v<Input>) {
            if (kStores && block > 0) store_rest<kFormat>(span, block - 1, before);
            load_sparse_sum(argument, block, current);
        } else if (kStores && block > 0) {
            load_sparse<kFormat, true, Input>(span, block, current, before);
        } else {
            load_sparse<kFormat, false, Input>(span, block, current, before);
        }
        num_bad += encode_sparse_block<kFormat>(span, block, current);
    }
    if (kStores && span.num_blocks > 0) {
        store_rest<kFormat>(span, span.num_blocks - 1, blocks[(span.num_blocks - 1) & 1].x);
    }
    return num_bad;
}

template <Format kFormat, bool kStores>
int64_t encode_sparse_with(const EncodeSpan& span) {
    if (span.num_terms > 0) return encode_sparse_input<kFormat, kStores, void>(span);
    const bool is_fp32 = span.outer != nullptr && span.param_dtype == DType::kFp32;
    if (is_fp32 && span.residual != nullptr && span.residual_dtype == DType::kFp32) {
        return encode_sparse_input<kFormat, kStores, DifferenceInput<DType::kFp32, true>>(span);
    }
    if (span.outer != nullptr && span.param_dtype == DType::kBf16 && span.residual == nullptr) {
        return encode_sparse_input<kFormat, kStores, DifferenceInput<DType::kBf16, false>>(span);
    }
    return encode_sparse_input<kFormat, kStores, AnyInput>(span);
}

template <Format kFormat>
int64_t encode_sparse(const EncodeSpan& span) {
    return span.new_residual != nullptr ? encode_sparse_with<kFormat, true>(span)
                                        : encode_sparse_with<kFormat, false>(span);
}

}  // namespace
}  // namespace diloco::codec
