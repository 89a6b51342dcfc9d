// A tile: kQuads * 128 neighbouring elements of one run, the work of a warp at a time. Lane l holds
// the quads that begin at elements 4 (l + 32 j), j < kQuads, so that a warp's accesses are 512
// contiguous bytes of fp32, all of them issued before the first is used.
//
// A whole tile in one array that is aligned is read and written by quads. All else (a tensor whose
// address is odd, a tile that straddles tensors or is cut short by the end) goes through the stage,
// element by element and still coalesced: 32 neighbouring elements at a time.
#pragma once

#include "cuda/lanes.h"
#include "cuda/quads.h"

namespace diloco::cuda {

template <int kQuads>
struct Quads {
    Quad q[kQuads];
};

template <int kQuads>
constexpr int kTile = kQuads * kQuad * kLanes;

// Where quad j of a lane begins in the tile.
DILOCO_DEVICE int quad_at(int lane, int j) { return kQuad * (lane + kLanes * j); }

struct Tile {
    int64_t first;   // element of the fragment
    int32_t size;    // elements, at most kTile
    int64_t scales;  // byte of a payload where the first element's scale lies
    int64_t codes;   // likewise its code; a multiple of 16 from the start of the payload

    // Elements of quad j of a lane that exist.
    DILOCO_DEVICE int count(int lane, int j) const {
        const int left = size - quad_at(lane, j);
        return left < 0 ? 0 : left < kQuad ? left : kQuad;
    }
};

template <Format kFormat, int kQuads>
DILOCO_DEVICE Tile tile_at(const Runs& runs, uint32_t index) {
    const uint32_t run = index / runs.tiles_per_run;
    const int64_t within = static_cast<int64_t>(index - run * runs.tiles_per_run) * kTile<kQuads>;
    const int64_t run_begin = runs.begin + run * runs.run_elements;
    const int64_t run_end = run_begin + runs.run_elements;
    const int64_t left = (run_end < runs.end ? run_end : runs.end) - run_begin - within;
    const int64_t start = (runs.first_run + run) * runs.run_bytes;
    Tile tile;
    tile.first = run_begin + within;
    tile.size = static_cast<int32_t>(left < kTile<kQuads> ? left : kTile<kQuads>);
    tile.scales = start + 2 * (within >> runs.block_shift);
    tile.codes = start + runs.code_offset + within * wire::code_bits(kFormat) / 8;
    return tile;
}

DILOCO_DEVICE int64_t begin_of(const Segment& segment) { return segment.begin_and_dtype >> 2; }
DILOCO_DEVICE DType dtype_of(const Segment& segment) {
    return static_cast<DType>(segment.begin_and_dtype & 3);
}

DILOCO_DEVICE const Segment* list_of(const Segments& segments) {
    return segments.in_memory != nullptr ? segments.in_memory : segments.inlined;
}
DILOCO_DEVICE const Term* list_of(const Terms& terms) {
    return terms.in_memory != nullptr ? terms.in_memory : terms.inlined;
}

// The segment that holds `element`: the last that begins at it or before.
DILOCO_DEVICE const Segment* find(const Segment* list, int32_t count, int64_t element) {
    int32_t low = 0;
    while (count - low > 1) {
        const int32_t middle = low + (count - low) / 2;
        if (begin_of(list[middle]) <= element) {
            low = middle;
        } else {
            count = middle;
        }
    }
    return list + low;
}

// An array that holds the whole fragment.
DILOCO_DEVICE Segment whole(const void* data, DType dtype) { return Segment::of(data, dtype, 0); }

template <DType kDType>
DILOCO_DEVICE uint64_t address_in(const Segment& segment, int64_t element) {
    return segment.origin + static_cast<uint64_t>(element) * (kDType == DType::kFp32 ? 4 : 2);
}

// Calls f with the segment's dtype as a compile-time constant.
template <DType kDType>
struct DTypeConstant {
    static constexpr DType value = kDType;
};
template <class F>
DILOCO_DEVICE void with_dtype(DType dtype, F&& f) {
    if (dtype == DType::kFp32) {
        f(DTypeConstant<DType::kFp32>{});
    } else if (dtype == DType::kBf16) {
        f(DTypeConstant<DType::kBf16>{});
    } else {
        f(DTypeConstant<DType::kFp16>{});
    }
}

template <DType kDType>
DILOCO_DEVICE bool is_quad_aligned(const Segment& segment) {
    return segment.origin % (kDType == DType::kFp32 ? 16 : 8) == 0;
}

// The quads of a lane from the stage and back.
template <int kQuads, class Lanes>
DILOCO_DEVICE void unstage(const Lanes& lanes, typename Lanes::template Of<Quads<kQuads>>& x) {
    lanes.sync();
    lanes.each([&](int lane) {
        DILOCO_UNROLL
        for (int j = 0; j < kQuads; ++j) {
            x[lane].q[j] = load_staged(lanes.stage + quad_at(lane, j));
        }
    });
    lanes.sync();
}

template <int kQuads, class Lanes>
DILOCO_DEVICE void stage(const Lanes& lanes, const typename Lanes::template Of<Quads<kQuads>>& x) {
    lanes.each([&](int lane) {
        DILOCO_UNROLL
        for (int j = 0; j < kQuads; ++j) {
            store_staged(lanes.stage + quad_at(lane, j), x[lane].q[j]);
        }
    });
    lanes.sync();
}

// Reads a tile that lies in one segment; elements that do not exist are zero.
template <DType kDType, int kQuads, class Lanes>
DILOCO_DEVICE void load_inside(const Lanes& lanes, const Segment& segment, const Tile& tile,
                               typename Lanes::template Of<Quads<kQuads>>& x) {
    if (tile.size == kTile<kQuads> && is_quad_aligned<kDType>(segment)) {
        lanes.each([&](int lane) {
            DILOCO_UNROLL
            for (int j = 0; j < kQuads; ++j) {
                x[lane].q[j] =
                    load_quad(address_in<kDType>(segment, tile.first + quad_at(lane, j)), kDType);
            }
        });
        return;
    }
    lanes.each([&](int lane) {
        DILOCO_UNROLL_8
        for (int i = lane; i < kTile<kQuads>; i += kLanes) {
            lanes.stage[i] = i < tile.size
                                 ? load_element(address_in<kDType>(segment, tile.first + i), kDType)
                                 : 0.0f;
        }
    });
    unstage<kQuads>(lanes, x);
}

template <DType kDType, int kQuads, class Lanes>
DILOCO_DEVICE void store_inside(const Lanes& lanes, const Segment& segment, const Tile& tile,
                                const typename Lanes::template Of<Quads<kQuads>>& x) {
    if (tile.size == kTile<kQuads> && is_quad_aligned<kDType>(segment)) {
        lanes.each([&](int lane) {
            DILOCO_UNROLL
            for (int j = 0; j < kQuads; ++j) {
                store_quad(address_in<kDType>(segment, tile.first + quad_at(lane, j)), kDType,
                           x[lane].q[j]);
            }
        });
        return;
    }
    stage<kQuads>(lanes, x);
    lanes.each([&](int lane) {
        DILOCO_UNROLL_8
        for (int i = lane; i < tile.size; i += kLanes) {
            store_element(address_in<kDType>(segment, tile.first + i), kDType, lanes.stage[i]);
        }
    });
    lanes.sync();
}

// Calls f(segment, dtype constant) when the tile lies in one segment, else `straddles(segment)`,
// the segment being that of the tile's first element.
template <class F, class G>
DILOCO_DEVICE void by_place(const Segments& segments, const Tile& tile, F&& f, G&& straddles) {
    const Segment* at = find(list_of(segments), segments.count, tile.first);
    if (begin_of(at[1]) >= tile.first + tile.size) {
        with_dtype(dtype_of(*at), [&](auto dtype) { f(*at, dtype); });
    } else {
        straddles(at);
    }
}

// Reads a tile of the fragment's tensors; elements that do not exist are zero.
template <int kQuads, class Lanes>
DILOCO_DEVICE void load_tile(const Lanes& lanes, const Segments& segments, const Tile& tile,
                             typename Lanes::template Of<Quads<kQuads>>& x) {
    by_place(
        segments, tile,
        [&](const Segment& segment, auto dtype) {
            load_inside<decltype(dtype)::value, kQuads>(lanes, segment, tile, x);
        },
        [&](const Segment* first) {
            lanes.each([&](int lane) {
                const Segment* at = first;
                for (int i = lane; i < kTile<kQuads>; i += kLanes) {
                    float value = 0.0f;
                    if (i < tile.size) {
                        const int64_t element = tile.first + i;
                        while (begin_of(at[1]) <= element) ++at;
                        const DType dtype = dtype_of(*at);
                        const auto bytes =
                            static_cast<uint64_t>(element) * (dtype == DType::kFp32 ? 4 : 2);
                        value = load_element(at->origin + bytes, dtype);
                    }
                    lanes.stage[i] = value;
                }
            });
            unstage<kQuads>(lanes, x);
        });
}

template <int kQuads, class Lanes>
DILOCO_DEVICE void store_tile(const Lanes& lanes, const Segments& segments, const Tile& tile,
                              const typename Lanes::template Of<Quads<kQuads>>& x) {
    by_place(
        segments, tile,
        [&](const Segment& segment, auto dtype) {
            store_inside<decltype(dtype)::value, kQuads>(lanes, segment, tile, x);
        },
        [&](const Segment* first) {
            stage<kQuads>(lanes, x);
            lanes.each([&](int lane) {
                const Segment* at = first;
                for (int i = lane; i < tile.size; i += kLanes) {
                    const int64_t element = tile.first + i;
                    while (begin_of(at[1]) <= element) ++at;
                    const DType dtype = dtype_of(*at);
                    const auto bytes =
                        static_cast<uint64_t>(element) * (dtype == DType::kFp32 ? 4 : 2);
                    store_element(at->origin + bytes, dtype, lanes.stage[i]);
                }
            });
            lanes.sync();
        });
}

// sum = c0 d0 + c1 d1 + ..., each product rounded, then added, in order; zero where no element is.
template <Format kFormat, int kQuads, class Lanes>
DILOCO_DEVICE void sum_terms(const Lanes& lanes, const Runs& runs, const Terms& terms,
                             const Tile& tile, typename Lanes::template Of<Quads<kQuads>>& sum) {
    const Term* list = list_of(terms);
    for (int t = 0; t < terms.count; ++t) {
        const uint8_t* payload = list[t].payload;
        const float coefficient = list[t].coefficient;
        const bool is_aligned = reinterpret_cast<uint64_t>(payload) % wire::kAlignment == 0;
        lanes.each([&](int lane) {
            CodeQuad<kFormat> codes[kQuads];
            float scales[kQuads];
            DILOCO_UNROLL
            for (int j = 0; j < kQuads; ++j) {
                codes[j] = {};
                scales[j] = 0.0f;
                if (tile.count(lane, j) == 0) continue;
                const int at = quad_at(lane, j);
                codes[j] = load_codes<kFormat>(
                    payload + tile.codes + at * wire::code_bits(kFormat) / 8, is_aligned);
                if constexpr (wire::has_scales(kFormat)) {
                    scales[j] = load_scale(payload + tile.scales + 2 * (at >> runs.block_shift),
                                           is_aligned);
                }
            }
            DILOCO_UNROLL
            for (int j = 0; j < kQuads; ++j) {
                const int count = tile.count(lane, j);
                DILOCO_UNROLL
                for (int i = 0; i < kQuad; ++i) {
                    float value = wire::code_value<kFormat>(codes[j].get(i));
                    if constexpr (wire::has_scales(kFormat)) value = wire::mul(value, scales[j]);
                    value = wire::mul(coefficient, value);
                    if (t > 0) value = wire::add(sum[lane].q[j].v[i], value);
                    sum[lane].q[j].v[i] = i < count ? value : 0.0f;
                }
            }
        });
    }
}

}  // namespace diloco::cuda
