// A tile is kQuads * 128 consecutive elements of one run, on which a warp works at a time. A quad
// is four consecutive elements (quads.h). Lane l has the quads that begin at elements 4 (l + 32 j),
// j < kQuads, so that the warp reads 512 contiguous bytes of fp32 at once.
//
// A "whole" tile has all its elements, lies in one tensor, and is aligned, so that it is read and
// written quad by quad. The first launch of a kernel takes the whole tiles (WholeTile); a second
// launch takes the other tiles (Rest, cuda/arguments.h). There, a tile in a misaligned tensor, or
// one that is cut short by the end of a run, is copied to the stage (lanes.h) 16 bytes at a time,
// each byte to the same address modulo 16. A tile with elements of several tensors is read element
// by element, and all these tiles are written so, 32 consecutive elements at a time.
#pragma once

#include <type_traits>

#include "cuda/lanes.h"
#include "cuda/quads.h"

namespace diloco::cuda {

template <int kQuads>
struct Quads {
    Quad q[kQuads];
};

template <int kQuads>
constexpr int kTile = kQuads * kQuad * kLanes;

// The element of the tile at which quad j of a lane begins.
DILOCO_DEVICE int quad_at(int lane, int j) { return kQuad * (lane + kLanes * j); }

struct Tile {
    int64_t first;   // index of the first element in the fragment
    int32_t size;    // number of elements, at most kTile
    int64_t scales;  // byte of a payload at which the first element's scale lies
    int64_t codes;   // byte of its code; a multiple of 16 in formats with a code for each element
    int64_t run;     // byte at which its run begins
    // In rotated formats the tile begins 128 * first_row elements after the begin of its block;
    // else 0.
    int32_t first_row;
    // Elements of the run from `first` on; not set for norms and for sparse formats.
    int64_t left = 0;
    static constexpr bool kIsWhole = false;  // whether the type is WholeTile

    // The number of elements of quad j of a lane that exist.
    DILOCO_DEVICE int count(int lane, int j) const {
        const int left = size - quad_at(lane, j);
        return left < 0 ? 0 : left < kQuad ? left : kQuad;
    }
};

// A whole tile of a tensor of type kTensor, see above. encode and reduce use this type only for
// blocks of kUsualBlock elements and without error feedback, and encode only with outer values.
template <DType kTensor = DType::kFp32>
struct WholeTile : Tile {
    DILOCO_DEVICE explicit WholeTile(const Tile& tile) : Tile(tile) {}
    static constexpr bool kIsWhole = true;
    static constexpr DType kDType = kTensor;
    DILOCO_DEVICE constexpr int count(int, int) const { return kQuad; }
};

// Moves `tile` on by `count` tiles within its run.
template <Format kFormat, int kQuads>
DILOCO_DEVICE void advance(const Runs& runs, Tile& tile, uint32_t count = 1) {
    tile.first += kTile<kQuads> * count;
    tile.scales += count * (2 * kTile<kQuads> >> runs.block_shift);
    tile.codes += kTile<kQuads> * wire::code_bits(kFormat) / 8 * count;
}

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
    tile.left = left;
    tile.scales = start + wire::scale_offset(kFormat) + 2 * (within >> runs.block_shift);
    tile.run = start;
    tile.first_row = 0;
    if constexpr (wire::has_element_codes(kFormat)) {
        tile.codes = start + runs.code_offset + within * wire::code_bits(kFormat) / 8;
    } else {
        constexpr int kBlock = wire::own_block(kFormat);
        tile.codes = start + runs.code_offset + within / kBlock * wire::own_bytes(kFormat);
        tile.first_row = static_cast<int32_t>(within % kBlock) / (kQuad * kLanes);
    }
    return tile;
}

// Returns the last index below `count` for which begins(index) is true; it must be true for 0 and
// for all indices before that one. The lanes test 32 evenly spaced entries at a time, so that two
// steps do for 1024 entries.
template <class Lanes, class F>
DILOCO_DEVICE int32_t find(const Lanes& lanes, int32_t count, F&& begins) {
    int32_t begin = 0;
    while (count > 1) {
        const int32_t step = (count + kLanes - 1) / kLanes;
        const int32_t before = lanes.num_where([&](int lane) {
            const int32_t at = lane * step;
            return at < count && (at == 0 || begins(begin + at));
        });
        const int32_t first = (before - 1) * step;
        begin += first;
        count = count - first < step ? count - first : step;
    }
    return begin;
}

// The segment (tensor) in which a tile begins; see Segment in arguments.h.
struct Place {
    uint64_t origin = 0;
    int64_t end = 0;         // the element at which the next segment begins
    int32_t entry = 0;       // index in the list of segments
    uint32_t within_16 = 0;  // origin % 16
    DType dtype = DType::kFp32;
};

// Sets `place` to the segment of an element. Call it before reads of a tile's arrays begin: it uses
// what it reads at once, and the compiler might then wait for all reads that have begun, too.
template <class Lanes>
DILOCO_DEVICE void move_to(const Lanes& lanes, const Segments& segments, int64_t element,
                           Place& place) {
    if (element < place.end) return;
    const Segment* list = list_of(segments);
    place.entry =
        find(lanes, segments.count, [&](int32_t i) { return begin_of(list[i]) <= element; });
    const Segment found = segment_at(segments, place.entry);
    place.origin = found.origin;
    place.within_16 = static_cast<uint32_t>(found.origin % 16);
    place.dtype = dtype_of(found);
    place.end = begin_of(segment_at(segments, place.entry + 1));
}

// The segment of an array that holds all elements of the fragment.
DILOCO_DEVICE Segment whole(const void* data, DType dtype) { return Segment::of(data, dtype, 0); }

template <DType kDType>
DILOCO_DEVICE uint64_t address_in(const Segment& segment, int64_t element) {
    return segment.origin + static_cast<uint64_t>(element) * (kDType == DType::kFp32 ? 4 : 2);
}

// The distance in bytes between successive quads of a lane.
template <DType kDType>
constexpr uint64_t kRowBytes = kQuad * kLanes * (kDType == DType::kFp32 ? 4 : 2);

// with_dtype() calls f with the dtype as a compile-time constant.
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
DILOCO_DEVICE bool is_quad_aligned(uint64_t origin) {
    return origin % (kDType == DType::kFp32 ? 16 : 8) == 0;
}

// The number of whole tiles from `tile` on that follow each other in one tensor, at most `most`; 0
// if the tensor is misaligned. The caller sees to it that they lie in one run.
template <int kQuads, class Lanes>
DILOCO_DEVICE uint32_t count_whole(const Lanes& lanes, const Segments& segments, const Tile& tile,
                                   uint32_t most, Place& place) {
    move_to(lanes, segments, tile.first, place);
    const uint32_t beyond = place.within_16 & (place.dtype == DType::kFp32 ? 15 : 7);
    const int64_t count = (place.end - tile.first) / kTile<kQuads>;
    return beyond != 0 ? 0 : count < most ? static_cast<uint32_t>(count) : most;
}

// The index, among all tiles, of tile i of the Rest.
template <class Lanes>
DILOCO_DEVICE uint32_t rest_tile(const Lanes& lanes, const Rest& rest, uint32_t i) {
    const TileRange* list = rest.in_memory != nullptr ? rest.in_memory : rest.inlined;
    const int32_t entry = find(lanes, rest.count, [&](int32_t at) { return list[at].before <= i; });
    return list[entry].first + (i - list[entry].before);
}

// Visits the tiles from `index` to `end`, and leaves `index` at `end`. Calls f(tile, count, place)
// for each series of `count` whole tiles in one run and one tensor, and skips the other tiles.
template <Format kFormat, int kQuads, class Lanes, class Args, class F>
DILOCO_DEVICE void each_stretch(const Lanes& lanes, const Args& args, const Runs& runs,
                                uint32_t& index, uint32_t end, F&& f) {
    while (index < end) {
        Place place;
        const Tile tile = tile_at<kFormat, kQuads>(runs, index);
        const int64_t in_run = tile.left / kTile<kQuads>;
        const uint32_t most = in_run < end - index ? static_cast<uint32_t>(in_run) : end - index;
        const uint32_t whole = most == 0 ? 0 : count_whole<kQuads>(lanes, args, tile, most, place);
        index += whole > 0 ? whole : 1;
        if (whole > 0) f(tile, whole, place);
    }
}

// Calls f with tile i of the Rest, unless the tile is whole and so the first launch's. (If all
// tiles are in the Rest, there is no first launch.)
template <Format kFormat, int kQuads, class Lanes, class Args, class F>
DILOCO_DEVICE void if_left(const Lanes& lanes, const Args& args, const Runs& runs, const Rest& rest,
                           uint32_t i, Place& place, F&& f) {
    const uint32_t index = rest.is_all ? i : rest_tile(lanes, rest, i);
    const Tile tile = tile_at<kFormat, kQuads>(runs, index);
    const bool is_whole = !rest.is_all && tile.size == kTile<kQuads> &&
                          count_whole<kQuads>(lanes, args, tile, 1, place) == 1;
    if (!is_whole) f(tile);
}

// Sets each element x to f(x, y).
template <int kQuads, class Lanes, class F>
DILOCO_DEVICE void combine(const Lanes& lanes, typename Lanes::template Of<Quads<kQuads>>& x,
                           const typename Lanes::template Of<Quads<kQuads>>& y, F&& f) {
    lanes.each([&](int lane) {
        DILOCO_UNROLL
        for (int j = 0; j < kQuads; ++j) {
            DILOCO_UNROLL
            for (int i = 0; i < kQuad; ++i) {
                float& value = x[lane].q[j].v[i];
                value = f(value, y[lane].q[j].v[i]);
            }
        }
    });
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

// Reads the quads of each lane from the stage.
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

// Begins to copy bytes [address, address + num_bytes) to a stage, at an offset of address % 16, so
// that aligned units of 16 bytes stay aligned. Reads no other bytes. The copies of 16 bytes are
// asynchronous.
template <int kElement, int kMaxBytes, class Lanes>
DILOCO_DEVICE void fetch(const Lanes& lanes, float* stage, uint64_t address, int num_bytes) {
    const int begin = static_cast<int>(address % 16), end = begin + num_bytes;
    const uint64_t origin = address - static_cast<uint64_t>(begin);
    auto* bytes = reinterpret_cast<uint8_t*>(stage);
    lanes.each([&](int lane) {
        DILOCO_UNROLL
        for (int i = 0; i <= kMaxBytes / (16 * kLanes); ++i) {
            const int at = 16 * (lane + kLanes * i);
            if (at >= begin && at + 16 <= end) {
                lanes.fetch(bytes + at, origin + static_cast<uint64_t>(at));
            }
        }
        // The elements before the first and after the last complete unit of 16 bytes.
        const auto copy = [&](int at) {
            using T = std::conditional_t<kElement == 4, uint32_t, uint16_t>;
            *reinterpret_cast<T*>(bytes + at) = load_global<T>(origin + static_cast<uint64_t>(at));
        };
        const int within = lane * kElement;
        if (within >= 16) return;
        if (begin != 0 && within >= begin && within < end) copy(within);
        const int last = end / 16 * 16;
        if ((last > 0 || begin == 0) && last + within < end) copy(last + within);
    });
}

// The quad at element `at` of a tile that fetch() has copied from `address` to the stage.
template <DType kDType>
DILOCO_DEVICE Quad fetched_quad(const float* stage, uint64_t address, int at) {
    const auto lead = static_cast<uint32_t>(address % 16);
    if constexpr (kDType == DType::kFp32) {
        const Quad own = load_staged(stage + at), next = load_staged(stage + at + kQuad);
        float w[7] = {own.v[0], own.v[1], own.v[2], own.v[3], next.v[0], next.v[1], next.v[2]};
        if ((lead & 8) != 0) {
            DILOCO_UNROLL
            for (int i = 0; i < 5; ++i) w[i] = w[i + 2];
        }
        if ((lead & 4) != 0) {
            DILOCO_UNROLL
            for (int i = 0; i < 4; ++i) w[i] = w[i + 1];
        }
        return {{w[0], w[1], w[2], w[3]}};
    } else {
        const auto* p = reinterpret_cast<const uint2*>(stage) + lead / 8 + at / kQuad;
        const uint2 own = p[0], next = p[1];
        uint32_t w[3] = {own.x, own.y, next.x};
        if ((lead & 4) != 0) {
            w[0] = own.y;
            w[1] = next.x;
            w[2] = next.y;
        }
        if ((lead & 2) != 0) {
            w[0] = w[0] >> 16 | w[1] << 16;
            w[1] = w[1] >> 16 | w[2] << 16;
        }
        return {{half_value(kDType, w[0] & 0xFFFFu), half_value(kDType, w[0] >> 16),
                 half_value(kDType, w[1] & 0xFFFFu), half_value(kDType, w[1] >> 16)}};
    }
}

template <DType kDType, int kQuads, class Lanes>
DILOCO_DEVICE void fetch_tile(const Lanes& lanes, float* stage, const Segment& segment,
                              const Tile& tile) {
    constexpr int kElement = kDType == DType::kFp32 ? 4 : 2;
    fetch<kElement, kTile<kQuads> * kElement>(lanes, stage, address_in<kDType>(segment, tile.first),
                                              tile.size * kElement);
}

// Waits for fetch_tile(), and reads the quads of each lane from the stage. Elements after the
// tile's last are zero.
template <DType kDType, int kQuads, class Lanes>
DILOCO_DEVICE void take_fetched(const Lanes& lanes, const float* stage, const Segment& segment,
                                const Tile& tile, typename Lanes::template Of<Quads<kQuads>>& x) {
    const uint64_t address = address_in<kDType>(segment, tile.first);
    lanes.wait();
    lanes.sync();
    lanes.each([&](int lane) {
        DILOCO_UNROLL
        for (int j = 0; j < kQuads; ++j) {
            const int count = tile.count(lane, j);
            x[lane].q[j] = fetched_quad<kDType>(stage, address, quad_at(lane, j));
            DILOCO_UNROLL
            for (int i = 0; i < kQuad; ++i)
                x[lane].q[j].v[i] = i < count ? x[lane].q[j].v[i] : 0.0f;
        }
    });
    lanes.sync();
}

// Reads a tile that lies in one segment, aligned or not. Elements after the tile's last are zero.
template <DType kDType, int kQuads, class Lanes, class T>
DILOCO_DEVICE void load_inside(const Lanes& lanes, const Segment& segment, bool is_aligned,
                               const T& tile, typename Lanes::template Of<Quads<kQuads>>& x) {
    if (T::kIsWhole || (tile.size == kTile<kQuads> && is_aligned)) {
        lanes.each([&](int lane) {
            const uint64_t own =
                address_in<kDType>(segment, tile.first + static_cast<uint32_t>(quad_at(lane, 0)));
            DILOCO_UNROLL
            for (int j = 0; j < kQuads; ++j) {
                x[lane].q[j] = load_quad(own + kRowBytes<kDType> * j, kDType);
            }
        });
        return;
    }
    if constexpr (!T::kIsWhole) {
        fetch_tile<kDType, kQuads>(lanes, lanes.stage, segment, tile);
        take_fetched<kDType, kQuads>(lanes, lanes.stage, segment, tile, x);
    }
}

// As load_inside(), for an array that holds all elements of the fragment.
template <DType kDType, int kQuads, class Lanes, class T>
DILOCO_DEVICE void load_flat_tile(const Lanes& lanes, const void* array, const T& tile,
                                  typename Lanes::template Of<Quads<kQuads>>& x) {
    const Segment segment = whole(array, kDType);
    load_inside<kDType, kQuads>(lanes, segment, is_quad_aligned<kDType>(segment.origin), tile, x);
}

template <DType kDType, int kQuads, class Lanes, class T>
DILOCO_DEVICE void store_inside(const Lanes& lanes, const Segment& segment, bool is_aligned,
                                const T& tile,
                                const typename Lanes::template Of<Quads<kQuads>>& x) {
    if (T::kIsWhole || (tile.size == kTile<kQuads> && is_aligned)) {
        lanes.each([&](int lane) {
            const uint64_t own =
                address_in<kDType>(segment, tile.first + static_cast<uint32_t>(quad_at(lane, 0)));
            DILOCO_UNROLL
            for (int j = 0; j < kQuads; ++j) {
                store_quad(own + kRowBytes<kDType> * j, kDType, x[lane].q[j]);
            }
        });
        return;
    }
    if constexpr (!T::kIsWhole) {
        stage<kQuads>(lanes, x);
        lanes.each([&](int lane) {
            DILOCO_UNROLL_8
            for (int i = lane; i < tile.size; i += kLanes) {
                store_element(address_in<kDType>(segment, tile.first + i), kDType, lanes.stage[i]);
            }
        });
        lanes.sync();
    }
}

template <DType kDType, int kQuads, class Lanes, class T>
DILOCO_DEVICE void store_flat_tile(const Lanes& lanes, void* array, const T& tile,
                                   const typename Lanes::template Of<Quads<kQuads>>& x) {
    const Segment segment = whole(array, kDType);
    const bool is_aligned = is_quad_aligned<kDType>(segment.origin);
    store_inside<kDType, kQuads>(lanes, segment, is_aligned, tile, x);
}

// Calls f(segment, is_aligned, dtype constant) if the tile lies in one segment, else
// straddles(entry), where `entry` points to the segment of the tile's first element.
template <class Lanes, class T, class F, class G>
DILOCO_DEVICE void by_place(const Lanes& lanes, const Segments& segments, const T& tile,
                            Place& place, F&& f, G&& straddles) {
    if constexpr (!T::kIsWhole) move_to(lanes, segments, tile.first, place);
    if constexpr (T::kIsWhole) {
        f(Segment{place.origin, 0}, true, DTypeConstant<T::kDType>{});
    } else if (place.end >= tile.first + tile.size) {
        with_dtype(place.dtype, [&](auto dtype) {
            f(Segment{place.origin, static_cast<int64_t>(place.dtype)},
              is_quad_aligned<decltype(dtype)::value>(place.within_16), dtype);
        });
    } else {
        straddles(list_of(segments) + place.entry);
    }
}

constexpr int kStraddleBatch = 4;  // elements of a lane that are read before the first is used

// Reads a tile with elements of several segments. `entry` points to the first of them.
template <int kQuads, class Lanes>
DILOCO_DEVICE void load_straddling(const Lanes& lanes, const Segment* entry, const Tile& tile,
                                   typename Lanes::template Of<Quads<kQuads>>& x) {
    lanes.each([&](int lane) {
        const Segment* at = entry;
        for (int first = lane; first < kTile<kQuads>; first += kLanes * kStraddleBatch) {
            uint64_t address[kStraddleBatch];
            DType dtype[kStraddleBatch];
            uint32_t bits[kStraddleBatch];
            DILOCO_UNROLL
            for (int k = 0; k < kStraddleBatch; ++k) {
                const int i = first + k * kLanes;
                dtype[k] = DType::kFp32;
                address[k] = 0;
                if (i >= tile.size) continue;
                const int64_t element = tile.first + i;
                while (begin_of(at[1]) <= element) ++at;
                dtype[k] = dtype_of(*at);
                address[k] = at->origin +
                             static_cast<uint64_t>(element) * (dtype[k] == DType::kFp32 ? 4 : 2);
            }
            DILOCO_UNROLL
            for (int k = 0; k < kStraddleBatch; ++k) {
                bits[k] = 0;
                if (address[k] == 0) continue;
                if (dtype[k] == DType::kFp32) {
                    bits[k] = load_global<uint32_t>(address[k]);
                } else {
                    bits[k] = load_global<uint16_t>(address[k]);
                }
            }
            DILOCO_UNROLL
            for (int k = 0; k < kStraddleBatch; ++k) {
                lanes.stage[first + k * kLanes] = dtype[k] == DType::kFp32
                                                      ? wire::bits_float(bits[k])
                                                      : half_value(dtype[k], bits[k]);
            }
        }
    });
    unstage<kQuads>(lanes, x);
}

// Calls f(index in the tile, address, dtype) for each element of a tile with elements of several
// segments; the lanes take 32 consecutive elements at a time. `entry` points to the first segment.
template <class Lanes, class F>
DILOCO_DEVICE void each_straddling(const Lanes& lanes, const Segment* entry, const Tile& tile,
                                   F&& f) {
    lanes.each([&](int lane) {
        const Segment* at = entry;
        for (int i = lane; i < tile.size; i += kLanes) {
            const int64_t element = tile.first + i;
            while (begin_of(at[1]) <= element) ++at;
            const DType dtype = dtype_of(*at);
            const auto bytes = static_cast<uint64_t>(element) * (dtype == DType::kFp32 ? 4 : 2);
            f(i, at->origin + bytes, dtype);
        }
    });
    lanes.sync();
}

// Reads a tile of the fragment's tensors; elements that do not exist are zero.
template <int kQuads, class Lanes, class T>
DILOCO_DEVICE void load_tile(const Lanes& lanes, const Segments& segments, const T& tile,
                             Place& place, typename Lanes::template Of<Quads<kQuads>>& x) {
    by_place(
        lanes, segments, tile, place,
        [&](const Segment& segment, bool is_aligned, auto dtype) {
            load_inside<decltype(dtype)::value, kQuads>(lanes, segment, is_aligned, tile, x);
        },
        [&](const Segment* entry) { load_straddling<kQuads>(lanes, entry, tile, x); });
}

// Rounds each element to the dtype of its tensor, as codec::as_written() does.
template <int kQuads, class Lanes, class T>
DILOCO_DEVICE void round_tile(const Lanes& lanes, const Segments& segments, const T& tile,
                              Place& place, typename Lanes::template Of<Quads<kQuads>>& x) {
    by_place(
        lanes, segments, tile, place,
        [&](const Segment&, bool, auto dtype) {
            constexpr DType kDType = decltype(dtype)::value;
            if constexpr (kDType != DType::kFp32) {
                combine<kQuads>(lanes, x, x,
                                [](float own, float) { return codec::as_written(kDType, own); });
            }
        },
        [&](const Segment* entry) {
            stage<kQuads>(lanes, x);
            each_straddling(lanes, entry, tile, [&](int i, uint64_t, DType dtype) {
                lanes.stage[i] = codec::as_written(dtype, lanes.stage[i]);
            });
            unstage<kQuads>(lanes, x);
        });
}

template <int kQuads, class Lanes, class T>
DILOCO_DEVICE void store_tile(const Lanes& lanes, const Segments& segments, const T& tile,
                              Place& place, const typename Lanes::template Of<Quads<kQuads>>& x) {
    by_place(
        lanes, segments, tile, place,
        [&](const Segment& segment, bool is_aligned, auto dtype) {
            store_inside<decltype(dtype)::value, kQuads>(lanes, segment, is_aligned, tile, x);
        },
        [&](const Segment* entry) {
            stage<kQuads>(lanes, x);
            each_straddling(lanes, entry, tile, [&](int i, uint64_t address, DType dtype) {
                store_element(address, dtype, lanes.stage[i]);
            });
        });
}

}  // namespace diloco::cuda
