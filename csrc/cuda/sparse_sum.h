// The weighted sum of sparse payloads over a block. The kept elements of a term are written to the
// stages, which are zero elsewhere; then every lane adds its own elements, zeros included. So the
// terms are added in order, and each product and each sum is rounded once.
#pragma once

#include "cuda/sparse_tile.h"

namespace diloco::cuda {

// The number of terms whose codes are read at a time. A quarter of the threads reads each of them.
constexpr int kTermBatch = 4;
constexpr int kTermThreads = kBlockThreads / kTermBatch;
constexpr int kScaleWord = kTermThreads - 1;  // the scale's place, after the words of the code
static_assert(kMostWords <= kScaleWord);

// The shared memory that a sum needs.
struct SumMemory {
    uint32_t words[kTermBatch][kTermThreads];
    uint16_t indices[kTermBatch][kMostKept];
    uint32_t is_wrong[kTermBatch];  // no encoder writes such a code or scale: the term is NaN
};

DILOCO_DEVICE float scale_of_term(const SumMemory& memory, int t) {
    return wire::received_scale(static_cast<uint16_t>(memory.words[t][kScaleWord]), 1);
}

// Reads the word that belongs to a thread, of the kTermBatch terms from `first` on: a word of a
// code, or a scale.
DILOCO_DEVICE uint32_t load_of_terms(const Terms& terms, const Tile& tile, SparseCode code,
                                     int first, int thread) {
    const int t = first + thread / kTermThreads, word = thread % kTermThreads;
    if (t >= terms.count) return 0;
    const uint8_t* payload = term_at(terms, t).payload;
    if (word == kScaleWord) return load_scale_bits(payload + tile.scales, is_aligned(payload));
    if (word >= code.num_words()) return 0;
    return load_word(payload + tile.codes + 4 * word, is_aligned(payload));
}

// The index of kept element j of a term. `place` is the position of the j-th set bit in the 2 k
// bits of the code (wire/sparse.h).
DILOCO_DEVICE int kept_index(const uint32_t* words, SparseCode code, int place, int j) {
    int index = (place - j) << code.low_bits();
    DILOCO_NO_UNROLL
    for (int b = 0; b < code.low_bits(); ++b) {
        index |= static_cast<int>(words[b * code.plane_words() + j / 32] >> (j % 32) & 1u) << b;
    }
    return index;
}

// Finds the kept indices of the terms that were read. Two warps share the words of a term's 2 k
// bits. A set bit belongs to kept element j if j bits are set before it.
template <class Block>
DILOCO_DEVICE void find_indices(const Block& block, SparseCode code, int count, SumMemory& memory) {
    constexpr int kWarpsOfTerm = kBlockWarps / kTermBatch;
    block.each_warp([&](int warp, const auto& lanes) {
        using Lanes = typename Block::Lanes;
        const int t = warp / kWarpsOfTerm, num_upper = 2 * code.plane_words();
        if (t >= count) return;
        const uint32_t* words = memory.words[t];
        typename Lanes::template Of<uint32_t> own, upto, word, before;
        lanes.each([&](int lane) {
            own[lane] = lane < num_upper ? words[code.upper_word() + lane] : 0;
            upto[lane] = static_cast<uint32_t>(num_ones(own[lane]));
        });
        lanes.scan([&](int lane) -> uint32_t& { return upto[lane]; });
        DILOCO_NO_UNROLL
        for (int w = warp % kWarpsOfTerm; w < num_upper; w += kWarpsOfTerm) {
            lanes.pick([&](int lane) -> uint32_t& { return word[lane]; },
                       [&](int lane) { return own[lane]; }, [&](int) { return w; });
            lanes.pick([&](int lane) -> uint32_t& { return before[lane]; },
                       [&](int lane) { return upto[lane]; }, [&](int) { return w; });
            lanes.each([&](int lane) {
                const uint32_t from_here = word[lane] >> lane;
                const int j = static_cast<int>(before[lane]) - num_ones(from_here);
                if ((from_here & 1u) == 0 || j >= code.num_kept()) return;
                memory.indices[t][j] =
                    static_cast<uint16_t>(kept_index(words, code, 32 * w + lane, j));
            });
        }
        lanes.each([&](int lane) {
            if (warp % kWarpsOfTerm != 0 || lane != kLanes - 1) return;
            const float scale = scale_of_term(memory, t);
            const bool has_all = upto[lane] == static_cast<uint32_t>(code.num_kept());
            memory.is_wrong[t] = scale != scale || (scale != 0.0f && !has_all) ? 1 : 0;
        });
    });
}

// Marks terms as wrong whose indices do not ascend or are beyond the block's end.
template <class Block>
DILOCO_DEVICE void check_indices(const Block& block, SparseCode code, int count,
                                 SumMemory& memory) {
    block.each_warp([&](int warp, const auto& lanes) {
        lanes.each([&](int lane) {
            const int j = kLanes * warp + lane;
            if (j >= code.num_kept()) return;
            DILOCO_NO_UNROLL
            for (int t = 0; t < count; ++t) {
                const uint16_t* indices = memory.indices[t];
                const bool ascends = j == 0 || indices[j] > indices[j - 1];
                if (ascends && indices[j] < kSparseTile) continue;
                if (scale_of_term(memory, t) != 0.0f) memory.is_wrong[t] = 1;
            }
        });
    });
}

// Writes the kept elements of term t of the batch to their places on the stages.
template <class Block>
DILOCO_DEVICE void spread_term(const Block& block, SparseCode code, int t,
                               const SumMemory& memory) {
    const float scale = scale_of_term(memory, t);
    const bool is_sent = memory.is_wrong[t] == 0 && scale != 0.0f;
    block.each_warp([&](int warp, const auto& lanes) {
        lanes.each([&](int lane) {
            if (!is_sent || warp >= code.plane_words()) return;
            const uint32_t signs = memory.words[t][code.sign_word() + warp];
            const float value = (signs >> lane & 1u) != 0 ? -scale : scale;
            staged(block, memory.indices[t][kLanes * warp + lane]) = value;
        });
    });
}

// The weighted sum of all terms' decoded values. Each product is rounded, and the products are
// added in order. Elements after the block's last are zero.
template <class Block>
DILOCO_DEVICE void sum_sparse(const Block& block, const Runs& runs, const Terms& terms,
                              const Tile& tile, SumMemory& memory, BlockQuads<Block>& sum) {
    const SparseCode code{runs.log_kept};
    // The words of the next terms are read while the present terms are added.
    typename Block::template Each<typename Block::Lanes::template Of<uint32_t>> next;
    block.each_warp([&](int warp, const auto& lanes) {
        lanes.each([&](int lane) {
            next[warp][lane] = load_of_terms(terms, tile, code, 0, kLanes * warp + lane);
            sum[warp][lane] = {};
        });
        stage<kPartQuads>(lanes, sum[warp]);
        // The sum begins with -0, because -0 + x is x for every x, even for -0.
        each_element(lanes, [&](int lane, int j, int i) { sum[warp][lane].q[j].v[i] = -0.0f; });
    });
    DILOCO_NO_UNROLL
    for (int t = 0; t < terms.count; ++t) {
        const int within = t % kTermBatch;
        if (within == 0) {
            const int left = terms.count - t, count = left < kTermBatch ? left : kTermBatch;
            block.each_warp([&](int warp, const auto& lanes) {
                lanes.each([&](int lane) {
                    const int thread = kLanes * warp + lane;
                    memory.words[thread / kTermThreads][thread % kTermThreads] = next[warp][lane];
                    next[warp][lane] = load_of_terms(terms, tile, code, t + kTermBatch, thread);
                });
            });
            find_indices(block, code, count, memory);
            check_indices(block, code, count, memory);
        }
        spread_term(block, code, within, memory);
        // With a coefficient of NaN all elements of a wrong term become NaN, zeros included.
        const float coefficient = memory.is_wrong[within] != 0 ? wire::bits_float(0x7FC00000u)
                                                               : term_at(terms, t).coefficient;
        block.each_warp([&](int warp, const auto& lanes) {
            lanes.each([&](int lane) {
                DILOCO_UNROLL
                for (int j = 0; j < kPartQuads; ++j) {
                    float* own = lanes.stage + quad_at(lane, j);
                    const Quad values = load_staged(own);
                    store_staged(own, Quad{});
                    DILOCO_UNROLL
                    for (int i = 0; i < kQuad; ++i) {
                        float& so_far = sum[warp][lane].q[j].v[i];
                        so_far = wire::add(so_far, wire::mul(coefficient, values.v[i]));
                    }
                }
            });
        });
    }
    block.each_warp([&](int warp, const auto& lanes) {
        const Tile part = part_of(tile, warp);
        if (part.size == kPart) return;
        each_element(lanes, [&](int lane, int j, int i) {
            if (i >= part.count(lane, j)) sum[warp][lane].q[j].v[i] = 0.0f;
        });
    });
}

}  // namespace diloco::cuda
