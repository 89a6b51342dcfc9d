// The digest for callers without torch: the definition, in parts of any size and order, by threads
// of their own, at any address, in every implementation.
#include <algorithm>
#include <cstring>
#include <thread>
#include <vector>

#include "check.h"
#include "codec/codec.h"
#include "codec/digest.h"

using diloco::codec::add_digest;
using diloco::codec::DigestSums;
using diloco::codec::finish_digest;

namespace {

// Bytes whose end is the end of an allocation, which AddressSanitizer watches.
std::vector<uint8_t> bytes(size_t count) {
    std::vector<uint8_t> data(count);
    uint64_t state = 1;
    for (uint8_t& each : data)
        each = static_cast<uint8_t>((state = state * 25214903917 + 11) >> 24);
    data.shrink_to_fit();
    return data;
}

// Word by word, straight from wire/digest.h.
DigestSums defined(const uint8_t* data, size_t count, uint64_t first_word) {
    DigestSums sums;
    for (size_t i = 0; 8 * i < count; ++i) {
        uint64_t word = 0;
        std::memcpy(&word, data + 8 * i, std::min<size_t>(8, count - 8 * i));
        sums.product +=
            diloco::wire::digest_product(word, diloco::wire::digest_key(first_word + i));
        sums.sum += word;
    }
    return sums;
}

bool equal(const DigestSums& a, const DigestSums& b) {
    return a.product == b.product && a.sum == b.sum;
}

void check_implementations(size_t count, size_t shift) {
    const std::vector<uint8_t> data = bytes(count + shift);
    const DigestSums expected = defined(data.data() + shift, count, 9);
    for (const diloco::codec::Kernels* kernels : diloco::codec::available_kernels()) {
        DigestSums sums;
        add_digest(data.data() + shift, count, 9, sums, kernels);
        EXPECT(equal(sums, expected));
    }
    DigestSums sums;
    add_digest(data.data() + shift, count, 9, sums);
    EXPECT(equal(sums, expected));
}

// As an engine does: chunk by chunk, in another order, beside others.
void check_parts(size_t count, size_t chunk_bytes, size_t num_threads) {
    const std::vector<uint8_t> data = bytes(count);
    std::vector<DigestSums> sums(num_threads);
    std::vector<std::thread> threads;
    const size_t num_chunks = (count + chunk_bytes - 1) / chunk_bytes;
    for (size_t t = 0; t < num_threads; ++t) {
        threads.emplace_back([&, t] {
            DigestSums own;
            for (size_t i = num_chunks; i-- > 0;) {
                if (i % num_threads != t) continue;
                const size_t begin = i * chunk_bytes;
                const size_t size = std::min(chunk_bytes, count - begin);
                add_digest(data.data() + begin, size, begin / 8, own);
            }
            sums[t] = own;
        });
    }
    for (std::thread& each : threads) each.join();
    DigestSums total;
    for (const DigestSums& each : sums) {
        total.product += each.product;
        total.sum += each.sum;
    }
    EXPECT(equal(total, defined(data.data(), count, 0)));
}

}  // namespace

int main() {
    EXPECT(finish_digest(0, 0, 0) == 0);
    DigestSums example;
    const float values[] = {1.0f, -2.0f, 0.5f};
    add_digest(reinterpret_cast<const uint8_t*>(values), sizeof(values), 0, example);
    EXPECT(finish_digest(example.product, example.sum, sizeof(values)) == 0x9BF70A1A5441188Bu);
    for (size_t count : {0, 1, 7, 8, 9, 63, 64, 65, 255, 256, 257, 1003}) {
        for (size_t shift = 0; shift < 9; ++shift) check_implementations(count, shift);
    }
    check_parts(100003, 8, 3);
    check_parts(100003, 4096, 4);
    check_parts(100003, 1 << 20, 1);
    return passed("digest");
}
