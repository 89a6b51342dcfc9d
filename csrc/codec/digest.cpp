#include "codec/digest.h"

#include <cstring>

#include "codec/codec.h"

namespace diloco::codec {
namespace {

const Kernels& fastest_kernels() {
    static const Kernels& kernels = *available_kernels().back();
    return kernels;
}

}  // namespace

void add_digest(const uint8_t* data, uint64_t num_bytes, uint64_t first_word, DigestSums& sums,
                const Kernels* kernels) {
    const uint64_t num_words = num_bytes / 8, rest = num_bytes % 8;
    if (num_words > 0) {
        (kernels != nullptr ? *kernels : fastest_kernels())
            .digest({data, static_cast<int64_t>(num_words), first_word, &sums});
    }
    if (rest == 0) return;
    uint64_t word = 0;
    std::memcpy(&word, data + 8 * num_words, rest);
    sums.product += wire::digest_product(word, wire::digest_key(first_word + num_words));
    sums.sum += word;
}

}  // namespace diloco::codec
