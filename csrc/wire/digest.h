// The digest of bytes: 64 bits made of two sums over 64-bit words, which may be added in any order
// (docs/developers/wire-formats.md). The words w_0, w_1, ... are little endian, and the last one is
// filled up with zero bytes. The first sum is that over product_i, where
//   k = (i + 1) * kDigestStep      u = w_i ^ k      v = (u ^ u >> 29) * kDigestFactor
//   product_i = (lo32(v) ^ hi32(v)) * hi32(v)     all mod 2^64
// and the second sum is over w_i. A change of one word always changes the second sum. Changes that
// cancel there, such as swapped words or flipped signs, would have to cancel in the first sum, too.
//
// The product is not simply lo32(u) * hi32(u), because the keys k are an arithmetic progression:
// flipped signs of four zeros at i, i + a, i + b, i + a + b would cancel in the first sum, and
// flips of the upper bits of a word's halves would change only the upper half of the sum.
#pragma once

#include "wire/config.h"

namespace diloco::wire {

constexpr uint64_t kDigestStep = 0x9E3779B97F4A7C15u;
constexpr uint64_t kDigestFactor = 0xBF58476D1CE4E5B9u;
constexpr int kDigestShift = 29;

// The key of word i.
DILOCO_HD uint64_t digest_key(uint64_t word_idx) { return (word_idx + 1) * kDigestStep; }

DILOCO_HD uint64_t digest_product(uint64_t word, uint64_t key) {
    const uint64_t u = word ^ key;
    const uint64_t v = (u ^ u >> kDigestShift) * kDigestFactor;
    const uint64_t high = v >> 32;
    return static_cast<uint64_t>(static_cast<uint32_t>(v ^ high)) * high;
}

// The finaliser of splitmix64.
DILOCO_HD uint64_t mix64(uint64_t z) {
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

// The digest of `num_bytes` bytes whose words have these two sums.
DILOCO_HD uint64_t finish_digest(uint64_t product, uint64_t sum, uint64_t num_bytes) {
    return mix64(product ^ mix64(sum ^ mix64(num_bytes)));
}

}  // namespace diloco::wire
