// One tile of the outer step, of decode and of merge: no lane needs another's values, so tiles are
// half as large as those of encode and hold more arrays.
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
    load_inside<DType::kFp32, kStepQuads>(lanes, whole(array, DType::kFp32), tile, x);
}

template <class Lanes>
DILOCO_DEVICE void store_flat(const Lanes& lanes, float* array, const Tile& tile,
                              const StepQuads<Lanes>& x) {
    store_inside<DType::kFp32, kStepQuads, true>(lanes, whole(array, DType::kFp32), tile, x);
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

// params <- outer, or alpha * params + (1 - alpha) * outer; `outer` is destroyed.
template <class Lanes>
DILOCO_DEVICE void merge_into(const Lanes& lanes, const Segments& params, const Tile& tile,
                              Place& place, float alpha, float one_minus_alpha,
                              StepQuads<Lanes>& outer) {
    if (alpha != 0.0f) {
        StepQuads<Lanes> local;
        load_tile<kStepQuads>(lanes, params, tile, place, local);
        each_element(lanes, [&](int lane, int j, int i) {
            float& value = outer[lane].q[j].v[i];
            value = codec::merged(local[lane].q[j].v[i], value, alpha, one_minus_alpha);
        });
    }
    store_tile<kStepQuads>(lanes, params, tile, place, outer);
}

// outer -= step(g), with the state of SGD, heavy ball, Nesterov or Adam, and the merge.
template <Format kFormat, bool kIsAdam, class Lanes>
DILOCO_DEVICE void step_tile(const Lanes& lanes, const StepArgs& args, uint32_t index,
                             Place& place) {
    const codec::StepConstants& c = args.constants;
    const Tile tile = tile_at<kFormat, kStepQuads>(args.runs, index);
    const bool has_momentum = kIsAdam || c.optimizer != codec::Optimizer::kSgd;
    StepQuads<Lanes> outer, m, v, g;
    load_flat(lanes, args.outer, tile, outer);
    if (has_momentum) load_flat(lanes, args.momentum, tile, m);
    if constexpr (kIsAdam) load_flat(lanes, args.second, tile, v);
    sum_terms<kFormat, kStepQuads>(lanes, args.runs, args.terms, tile, g);
    each_element(lanes, [&](int lane, int j, int i) {
        float& value = g[lane].q[j].v[i];
        if constexpr (kIsAdam) {
            value = codec::adam_update(c, m[lane].q[j].v[i], v[lane].q[j].v[i], value);
        } else if (has_momentum) {
            value = codec::momentum_update(c, m[lane].q[j].v[i], value);
        } else {
            value = wire::mul(c.lr, value);
        }
        outer[lane].q[j].v[i] = wire::sub(outer[lane].q[j].v[i], value);
    });
    if (has_momentum) store_flat(lanes, args.momentum, tile, m);
    if constexpr (kIsAdam) store_flat(lanes, args.second, tile, v);
    store_flat(lanes, args.outer, tile, outer);
    merge_into(lanes, args.params, tile, place, c.alpha, c.one_minus_alpha, outer);
}

// d = pending + g, or g; pending <- d, or with the last arrival outer -= step(d).
template <Format kFormat, class Lanes>
DILOCO_DEVICE void arrival_tile(const Lanes& lanes, const StepArgs& args, uint32_t index) {
    const codec::StepConstants& c = args.constants;
    const Tile tile = tile_at<kFormat, kStepQuads>(args.runs, index);
    const bool commits = c.optimizer == codec::Optimizer::kCommit;
    const bool has_momentum = commits && args.momentum != nullptr;
    StepQuads<Lanes> d, pending, outer, m;
    if (!c.is_first) load_flat(lanes, args.second, tile, pending);
    if (commits) load_flat(lanes, args.outer, tile, outer);
    if (has_momentum) load_flat(lanes, args.momentum, tile, m);
    sum_terms<kFormat, kStepQuads>(lanes, args.runs, args.terms, tile, d);
    if (!c.is_first) {
        each_element(lanes, [&](int lane, int j, int i) {
            float& value = d[lane].q[j].v[i];
            value = wire::add(pending[lane].q[j].v[i], value);
        });
    }
    if (!commits) {
        store_flat(lanes, args.second, tile, d);
        return;
    }
    each_element(lanes, [&](int lane, int j, int i) {
        const float step =
            codec::commit_update(c, has_momentum, m[lane].q[j].v[i], d[lane].q[j].v[i]);
        outer[lane].q[j].v[i] = wire::sub(outer[lane].q[j].v[i], step);
    });
    if (has_momentum) store_flat(lanes, args.momentum, tile, m);
    store_flat(lanes, args.outer, tile, outer);
}

// outs <- sum of coefficient * decoded payload.
template <Format kFormat, class Lanes>
DILOCO_DEVICE void decode_tile(const Lanes& lanes, const DecodeArgs& args, uint32_t index,
                               Place& place) {
    const Tile tile = tile_at<kFormat, kStepQuads>(args.runs, index);
    StepQuads<Lanes> sum;
    sum_terms<kFormat, kStepQuads>(lanes, args.runs, args.terms, tile, sum);
    store_tile<kStepQuads>(lanes, args.outs, tile, place, sum);
}

// params <- alpha * params + (1 - alpha) * outer.
template <class Lanes>
DILOCO_DEVICE void merge_tile(const Lanes& lanes, const MergeArgs& args, uint32_t index,
                              Place& place) {
    const Tile tile = tile_at<Format::kFp32, kStepQuads>(args.runs, index);
    StepQuads<Lanes> outer;
    load_flat(lanes, args.outer, tile, outer);
    merge_into(lanes, args.params, tile, place, args.alpha, args.one_minus_alpha, outer);
}

}  // namespace diloco::cuda
