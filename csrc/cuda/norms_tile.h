// Squared norms and counts of bad elements, in the order of summation that the operator defines: a
// chunk of 65536 elements has 16 partial sums, of which each takes every sixteenth element; their
// upper half is added to the lower until one is left; chunks are added in order.
#pragma once

#include "codec/codec.h"
#include "cuda/tiles.h"

namespace diloco::cuda {

constexpr int kChunksPerWarp = kLanes / codec::kNormLanes;
constexpr int kNormBatch = 8;  // elements of a lane that are read before the first is added

struct NormSum {
    double squared;
    int64_t bad;
};

DILOCO_DEVICE float norm_element(const NormsArgs& args, const Segment*& at, int64_t element) {
    while (begin_of(at[1]) <= element) ++at;
    const DType dtype = dtype_of(*at);
    const auto bytes = static_cast<uint64_t>(element) * (dtype == DType::kFp32 ? 4 : 2);
    const float param = load_element(at->origin + bytes, dtype);
    return args.outer != nullptr ? wire::sub(args.outer[element], param) : param;
}

DILOCO_DEVICE void add_square(NormSum& sum, float x) {
    const bool is_bad = wire::is_bad(x);
    const double value = is_bad ? 0.0 : static_cast<double>(x);
#if defined(__CUDA_ARCH__)
    sum.squared = __dadd_rn(sum.squared, __dmul_rn(value, value));
#else
    sum.squared += value * value;
#endif
    sum.bad += is_bad;
}

// The elements first, first + 16, ... below `end`, added in order.
DILOCO_DEVICE NormSum sum_squares(const NormsArgs& args, int64_t first, int64_t end) {
    constexpr int64_t kStep = codec::kNormLanes;
    NormSum sum{0.0, 0};
    if (first >= end) return sum;
    const Segment* at = find(list_of(args.params), args.params.count, first);
    int64_t element = first;
    while (element < end) {
        while (begin_of(at[1]) <= element) ++at;
        const int64_t limit = begin_of(at[1]) < end ? begin_of(at[1]) : end;
        if (element + (kNormBatch - 1) * kStep >= limit) {
            add_square(sum, norm_element(args, at, element));
            element += kStep;
            continue;
        }
        const Segment segment = *at;
        with_dtype(dtype_of(segment), [&](auto dtype) {
            constexpr DType kDType = decltype(dtype)::value;
            for (; element + (kNormBatch - 1) * kStep < limit; element += kNormBatch * kStep) {
                float x[kNormBatch];
                DILOCO_UNROLL
                for (int i = 0; i < kNormBatch; ++i) {
                    x[i] = load_element(address_in<kDType>(segment, element + i * kStep), kDType);
                    if (args.outer != nullptr) {
                        x[i] = wire::sub(args.outer[element + i * kStep], x[i]);
                    }
                }
                DILOCO_UNROLL
                for (int i = 0; i < kNormBatch; ++i) add_square(sum, x[i]);
            }
        });
    }
    return sum;
}

// Chunks 2 * index and 2 * index + 1, one for each half of the warp.
template <class Lanes>
DILOCO_DEVICE void norms_tile(const Lanes& lanes, const NormsArgs& args, int64_t index) {
    constexpr int64_t kChunk = codec::kNormChunk;
    typename Lanes::template Of<NormSum> sums;
    lanes.each([&](int lane) {
        const int64_t begin = (index * kChunksPerWarp + lane / codec::kNormLanes) * kChunk;
        const int64_t end = begin + kChunk < args.num_elements ? begin + kChunk : args.num_elements;
        sums[lane] = sum_squares(args, begin + lane % codec::kNormLanes, end);
    });
    DILOCO_UNROLL
    for (int half = codec::kNormLanes / 2; half > 0; half /= 2) {
        lanes.add_upper(half, [&](int lane) -> double& { return sums[lane].squared; });
        lanes.add_upper(half, [&](int lane) -> int64_t& { return sums[lane].bad; });
    }
    lanes.each([&](int lane) {
        const int64_t chunk = index * kChunksPerWarp + lane / codec::kNormLanes;
        if (lane % codec::kNormLanes == 0 && chunk * kChunk < args.num_elements) {
            args.squares[chunk] = sums[lane].squared;
            args.counts[chunk] = sums[lane].bad;
        }
    });
}

// Adds the chunks in order; one warp, which fetches 32 at a time.
template <class Lanes>
DILOCO_DEVICE void norms_total(const Lanes& lanes, const NormsArgs& args) {
    const int64_t num_chunks = (args.num_elements + codec::kNormChunk - 1) / codec::kNormChunk;
    auto* squares = reinterpret_cast<double*>(lanes.stage);
    auto* counts = reinterpret_cast<int64_t*>(lanes.stage + 2 * kLanes);
    typename Lanes::template Of<NormSum> total;
    lanes.each([&](int lane) { total[lane] = {0.0, 0}; });
    for (int64_t first = 0; first < num_chunks; first += kLanes) {
        lanes.each([&](int lane) {
            const bool is_there = first + lane < num_chunks;
            squares[lane] = is_there ? args.squares[first + lane] : 0.0;
            counts[lane] = is_there ? args.counts[first + lane] : 0;
        });
        lanes.sync();
        lanes.each([&](int lane) {
            if (lane != 0) return;
            for (int i = 0; i < kLanes; ++i) {
                total[lane].squared += squares[i];
                total[lane].bad += counts[i];
            }
        });
        lanes.sync();
    }
    lanes.each([&](int lane) {
        if (lane != 0) return;
        args.out[0] = total[lane].squared;
        args.out[1] = static_cast<double>(total[lane].bad);
    });
}

}  // namespace diloco::cuda
