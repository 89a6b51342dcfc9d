// The digest of bytes: two sums over 64-bit words, which no order changes, and 64 bits made of them
// (docs/developers/wire-formats.md). The words w_0, w_1, ... are little endian, the last
// filled up with zero bytes. Word i counts as
//   k = (i + 1) * kDigestStep      u = w ^ k      v = (u ^ u >> 29) * kDigestFactor
//   product_i = (lo32(v) ^ hi32(v)) * hi32(v)     all mod 2^64
// in the sum of products, and as w in the sum of words. A change of one word always changes the
// second sum; changes that cancel there, such as swapped words or flipped signs, have to cancel in
// the first one too.
//
// The scrambling of u comes before the product because keys in arithmetic progression are not
// enough: with lo32(u) * hi32(u) the signs of four zeros at i, i + a, i + b, i + a + b cancel, and
// flips of the halves' upper bits change only the upper half of the sum.
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

// The 64 bits that stand for `num_bytes` bytes with these sums.
DILOCO_HD uint64_t finish_digest(uint64_t product, uint64_t sum, uint64_t num_bytes) {
    return mix64(product ^ mix64(sum ^ mix64(num_bytes)));
}

}  // namespace diloco::wire
