// Encoding of one tile (tiles.h). Each element is read once: the lanes that hold a block find its
// largest magnitude together, and then encode from their registers.
#pragma once

#include <type_traits>

#include "cuda/by_format.h"
#include "cuda/dot_tile.h"
#include "cuda/terms.h"

namespace diloco::cuda {

constexpr int kLargeQuads = kLargeTile / (kQuad * kLanes);
template <class Args>
constexpr int kSmallTile = std::is_same_v<Args, EncodeArgs> ? kEncodeTile : kReduceTile;
template <int kQuads>
constexpr int kEncodeStageFloats = 2 * (kTile<kQuads> + kStageSlack);
static_assert(kLargeTile == wire::kMaxBlockSize && kEncodeStageFloats<kLargeQuads> <= kStageFloats);

// Calls f with the format, whether rounding is stochastic, and the number of quads per lane, as
// compile-time constants.
template <class Args, class F>
void by_tile(const Args& args, Format format, bool is_stochastic, F&& f) {
    by_rounding(format, is_stochastic, [&](auto constant, auto stochastic) {
        if constexpr (wire::has_element_codes(decltype(constant)::value)) {
            if (is_small_tile(kSmallTile<Args>, format, args.target.runs.block_size)) {
                constexpr int kQuads = kSmallTile<Args> / (kQuad * kLanes);
                return f(constant, stochastic, std::integral_constant<int, kQuads>{});
            }
        }
        f(constant, stochastic, std::integral_constant<int, kLargeQuads>{});
    });
}

template <int kQuads>
struct PerQuad {
    uint32_t magnitude[kQuads];
    float scale[kQuads];
    float inverse[kQuads];
};

struct RandomWords {
    uint32_t own, other;
};

// Finds the largest magnitude of each quad, and adds the number of bad elements to `bad`.
template <int kQuads, class Lanes>
DILOCO_DEVICE void find_magnitudes(const Lanes& lanes,
                                   const typename Lanes::template Of<Quads<kQuads>>& x,
                                   typename Lanes::template Of<PerQuad<kQuads>>& quads,
                                   typename Lanes::template Of<int>& bad) {
    lanes.each([&](int lane) {
        uint32_t most = 0;
        DILOCO_UNROLL
        for (int j = 0; j < kQuads; ++j) {
            uint32_t largest = 0;
            DILOCO_UNROLL
            for (int i = 0; i < kQuad; ++i) {
                const uint32_t m = wire::float_bits(x[lane].q[j].v[i]) & wire::kMagnitudeMask;
                largest = m > largest ? m : largest;
            }
            quads[lane].magnitude[j] = largest;
            most = largest > most ? largest : most;
        }
        if (most <= wire::kLargestGoodBits) return;
        DILOCO_UNROLL
        for (int j = 0; j < kQuads; ++j) {
            DILOCO_UNROLL
            for (int i = 0; i < kQuad; ++i) bad[lane] += wire::is_bad(x[lane].q[j].v[i]);
        }
    });
}

// Finds the largest magnitude of each block from the quads' magnitudes, makes its scale, and writes
// the scale to the payload. If a lane has several quads of a block, the first does the work, and
// the others copy its result.
template <Format kFormat, int kQuads, class Lanes, class T>
DILOCO_DEVICE void find_scales(const Lanes& lanes, const Runs& runs, const T& tile,
                               uint8_t* payload,
                               typename Lanes::template Of<PerQuad<kQuads>>& quads) {
    const int block = T::kIsWhole ? kUsualBlock : runs.block_size;
    constexpr int kRow = kQuad * kLanes;
    const int stride = block > kRow ? block / kRow : 1;  // quads of a lane in a block
    const int num_lanes = block < kRow ? block / kQuad : kLanes;
    const bool is_aligned =
        T::kIsWhole || reinterpret_cast<uint64_t>(payload) % wire::kAlignment == 0;
    DILOCO_UNROLL
    for (int n = 1; n < kQuads; n *= 2) {
        if (n >= stride) break;
        lanes.each([&](int lane) {
            DILOCO_UNROLL
            for (int j = 0; j < kQuads; j += 2 * n) {
                const uint32_t upper = quads[lane].magnitude[j + n];
                uint32_t& lower = quads[lane].magnitude[j];
                lower = upper > lower ? upper : lower;
            }
        });
    }
    DILOCO_UNROLL
    for (int j = 0; j < kQuads; ++j) {
        if ((j & (stride - 1)) != 0) continue;
        lanes.max_over(num_lanes, [&](int lane) -> uint32_t& { return quads[lane].magnitude[j]; });
        lanes.each([&](int lane) {
            const auto scale =
                static_cast<uint16_t>(scale_of_bits<kFormat>(quads[lane].magnitude[j]));
            quads[lane].scale[j] = wire::scale_value(scale);
            quads[lane].inverse[j] = inverse_of(quads[lane].scale[j]);
            const int at = quad_at(lane, j);
            if ((lane & (num_lanes - 1)) == 0 && at < tile.size) {
                store_scale(payload + tile.scales + 2 * (at >> runs.block_shift), scale,
                            is_aligned);
            }
        });
    }
    DILOCO_UNROLL
    for (int n = kQuads / 2; n >= 1; n /= 2) {
        if (n >= stride) continue;
        lanes.each([&](int lane) {
            DILOCO_UNROLL
            for (int j = 0; j < kQuads; j += 2 * n) {
                quads[lane].magnitude[j + n] = quads[lane].magnitude[j];
                quads[lane].scale[j + n] = quads[lane].scale[j];
                quads[lane].inverse[j + n] = quads[lane].inverse[j];
            }
        });
    }
}

// The random words of quads j and j + 1 of each lane. Two neighbouring lanes share the Philox block
// of a quad: the even lane computes the block for quad j, the odd lane for quad j + 1, and they
// exchange words.
template <class Lanes>
DILOCO_DEVICE void draw(const Lanes& lanes, const EncodeTarget& target, const Tile& tile, int j,
                        typename Lanes::template Of<RandomWords>& words) {
    lanes.each([&](int lane) {
        const bool is_odd = lane % 2 != 0;
        const uint64_t element = target.index_begin + static_cast<uint64_t>(tile.first) +
                                 static_cast<uint64_t>(quad_at(lane, is_odd ? j + 1 : j));
        const wire::PhiloxBlock block =
            wire::philox(element / wire::kElementsPerPhilox, target.key);
        const bool is_upper = lane / 2 % 2 != 0;
        const uint32_t even = is_upper ? block.word[2] : block.word[0];
        const uint32_t odd = is_upper ? block.word[3] : block.word[1];
        words[lane].own = is_odd ? odd : even;
        words[lane].other = is_odd ? even : odd;
    });
    lanes.swap(1, [&](int lane) -> uint32_t& { return words[lane].other; });
}

// The codes of quad j, whose random bits are in `random`.
template <Format kFormat, bool kStochastic, int kQuads>
DILOCO_DEVICE CodeQuad<kFormat> codes_of(const Quad& x, const PerQuad<kQuads>& quads, int j,
                                         uint32_t random) {
    CodeQuad<kFormat> codes{};
    if constexpr (wire::has_scales(kFormat)) {
        Quad y;
        DILOCO_UNROLL
        for (int i = 0; i < kQuad; ++i) y.v[i] = wire::mul(x.v[i], quads.inverse[j]);
        codes = scaled_codes_of<kFormat, kStochastic>(y, random);
        if (quads.magnitude[j] > wire::kLargestGoodBits) codes = {};
    } else {
        DILOCO_UNROLL
        for (int i = 0; i < kQuad; ++i) {
            uint32_t code = 0;
            if constexpr (kStochastic) {
                code = wire::encode_stochastic<kFormat>(x.v[i], wire::random16_of(random, i));
            } else {
                code = wire::encode_nearest<kFormat>(x.v[i]);
            }
            codes.put(i, wire::is_bad(x.v[i]) ? 0 : code);
        }
    }
    return codes;
}

// Encodes quad j of a lane and writes its codes. With keeps_rest, x becomes the error of the
// encoding. Elements after the tile's last are zero, and so are their codes.
template <Format kFormat, bool kStochastic, int kQuads>
DILOCO_DEVICE void encode_quad(uint8_t* codes_at, bool is_aligned, int count, bool keeps_rest,
                               Quad& x, const PerQuad<kQuads>& quads, int j, uint32_t random,
                               int& bad) {
    CodeQuad<kFormat> codes = codes_of<kFormat, kStochastic, kQuads>(x, quads, j, random);
    if constexpr (kFormat == Format::kFp16) {
        CodeQuad<kFormat> good{};
        DILOCO_UNROLL
        for (int i = 0; i < kQuad; ++i) {
            const uint32_t code = codes.get(i);
            const bool is_bad = wire::is_code_bad<kFormat>(code);
            bad += is_bad;
            good.put(i, is_bad ? 0 : code);
        }
        codes = good;
    }
    if (keeps_rest) {
        const Quad values = values_of<kFormat>(codes);
        DILOCO_UNROLL
        for (int i = 0; i < kQuad; ++i) {
            float value = values.v[i];
            if constexpr (wire::has_scales(kFormat)) value = wire::mul(value, quads.scale[j]);
            x.v[i] = wire::sub(x.v[i], value);
        }
    }
    if (count > 0) store_codes<kFormat>(codes_at, codes, count, is_aligned);
}

// The residual has a part of the stage of its own, so that it is copied while other arrays are
// read, and takes no registers until it is needed.
template <int kQuads, class Lanes>
DILOCO_DEVICE float* residual_stage(const Lanes& lanes) {
    return lanes.stage + kTile<kQuads> + kStageSlack;
}

template <int kQuads, class Lanes>
DILOCO_DEVICE void fetch_residual(const Lanes& lanes, const EncodeTarget& target,
                                  const Tile& tile) {
    if (target.residual == nullptr) return;
    const Segment array = whole(target.residual, target.residual_dtype);
    float* stage = residual_stage<kQuads>(lanes);
    if (target.residual_dtype == DType::kFp32) {
        fetch_tile<DType::kFp32, kQuads>(lanes, stage, array, tile);
    } else {
        fetch_tile<DType::kBf16, kQuads>(lanes, stage, array, tile);
    }
}

// Adds the residual to x, if there is one.
template <int kQuads, class Lanes>
DILOCO_DEVICE void add_residual(const Lanes& lanes, const EncodeTarget& target, const Tile& tile,
                                typename Lanes::template Of<Quads<kQuads>>& x) {
    if (target.residual == nullptr) return;
    typename Lanes::template Of<Quads<kQuads>> residual;
    const Segment array = whole(target.residual, target.residual_dtype);
    const float* stage = residual_stage<kQuads>(lanes);
    if (target.residual_dtype == DType::kFp32) {
        take_fetched<DType::kFp32, kQuads>(lanes, stage, array, tile, residual);
    } else {
        take_fetched<DType::kBf16, kQuads>(lanes, stage, array, tile, residual);
    }
    combine<kQuads>(lanes, x, residual,
                    [](float own, float other) { return wire::add(own, other); });
}

// Writes x to the new residual.
template <int kQuads, class Lanes>
DILOCO_DEVICE void store_residual(const Lanes& lanes, const EncodeTarget& target, const Tile& tile,
                                  const typename Lanes::template Of<Quads<kQuads>>& x) {
    if (target.residual_dtype == DType::kFp32) {
        store_flat_tile<DType::kFp32, kQuads>(lanes, target.new_residual, tile, x);
    } else {
        store_flat_tile<DType::kBf16, kQuads>(lanes, target.new_residual, tile, x);
    }
}

// Loads x = c(outer) - params + residual, or params + residual without outer; c() rounds to the
// parameters' dtype. The reads of all arrays begin before the first is used.
template <int kQuads, class Lanes, class T>
DILOCO_DEVICE void load_values(const Lanes& lanes, const EncodeArgs& args, const T& tile,
                               Place& place, typename Lanes::template Of<Quads<kQuads>>& x) {
    typename Lanes::template Of<Quads<kQuads>> outer;
    if constexpr (!T::kIsWhole) {
        move_to(lanes, args.params, tile.first, place);
        fetch_residual<kQuads>(lanes, args.target, tile);
    }
    const bool has_outer = T::kIsWhole || args.outer != nullptr;
    if (has_outer) load_flat_tile<DType::kFp32, kQuads>(lanes, args.outer, tile, outer);
    load_tile<kQuads>(lanes, args.params, tile, place, x);
    if (has_outer) {
        round_tile<kQuads>(lanes, args.params, tile, place, outer);
        combine<kQuads>(lanes, x, outer,
                        [](float own, float other) { return wire::sub(other, own); });
    }
    if constexpr (!T::kIsWhole) add_residual<kQuads>(lanes, args.target, tile, x);
}

// Encodes x in a format that has a code for each element. If there is a new residual, x becomes the
// error of the encoding.
template <Format kFormat, bool kStochastic, int kQuads, class Lanes, class T>
DILOCO_DEVICE void encode_elements(const Lanes& lanes, const EncodeTarget& target, const T& tile,
                                   typename Lanes::template Of<Quads<kQuads>>& x,
                                   typename Lanes::template Of<int>& bad) {
    uint8_t* payload = target.payload;
    typename Lanes::template Of<PerQuad<kQuads>> quads;
    find_magnitudes<kQuads>(lanes, x, quads, bad);
    if constexpr (wire::has_scales(kFormat)) {
        find_scales<kFormat, kQuads>(lanes, target.runs, tile, payload, quads);
    }
    const bool is_aligned =
        T::kIsWhole || reinterpret_cast<uint64_t>(payload) % wire::kAlignment == 0;
    DILOCO_UNROLL
    for (int pair = 0; pair < kQuads; pair += 2) {
        typename Lanes::template Of<RandomWords> words;
        if constexpr (kStochastic) draw(lanes, target, tile, pair, words);
        lanes.each([&](int lane) {
            DILOCO_UNROLL
            for (int j = pair; j < pair + 2; ++j) {
                const bool is_own = (j - pair) == lane % 2;
                uint32_t word = 0;
                if constexpr (kStochastic) word = is_own ? words[lane].own : words[lane].other;
                constexpr int kBytes = CodeQuad<kFormat>::kBytes;
                encode_quad<kFormat, kStochastic, kQuads>(
                    payload + tile.codes + static_cast<uint32_t>(kBytes * lane) +
                        kBytes * kLanes * j,
                    is_aligned, tile.count(lane, j), !T::kIsWhole && target.new_residual != nullptr,
                    x[lane].q[j], quads[lane], j, word, bad[lane]);
            }
        });
    }
}

// Encodes x in any format but the sparse ones, and adds the number of bad elements to `bad`.
template <Format kFormat, bool kStochastic, int kQuads, class Lanes, class T>
DILOCO_DEVICE void encode_quads(const Lanes& lanes, const EncodeTarget& target, const T& tile,
                                typename Lanes::template Of<Quads<kQuads>>& x,
                                typename Lanes::template Of<int>& bad) {
    if constexpr (wire::is_rotated(kFormat)) {
        encode_rotated<kFormat, kQuads>(lanes, target, tile, x, bad);
    } else {
        encode_elements<kFormat, kStochastic, kQuads>(lanes, target, tile, x, bad);
    }
    if constexpr (!T::kIsWhole) {
        if (target.new_residual != nullptr) store_residual<kQuads>(lanes, target, tile, x);
    }
}

// One tile of encode: writes the codes of c(outer) - params + residual, or of params + residual.
template <Format kFormat, bool kStochastic, int kQuads, class Lanes, class T>
DILOCO_DEVICE void encode_tile(const Lanes& lanes, const EncodeArgs& args, const T& tile,
                               Place& place, typename Lanes::template Of<int>& bad) {
    typename Lanes::template Of<Quads<kQuads>> x;
    load_values<kQuads>(lanes, args, tile, place, x);
    encode_quads<kFormat, kStochastic, kQuads>(lanes, args.target, tile, x, bad);
}

// One tile of reduce: writes the codes of the weighted sum of the runs plus residual.
template <Format kFormat, bool kStochastic, int kQuads, class Lanes, class T>
DILOCO_DEVICE void encode_tile(const Lanes& lanes, const ReduceArgs& args, const T& tile, Place&,
                               typename Lanes::template Of<int>& bad) {
    typename Lanes::template Of<Quads<kQuads>> x;
    if constexpr (!T::kIsWhole) fetch_residual<kQuads>(lanes, args.target, tile);
    sum_terms<kFormat, kQuads>(lanes, args.target.runs, args.terms, tile, x);
    if constexpr (!T::kIsWhole) add_residual<kQuads>(lanes, args.target, tile, x);
    encode_quads<kFormat, kStochastic, kQuads>(lanes, args.target, tile, x, bad);
}

template <int kQuads, class Lanes>
DILOCO_DEVICE uint32_t count_whole(const Lanes& lanes, const EncodeArgs& args, const Tile& tile,
                                   uint32_t most, Place& place) {
    return count_whole<kQuads>(lanes, args.params, tile, most, place);
}

template <int kQuads, class Lanes>
DILOCO_DEVICE uint32_t count_whole(const Lanes&, const ReduceArgs&, const Tile&, uint32_t most,
                                   Place&) {
    return most;
}

template <class Lanes>
DILOCO_DEVICE void count_bad(const Lanes& lanes, const EncodeTarget& target,
                             const typename Lanes::template Of<int>& bad) {
    if (target.nonfinite == nullptr) return;
    lanes.count(target.nonfinite, [&](int lane) { return bad[lane]; });
}

// with_own_dtype() calls f with the dtype of the tensor at `place` as a compile-time constant.
// reduce has no tensor; its dtype is fp32.
template <class F>
DILOCO_DEVICE void with_own_dtype(const EncodeArgs&, const Place& place, F&& f) {
    with_dtype(place.dtype, f);
}
template <class F>
DILOCO_DEVICE void with_own_dtype(const ReduceArgs&, const Place&, F&& f) {
    f(DTypeConstant<DType::kFp32>{});
}

// Encodes the first of `left` whole tiles in a faster way, if there is one, and returns their
// number or 0. With rounding to nearest, reduce of int8 and int4 has one (dot_tile.h), if the
// weights are equal powers of two.
template <Format kFormat, bool kStochastic, class Lanes>
DILOCO_DEVICE uint32_t take_tiles(const Lanes&, const EncodeArgs&, const Tile&, uint32_t) {
    return 0;
}
template <Format kFormat, bool kStochastic, class Lanes>
DILOCO_DEVICE uint32_t take_tiles(const Lanes& lanes, const ReduceArgs& args, const Tile& tile,
                                  uint32_t left) {
    if constexpr (kHasDots<kFormat> && !kStochastic) {
        if (args.terms.dot_exponent > 0) return 0;
        constexpr int kTiles = kDotTiles<kFormat>;
        if constexpr (kTiles > 1) {
            const bool fits = left >= kTiles && args.terms.count == kDotTerms;
            if (fits && reduce_dots<kFormat, kTiles>(lanes, args, tile)) return kTiles;
        }
        if (reduce_dots<kFormat, 1>(lanes, args, tile)) return 1;
    }
    return 0;
}

// Encodes the whole tiles from `index` to `end`, and leaves `index` at `end`.
template <Format kFormat, bool kStochastic, int kQuads, class Lanes, class Args>
DILOCO_DEVICE void encode_whole(const Lanes& lanes, const Args& args, uint32_t& index, uint32_t end,
                                typename Lanes::template Of<int>& bad) {
    const Runs& runs = args.target.runs;
    each_stretch<kFormat, kQuads>(
        lanes, args, runs, index, end, [&](Tile tile, uint32_t left, Place& place) {
            with_own_dtype(args, place, [&](auto dtype) {
                while (left > 0) {
                    uint32_t taken = take_tiles<kFormat, kStochastic>(lanes, args, tile, left);
                    if (taken == 0) {
                        encode_tile<kFormat, kStochastic, kQuads>(
                            lanes, args, WholeTile<decltype(dtype)::value>(tile), place, bad);
                        taken = 1;
                    }
                    advance<kFormat, kQuads>(runs, tile, taken);
                    left -= taken;
                }
            });
        });
}

}  // namespace diloco::cuda
