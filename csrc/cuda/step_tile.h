// One tile of the outer step, of decode and of merge. No lane needs another lane's values, so a
// tile need not have complete blocks.
#pragma once

#include "codec/step_rule.h"
#include "cuda/terms.h"

namespace diloco::cuda {

constexpr int kStepQuads = kStepTile / (kQuad * kLanes);

template <class Lanes>
using StepQuads = typename Lanes::template Of<Quads<kStepQuads>>;

template <class Lanes>
DILOCO_DEVICE void load_flat(const Lanes& lanes, const float* array, const Tile& tile,
                             StepQuads<Lanes>& x) {
    load_flat_tile<DType::kFp32, kStepQuads>(lanes, array, tile, x);
}

template <class Lanes>
DILOCO_DEVICE void store_flat(const Lanes& lanes, float* array, const Tile& tile,
                              const StepQuads<Lanes>& x) {
    store_flat_tile<DType::kFp32, kStepQuads>(lanes, array, tile, x);
}

// Calls f(lane, j, i) for each element of a lane.
template <class Lanes, class F>
DILOCO_DEVICE void each_element(const Lanes& lanes, F&& f) {
    lanes.each([&](int lane) {
        DILOCO_UNROLL
        for (int j = 0; j < kStepQuads; ++j) {
            DILOCO_UNROLL
            for (int i = 0; i < kQuad; ++i) f(lane, j, i);
        }
    });
}

// Sets `outer` to alpha * params + (1 - alpha) * outer, as codec::merged() does.
template <class Lanes>
DILOCO_DEVICE void blend(const Lanes& lanes, const Segments& params, const Tile& tile, Place& place,
                         float alpha, float one_minus_alpha, StepQuads<Lanes>& outer) {
    by_place(
        lanes, params, tile, place,
        [&](const Segment& segment, bool is_aligned, auto dtype) {
            constexpr DType kDType = decltype(dtype)::value;
            StepQuads<Lanes> local;
            load_inside<kDType, kStepQuads>(lanes, segment, is_aligned, tile, local);
            combine<kStepQuads>(lanes, outer, local, [&](float own, float other) {
                return codec::merged(kDType, other, own, alpha, one_minus_alpha);
            });
        },
        [&](const Segment* entry) {
            stage<kStepQuads>(lanes, outer);
            each_straddling(lanes, entry, tile, [&](int i, uint64_t address, DType dtype) {
                lanes.stage[i] = codec::merged(dtype, load_element(address, dtype), lanes.stage[i],
                                               alpha, one_minus_alpha);
            });
            unstage<kStepQuads>(lanes, outer);
        });
}

// Writes outer to the parameters, rounded to nearest. If alpha is not 0, `outer` first becomes the
// result of blend().
template <class Lanes>
DILOCO_DEVICE void merge_into(const Lanes& lanes, const Segments& params, const Tile& tile,
                              Place& place, float alpha, float one_minus_alpha,
                              StepQuads<Lanes>& outer) {
    if (alpha != 0.0f) blend(lanes, params, tile, place, alpha, one_minus_alpha, outer);
    store_tile<kStepQuads>(lanes, params, tile, place, outer);
}

// The values of a tile in a step: outer, the first and second state tensor of the optimizer, and
// the gradient g, which is the weighted sum of the terms.
template <class Lanes>
struct StepArrays {
    StepQuads<Lanes> outer, first, second, g;
};

template <bool kIsAdam>
DILOCO_DEVICE bool has_momentum(const StepArgs& args) {
    return kIsAdam || args.constants.optimizer != codec::Optimizer::kSgd;
}

template <bool kIsAdam, class Lanes>
DILOCO_DEVICE void load_step(const Lanes& lanes, const StepArgs& args, const Tile& tile,
                             StepArrays<Lanes>& a) {
    load_flat(lanes, args.outer, tile, a.outer);
    if (has_momentum<kIsAdam>(args)) load_flat(lanes, args.momentum, tile, a.first);
    if constexpr (kIsAdam) load_flat(lanes, args.second, tile, a.second);
}

// Takes the outer step of SGD, heavy ball, Nesterov or Adam with gradient g, writes outer and the
// optimizer's state, and merges outer into the parameters.
template <bool kIsAdam, class Lanes>
DILOCO_DEVICE void finish_step(const Lanes& lanes, const StepArgs& args, const Tile& tile,
                               Place& place, StepArrays<Lanes>& a) {
    const codec::StepConstants& c = args.constants;
    each_element(lanes, [&](int lane, int j, int i) {
        float value = a.g[lane].q[j].v[i];
        float& first = a.first[lane].q[j].v[i];
        if constexpr (kIsAdam) {
            value = codec::adam_update(c, first, a.second[lane].q[j].v[i], value);
        } else if (has_momentum<kIsAdam>(args)) {
            value = codec::momentum_update(c, first, value);
        } else {
            value = wire::mul(c.lr, value);
        }
        a.outer[lane].q[j].v[i] = wire::sub(a.outer[lane].q[j].v[i], value);
    });
    if (has_momentum<kIsAdam>(args)) store_flat(lanes, args.momentum, tile, a.first);
    if constexpr (kIsAdam) store_flat(lanes, args.second, tile, a.second);
    store_flat(lanes, args.outer, tile, a.outer);
    merge_into(lanes, args.params, tile, place, c.alpha, c.one_minus_alpha, a.outer);
}

template <Format kFormat, bool kIsAdam, class Lanes>
DILOCO_DEVICE void step_tile(const Lanes& lanes, const StepArgs& args, uint32_t index,
                             Place& place) {
    const Tile tile = tile_at<kFormat, kStepQuads>(args.runs, index);
    move_to(lanes, args.params, tile.first, place);
    StepArrays<Lanes> a;
    load_step<kIsAdam>(lanes, args, tile, a);
    sum_terms<kFormat, kStepQuads>(lanes, args.runs, args.terms, tile, a.g);
    finish_step<kIsAdam>(lanes, args, tile, place, a);
}

DILOCO_DEVICE bool commits(const StepArgs& args) {
    return args.constants.optimizer == codec::Optimizer::kCommit;
}
DILOCO_DEVICE bool commits_momentum(const StepArgs& args) {
    return commits(args) && args.momentum != nullptr;
}

template <class Lanes>
DILOCO_DEVICE void load_arrival(const Lanes& lanes, const StepArgs& args, const Tile& tile,
                                StepArrays<Lanes>& a) {
    if (!args.constants.is_first) load_flat(lanes, args.second, tile, a.second);
    if (commits(args)) load_flat(lanes, args.outer, tile, a.outer);
    if (commits_momentum(args)) load_flat(lanes, args.momentum, tile, a.first);
}

// Adds the update g of an arrival to the sum of its period (args.second), which the first arrival
// begins: d = sum + g, or g. The last arrival takes the step of codec::commit_update(), which uses
// d; other arrivals store d.
template <class Lanes>
DILOCO_DEVICE void finish_arrival(const Lanes& lanes, const StepArgs& args, const Tile& tile,
                                  StepArrays<Lanes>& a) {
    const codec::StepConstants& c = args.constants;
    const bool has_momentum = commits_momentum(args);
    if (!c.is_first) {
        each_element(lanes, [&](int lane, int j, int i) {
            float& value = a.g[lane].q[j].v[i];
            value = wire::add(a.second[lane].q[j].v[i], value);
        });
    }
    if (!commits(args)) {
        store_flat(lanes, args.second, tile, a.g);
        return;
    }
    each_element(lanes, [&](int lane, int j, int i) {
        const float step =
            codec::commit_update(c, has_momentum, a.first[lane].q[j].v[i], a.g[lane].q[j].v[i]);
        a.outer[lane].q[j].v[i] = wire::sub(a.outer[lane].q[j].v[i], step);
    });
    if (has_momentum) store_flat(lanes, args.momentum, tile, a.first);
    store_flat(lanes, args.outer, tile, a.outer);
}

template <Format kFormat, class Lanes>
DILOCO_DEVICE void arrival_tile(const Lanes& lanes, const StepArgs& args, uint32_t index) {
    const Tile tile = tile_at<kFormat, kStepQuads>(args.runs, index);
    StepArrays<Lanes> a;
    load_arrival(lanes, args, tile, a);
    sum_terms<kFormat, kStepQuads>(lanes, args.runs, args.terms, tile, a.g);
    finish_arrival(lanes, args, tile, a);
}

template <Format kFormat>
constexpr int kDecodeQuads = decode_tile_of(kFormat) / (kQuad * kLanes);

template <int kQuads, class Lanes>
DILOCO_DEVICE uint32_t count_whole(const Lanes& lanes, const DecodeArgs& args, const Tile& tile,
                                   uint32_t most, Place& place) {
    return count_whole<kQuads>(lanes, args.outs, tile, most, place);
}

// One tile of decode: writes the weighted sum of the decoded payloads to `outs`.
template <Format kFormat, class Lanes, class T>
DILOCO_DEVICE void decode_tile(const Lanes& lanes, const DecodeArgs& args, const T& tile,
                               Place& place) {
    constexpr int kQuads = kDecodeQuads<kFormat>;
    if constexpr (!T::kIsWhole) move_to(lanes, args.outs, tile.first, place);
    typename Lanes::template Of<Quads<kQuads>> sum;
    sum_terms<kFormat, kQuads>(lanes, args.runs, args.terms, tile, sum);
    store_tile<kQuads>(lanes, args.outs, tile, place, sum);
}

// Decodes the whole tiles from `index` to `end`, and leaves `index` at `end`.
template <Format kFormat, class Lanes>
DILOCO_DEVICE void decode_whole(const Lanes& lanes, const DecodeArgs& args, uint32_t& index,
                                uint32_t end) {
    each_stretch<kFormat, kDecodeQuads<kFormat>>(
        lanes, args, args.runs, index, end, [&](Tile tile, uint32_t left, Place& place) {
            with_dtype(place.dtype, [&](auto dtype) {
                for (; left > 0; --left) {
                    decode_tile<kFormat>(lanes, args, WholeTile<decltype(dtype)::value>(tile),
                                         place);
                    advance<kFormat, kDecodeQuads<kFormat>>(args.runs, tile);
                }
            });
        });
}

// One tile of merge: writes the parameters as merge_into() does.
template <class Lanes>
DILOCO_DEVICE void merge_tile(const Lanes& lanes, const MergeArgs& args, uint32_t index,
                              Place& place) {
    const Tile tile = tile_at<Format::kFp32, kStepQuads>(args.runs, index);
    move_to(lanes, args.params, tile.first, place);
    StepQuads<Lanes> outer;
    load_flat(lanes, args.outer, tile, outer);
    merge_into(lanes, args.params, tile, place, args.alpha, args.one_minus_alpha, outer);
}

}  // namespace diloco::cuda
