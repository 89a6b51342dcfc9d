// Squared norms and counts of bad elements. The operator defines the order of summation: a chunk of
// 65536 elements has 16 partial sums, each over every sixteenth element; the upper half of the sums
// is added to the lower half until one sum is left; chunks are added in order.
//
// A warp takes a chunk, tile by tile, and begins to read the next tile before it adds up this one.
// All 32 lanes read, but only 16 lanes can add squares.
#pragma once

#include "codec/kernels.h"
#include "cuda/tiles.h"

namespace diloco::cuda {

constexpr int kNormQuads = kLargeTile / (kQuad * kLanes);
constexpr int kNormStageFloats = 2 * (kLargeTile + kStageSlack);
constexpr int kTotalBatch = 8;  // chunks that a lane reads before the first is added
constexpr int kTotalStageFloats = 2 * kTotalBatch * kLanes;
static_assert(kNormStageFloats <= kStageFloats && kTotalStageFloats <= kStageFloats);

using NormQuads = Quads<kNormQuads>;

// Tile `index` of the fragment.
DILOCO_DEVICE Tile norm_tile_at(const NormsArgs& args, int64_t index) {
    const int64_t first = index * kLargeTile, left = args.num_elements - first;
    return {first, static_cast<int32_t>(left < kLargeTile ? left : kLargeTile), 0, 0, 0, 0};
}

template <class Lanes>
DILOCO_DEVICE void load_norm_tile(const Lanes& lanes, const NormsArgs& args, const Tile& tile,
                                  Place& place, typename Lanes::template Of<NormQuads>& outer,
                                  typename Lanes::template Of<NormQuads>& x) {
    if (args.outer != nullptr) {
        load_flat_tile<DType::kFp32, kNormQuads>(lanes, args.outer, tile, outer);
    }
    load_tile<kNormQuads>(lanes, args.params, tile, place, x);
}

// Writes outer - x, or x without outer, to `stage`, with zeros for bad elements, and adds the
// number of bad elements to `bad`. The caller has rounded `outer` to the parameters' dtype.
template <class Lanes>
DILOCO_DEVICE void stage_differences(const Lanes& lanes, bool has_outer, float* stage,
                                     const typename Lanes::template Of<NormQuads>& outer,
                                     const typename Lanes::template Of<NormQuads>& x,
                                     typename Lanes::template Of<int64_t>& bad) {
    lanes.each([&](int lane) {
        DILOCO_UNROLL
        for (int j = 0; j < kNormQuads; ++j) {
            Quad q = x[lane].q[j];
            DILOCO_UNROLL
            for (int i = 0; i < kQuad; ++i) {
                if (has_outer) q.v[i] = wire::sub(outer[lane].q[j].v[i], q.v[i]);
                const bool is_bad = wire::is_bad(q.v[i]);
                bad[lane] += is_bad;
                q.v[i] = is_bad ? 0.0f : q.v[i];
            }
            store_staged(stage + quad_at(lane, j), q);
        }
    });
    lanes.sync();
}

// Adds the squares of a tile that is on `stage`. Elements after the tile's last are zero there, and
// adding zero changes nothing.
template <class Lanes>
DILOCO_DEVICE void add_squares(const Lanes& lanes, const float* stage,
                               typename Lanes::template Of<double>& squares) {
    lanes.each([&](int lane) {
        if (lane >= codec::kNormLanes) return;
        DILOCO_UNROLL_8
        for (int at = lane; at < kLargeTile; at += codec::kNormLanes) {
            const auto x = static_cast<double>(stage[at]);
#if defined(__CUDA_ARCH__)
            squares[lane] = __dadd_rn(squares[lane], __dmul_rn(x, x));
#else
            squares[lane] += x * x;
#endif
        }
    });
    lanes.sync();
}

template <class Lanes>
DILOCO_DEVICE void norms_chunk(const Lanes& lanes, const NormsArgs& args, int64_t chunk,
                               Place& place) {
    constexpr int64_t kTiles = codec::kNormChunk / kLargeTile;
    float* const differences = lanes.stage + kLargeTile + kStageSlack;
    const int64_t num_tiles = (args.num_elements + kLargeTile - 1) / kLargeTile;
    const int64_t begin = chunk * kTiles;
    const int64_t end = begin + kTiles < num_tiles ? begin + kTiles : num_tiles;
    typename Lanes::template Of<double> squares;
    typename Lanes::template Of<int64_t> bad;
    typename Lanes::template Of<NormQuads> outer, x;
    lanes.each([&](int lane) {
        squares[lane] = 0.0;
        bad[lane] = 0;
    });
    load_norm_tile(lanes, args, norm_tile_at(args, begin), place, outer, x);
    for (int64_t i = begin; i < end; ++i) {
        if (args.outer != nullptr) {
            round_tile<kNormQuads>(lanes, args.params, norm_tile_at(args, i), place, outer);
        }
        stage_differences(lanes, args.outer != nullptr, differences, outer, x, bad);
        if (i + 1 < end) load_norm_tile(lanes, args, norm_tile_at(args, i + 1), place, outer, x);
        add_squares(lanes, differences, squares);
    }
    DILOCO_UNROLL
    for (int n = kLanes / 2; n > 0; n /= 2) {
        lanes.add_upper(n, [&](int lane) -> int64_t& { return bad[lane]; });
        if (n == codec::kNormLanes) continue;
        lanes.add_upper(n, [&](int lane) -> double& { return squares[lane]; });
    }
    lanes.each([&](int lane) {
        if (lane != 0) return;
        args.squares[chunk] = squares[lane];
        args.counts[chunk] = bad[lane];
    });
}

// Adds the chunks' sums in order. A single warp does it, and reads kTotalBatch * 32 sums ahead.
template <class Lanes>
DILOCO_DEVICE void norms_total(const Lanes& lanes, const NormsArgs& args) {
    constexpr int kBatch = kTotalBatch * kLanes;
    struct Batch {
        double squares[kTotalBatch];
    };
    const int64_t num_chunks = (args.num_elements + codec::kNormChunk - 1) / codec::kNormChunk;
    auto* squares = reinterpret_cast<double*>(lanes.stage);
    typename Lanes::template Of<double> total;
    typename Lanes::template Of<int64_t> bad;
    typename Lanes::template Of<Batch> next;
    const auto read = [&](int64_t first) {
        lanes.each([&](int lane) {
            DILOCO_UNROLL
            for (int k = 0; k < kTotalBatch; ++k) {
                const int64_t at = first + lane + k * kLanes;
                next[lane].squares[k] = at < num_chunks ? args.squares[at] : 0.0;
            }
        });
    };
    lanes.each([&](int lane) {
        total[lane] = 0.0;
        bad[lane] = 0;
        DILOCO_UNROLL_8
        for (int64_t at = lane; at < num_chunks; at += kLanes) bad[lane] += args.counts[at];
    });
    read(0);
    for (int64_t first = 0; first < num_chunks; first += kBatch) {
        lanes.each([&](int lane) {
            DILOCO_UNROLL
            for (int k = 0; k < kTotalBatch; ++k) {
                squares[lane + k * kLanes] = next[lane].squares[k];
            }
        });
        lanes.sync();
        read(first + kBatch);
        lanes.each([&](int lane) {
            if (lane != 0) return;
            DILOCO_UNROLL_8
            for (int i = 0; i < kBatch; ++i) total[lane] += squares[i];
        });
        lanes.sync();
    }
    DILOCO_UNROLL
    for (int n = kLanes / 2; n > 0; n /= 2) {
        lanes.add_upper(n, [&](int lane) -> int64_t& { return bad[lane]; });
    }
    lanes.each([&](int lane) {
        if (lane != 0) return;
        args.out[0] = total[lane];
        args.out[1] = static_cast<double>(bad[lane]);
    });
}

}  // namespace diloco::cuda
