// Random bits for stochastic rounding: Philox-4x32 with 7 rounds, the fewest that pass all tests of
// BigCrush (Salmon et al., SC 2011). Each element gets 16 bits: its own byte, and below it the byte
// of its neighbour, which matters once in 256 times. So every element's bits are uniform, and one
// Philox block serves 16 elements and not 8; the errors of two neighbours correlate by at most
// 1/128.
//
// The bits r16 of the element with index e in the fragment, for a 64-bit `key`:
//   counter = (lo32(e / 16), hi32(e / 16), 0, 0)    one Philox block serves 16 consecutive elements
//   key     = (lo32(key), hi32(key))
//   out     = Philox4x32_7(counter, key)           words out[0..3]
//   byte(i) = (out[i / 4] >> (8 * (i % 4))) & 0xFF  the output block's bytes, little endian
//   r16     = byte(e % 16) << 8 | byte(e % 16 ^ 1)
//
// One round: (c0, c1, c2, c3) <- (hi(M1*c2) ^ c1 ^ k0, lo(M1*c2), hi(M0*c0) ^ c3 ^ k1, lo(M0*c0));
// after each round but the last, (k0, k1) += (W0, W1).
#pragma once

#include "wire/config.h"

namespace diloco::wire {

constexpr uint32_t kPhiloxM0 = 0xD2511F53u;
constexpr uint32_t kPhiloxM1 = 0xCD9E8D57u;
constexpr uint32_t kPhiloxW0 = 0x9E3779B9u;
constexpr uint32_t kPhiloxW1 = 0xBB67AE85u;
constexpr int kPhiloxRounds = 7;
constexpr int kElementsPerPhilox = 16;

struct PhiloxBlock {
    uint32_t word[4];
};

// The counter is (lo32(counter), hi32(counter), c2, 0).
DILOCO_HD PhiloxBlock philox(uint64_t counter, uint64_t key, uint32_t c2 = 0) {
    uint32_t c0 = static_cast<uint32_t>(counter), c1 = static_cast<uint32_t>(counter >> 32);
    uint32_t c3 = 0;
    uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
    for (int round = 0; round < kPhiloxRounds; ++round) {
        const uint64_t p0 = static_cast<uint64_t>(kPhiloxM0) * c0;
        const uint64_t p1 = static_cast<uint64_t>(kPhiloxM1) * c2;
        c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
        c1 = static_cast<uint32_t>(p1);
        c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
        c3 = static_cast<uint32_t>(p0);
        k0 += kPhiloxW0;
        k1 += kPhiloxW1;
    }
    return {{c0, c1, c2, c3}};
}

// The 16 bits of an element, made from the Philox output word that has its byte and its
// neighbour's.
DILOCO_HD uint32_t random16_of(uint32_t word, uint64_t element) {
    const uint32_t own = static_cast<uint32_t>(element % 4);
    return (word >> (8 * own) & 0xFFu) << 8 | (word >> (8 * (own ^ 1)) & 0xFFu);
}

DILOCO_HD uint32_t random16(uint64_t element, uint64_t key) {
    const PhiloxBlock block = philox(element / kElementsPerPhilox, key);
    return random16_of(block.word[element % kElementsPerPhilox / 4], element);
}

}  // namespace diloco::wire
