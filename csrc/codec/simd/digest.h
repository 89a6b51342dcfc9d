// The digest (wire/digest.h) over the class Vec of vec_avx2.h or vec_avx512.h, whichever is
// included before. Each 64-bit lane of a vector has one word.
#pragma once

#include "codec/kernels.h"
#include "wire/digest.h"

namespace diloco::codec {
namespace {

// For each lane of a vector the key of its next word, and the two sums of its words so far.
struct DigestLanes {
    explicit DigestLanes(uint64_t first_word)
        : keys(Vec::multiply64(Vec::add64(Vec::set64(first_word + 1), Vec::lane_numbers()),
                               Vec::set64(wire::kDigestStep))),
          products(Vec::set64(0)),
          words(Vec::set64(0)) {}

    void add(Vec::I word, Vec::I stride) {
        const Vec::I u = Vec::xor_(word, keys);
        const Vec::I v = Vec::multiply64(Vec::xor_(u, Vec::shift_right64<wire::kDigestShift>(u)),
                                         Vec::set64(wire::kDigestFactor));
        const Vec::I high = Vec::high_half(v);
        products = Vec::add64(products, Vec::multiply_low(Vec::xor_(v, high), high));
        words = Vec::add64(words, word);
        keys = Vec::add64(keys, stride);
    }

    Vec::I keys, products, words;
};

void digest(const DigestSpan& span) {
    constexpr int kUnroll = 4, kWords = Vec::kWidth / 2, kBatch = kUnroll * kWords;
    DigestLanes lanes[kUnroll] = {
        DigestLanes(span.first_word), DigestLanes(span.first_word + kWords),
        DigestLanes(span.first_word + 2 * kWords), DigestLanes(span.first_word + 3 * kWords)};
    const Vec::I stride = Vec::set64(kBatch * wire::kDigestStep);
    int64_t i = 0;
    for (; i + kBatch <= span.num_words; i += kBatch) {
        for (int k = 0; k < kUnroll; ++k) {
            lanes[k].add(Vec::load_words(span.data + 8 * (i + k * kWords)), stride);
        }
    }
    DigestSums& sums = *span.sums;
    for (const DigestLanes& each : lanes) {
        sums.product += Vec::sum64(each.products);
        sums.sum += Vec::sum64(each.words);
    }
    for (; i < span.num_words; ++i) {
        uint64_t word;
        __builtin_memcpy(&word, span.data + 8 * i, sizeof(word));
        const uint64_t key = wire::digest_key(span.first_word + static_cast<uint64_t>(i));
        sums.product += wire::digest_product(word, key);
        sums.sum += word;
    }
}

}  // namespace
}  // namespace diloco::codec
