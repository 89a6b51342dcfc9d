// The CUDA operators without a GPU: the code of every tile, with the lanes of a warp run one after
// the other. Linked with operators/cuda.cpp in place of csrc/cuda/*.cu, for tests.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <map>
#include <thread>
#include <vector>

#include "codec/fp_environment.h"
#include "cuda/by_format.h"
#include "cuda/digest_tile.h"
#include "cuda/encode_tile.h"
#include "cuda/kernels.h"
#include "cuda/norms_tile.h"
#include "cuda/sparse_encode.h"
#include "cuda/sparse_step.h"
#include "cuda/step_tile.h"

namespace diloco::cuda {
namespace {

class EmulatedLanes {
  public:
    template <class T>
    struct Of {
        T values[kLanes];
        T& operator[](int lane) { return values[lane]; }
        const T& operator[](int lane) const { return values[lane]; }
    };

    // What a lane finds on the stage without having been written there is seen in the result.
    EmulatedLanes() { std::fill_n(memory_, kStageFloats, 12345.0f); }

    template <class F>
    void each(F&& f) const {
        for (int lane = 0; lane < kLanes; ++lane) f(lane);
    }
    template <class At>
    void max_over(int num_lanes, At&& at) const {
        for (int first = 0; first < kLanes; first += num_lanes) {
            uint32_t largest = 0;
            for (int i = first; i < first + num_lanes; ++i) {
                if (at(i) > largest) largest = at(i);
            }
            for (int i = first; i < first + num_lanes; ++i) at(i) = largest;
        }
    }
    template <class At>
    void sum_over(At&& at) const {
        uint32_t sum = 0;
        for (int lane = 0; lane < kLanes; ++lane) sum += at(lane);
        for (int lane = 0; lane < kLanes; ++lane) at(lane) = sum;
    }
    template <class At>
    void scan(At&& at) const {
        for (int lane = 1; lane < kLanes; ++lane) at(lane) += at(lane - 1);
    }
    template <class At>
    void swap(int n, At&& at) const {
        for (int lane = 0; lane < kLanes; ++lane) {
            if ((lane & n) == 0) std::swap(at(lane), at(lane + n));
        }
    }
    template <class At>
    void add_upper(int n, At&& at) const {
        for (int lane = 0; lane + n < kLanes; ++lane) at(lane) += at(lane + n);
    }
    void sync() const {}
    template <class F>
    uint32_t ballot(F&& f) const {
        uint32_t lanes = 0;
        for (int lane = 0; lane < kLanes; ++lane) lanes |= f(lane) ? 1u << lane : 0;
        return lanes;
    }
    template <class F>
    int num_where(F&& f) const {
        int count = 0;
        for (int lane = 0; lane < kLanes; ++lane) count += f(lane);
        return count;
    }
    template <class To, class OfFrom, class From>
    void pick(To&& to, OfFrom&& of, From&& from) const {
        for (int lane = 0; lane < kLanes; ++lane) to(lane) = of(from(lane));
    }
    // What is fetched arrives as late as it can: when it is waited for.
    void fetch(void* to, uint64_t address) const { fetches_.push_back({to, address}); }
    void wait() const {
        for (const Fetch& each : fetches_) {
            std::memcpy(each.to, reinterpret_cast<const void*>(each.address), 16);
        }
        fetches_.clear();
    }
    template <class At>
    void count(int64_t* to, At&& of) const {
        for (int lane = 0; lane < kLanes; ++lane) *to += of(lane);
    }
    template <class At>
    void add_all(uint64_t* to, At&& of) const {
        for (int lane = 0; lane < kLanes; ++lane) *to += of(lane);
    }

    float* const stage = memory_;

  private:
    struct Fetch {
        void* to;
        uint64_t address;
    };

    alignas(16) float memory_[kStageFloats];
    mutable std::vector<Fetch> fetches_;
};

// The warps of a CTA. They run in turns forwards and backwards, so that a warp which reads what
// another writes before both have waited is seen in the result.
class EmulatedWarps {
  public:
    using Lanes = EmulatedLanes;

    template <class T>
    struct Each {
        T values[kBlockWarps];
        T& operator[](int warp) { return values[warp]; }
        const T& operator[](int warp) const { return values[warp]; }
    };

    float* stage(int warp) const { return lanes_[warp].stage; }

    template <class F>
    void each_warp(F&& f) const {
        is_backwards_ = !is_backwards_;
        for (int i = 0; i < kBlockWarps; ++i) {
            const int warp = is_backwards_ ? kBlockWarps - 1 - i : i;
            f(warp, lanes_[warp]);
        }
    }

  private:
    EmulatedLanes lanes_[kBlockWarps];
    mutable bool is_backwards_ = false;
};

// The warps of the grid: those of a bounded one, else `unbounded`, as if the device ran no more.
int64_t num_warps(int64_t pieces, const Queue& queue, int64_t unbounded) {
    if (queue.max_blocks == 0) return unbounded;
    return kWarps * grid_blocks(pieces, queue.max_blocks);
}

// Calls f(index, end) for the groups of tiles of one warp of `num_warps`.
template <class Tiles, class F>
void each_group(const Tiles& tiles, uint64_t warp, uint64_t num_warps, F&& f) {
    const uint64_t group = tiles.tiles_per_warp;
    for (uint64_t first = warp * group; first < tiles.num_tiles; first += num_warps * group) {
        auto index = static_cast<uint32_t>(first);
        f(index, static_cast<uint32_t>(std::min<uint64_t>(first + group, tiles.num_tiles)));
    }
}

// A launch whose warps run one after the other: calls f(lanes, index, end, bad).
template <class Tiles, class F>
void launch_encode(const EncodeTarget& target, const Tiles& tiles, const Queue& queue, F&& f) {
    const codec::IeeeScope ieee;
    const auto stride = static_cast<uint64_t>(num_warps(tiles.num_tiles, queue, 1));
    for (uint64_t warp = 0; warp < stride; ++warp) {
        const EmulatedLanes lanes;
        EmulatedLanes::Of<int> bad{};
        each_group(tiles, warp, stride,
                   [&](uint32_t& index, uint32_t end) { f(lanes, index, end, bad); });
        count_bad(lanes, target, bad);
    }
}

template <class Args>
void encode_tiles(const Args& args, const Rest& rest, Format format, bool is_stochastic,
                  const Queue& queue) {
    const EncodeTarget& target = args.target;
    by_tile(args, format, is_stochastic, [&](auto constant, auto stochastic, auto quads) {
        constexpr Format kFormat = decltype(constant)::value;
        constexpr bool kStochastic = decltype(stochastic)::value;
        constexpr int kQuads = decltype(quads)::value;
        if constexpr (kQuads != kLargeQuads) {
            if (!rest.is_all) {
                launch_encode(target, target.runs, queue, [&](const auto& lanes, auto&... at) {
                    encode_whole<kFormat, kStochastic, kQuads>(lanes, args, at...);
                });
            }
        }
        launch_encode(
            target, rest, queue, [&](const auto& lanes, uint32_t& index, uint32_t end, auto& bad) {
                Place place;
                for (; index < end; ++index) {
                    if_left<kFormat, kQuads>(lanes, args, target.runs, rest, index, place,
                                             [&](const Tile& tile) {
                                                 encode_tile<kFormat, kStochastic, kQuads>(
                                                     lanes, args, tile, place, bad);
                                             });
                }
            });
    });
}

template <class Tiles, class Run>
void tiles(const Tiles& all, const Queue& queue, Run&& run) {
    const codec::IeeeScope ieee;
    const auto stride = static_cast<uint64_t>(num_warps(all.num_tiles, queue, 1));
    for (uint64_t warp = 0; warp < stride; ++warp) {
        const EmulatedLanes lanes;
        Place place;
        each_group(all, warp, stride, [&](uint32_t& index, uint32_t end) {
            for (; index < end; ++index) run(lanes, index, place);
        });
    }
}

// What memory a CTA finds is seen in the result, too.
template <class Memory>
Memory unset() {
    Memory memory;
    std::memset(&memory, 0x5A, sizeof(memory));
    return memory;
}

template <class Memory, class Args>
void encode_blocks(const Args& args) {
    const codec::IeeeScope ieee;
    const EmulatedWarps block;
    auto memory = unset<Memory>();
    for (uint32_t i = 0; i < args.target.runs.num_tiles; ++i) {
        encode_sparse_block(block, args, i, memory);
    }
}

template <class Run>
void blocks(const Runs& runs, Run&& run) {
    const codec::IeeeScope ieee;
    const EmulatedWarps block;
    auto memory = unset<SumMemory>();
    for (uint32_t i = 0; i < runs.num_tiles; ++i) run(block, i, memory);
}

}  // namespace

// A driver whose answers a test sets, by ctypes, before the first call on a device.
std::map<int, std::vector<int64_t>> answers;
std::atomic<int> num_asked = 0;

extern "C" __attribute__((visibility("default"))) void emulate_device(int device, int runtime,
                                                                      int driver, int arch) {
    answers[device] = {runtime, driver, arch, 800, 860, 890, 900, 1000, 1200};
}

extern "C" __attribute__((visibility("default"))) int num_probes() { return num_asked; }

std::vector<int64_t> support(int device) {
    ++num_asked;
    // Threads that ask at the same time meet here.
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    const auto answer = answers.find(device);
    return answer == answers.end() ? std::vector<int64_t>{0, 0, 900, 900} : answer->second;
}

void encode(const EncodeArgs& args, const Rest& rest, Format format, bool is_stochastic,
            Queue queue) {
    if (wire::is_sparse(format)) return encode_sparse(args, queue);
    encode_tiles(args, rest, format, is_stochastic, queue);
}

void encode_sparse(const EncodeArgs& args, Queue) { encode_blocks<EncodeMemory>(args); }

void reduce(const ReduceArgs& args, const Rest& rest, Format format, bool is_stochastic,
            Queue queue) {
    if (wire::is_sparse(format)) return reduce_sparse(args, queue);
    encode_tiles(args, rest, format, is_stochastic, queue);
}

void reduce_sparse(const ReduceArgs& args, Queue) { encode_blocks<ReduceMemory>(args); }

void outer_step(const StepArgs& args, Format format, Queue queue) {
    if (args.verdict != nullptr && *args.verdict != 0) return;
    if (wire::is_sparse(format)) return outer_step_sparse(args, queue);
    by_format(format, [&](auto constant) {
        constexpr Format kFormat = decltype(constant)::value;
        tiles(args.runs, queue, [&](const auto& lanes, uint32_t i, Place& place) {
            if (codec::is_arrival(args.constants.optimizer)) {
                arrival_tile<kFormat>(lanes, args, i);
            } else if (args.constants.optimizer == codec::Optimizer::kAdam) {
                step_tile<kFormat, true>(lanes, args, i, place);
            } else {
                step_tile<kFormat, false>(lanes, args, i, place);
            }
        });
    });
}

void outer_step_sparse(const StepArgs& args, Queue) {
    blocks(args.runs, [&](const auto& block, uint32_t i, auto& memory) {
        if (codec::is_arrival(args.constants.optimizer)) {
            arrive_sparse_block(block, args, i, memory);
        } else if (args.constants.optimizer == codec::Optimizer::kAdam) {
            step_sparse_block<true>(block, args, i, memory);
        } else {
            step_sparse_block<false>(block, args, i, memory);
        }
    });
}

void decode(const DecodeArgs& args, const Rest& rest, Format format, Queue queue) {
    if (wire::is_sparse(format)) return decode_sparse(args, queue);
    by_format(format, [&](auto constant) {
        constexpr Format kFormat = decltype(constant)::value;
        if constexpr (wire::has_element_codes(kFormat)) {
            if (!rest.is_all) {
                const codec::IeeeScope ieee;
                const auto stride = static_cast<uint64_t>(num_warps(args.runs.num_tiles, queue, 1));
                for (uint64_t warp = 0; warp < stride; ++warp) {
                    const EmulatedLanes lanes;
                    each_group(args.runs, warp, stride, [&](uint32_t& index, uint32_t end) {
                        decode_whole<kFormat>(lanes, args, index, end);
                    });
                }
            }
        }
        tiles(rest, queue, [&](const auto& lanes, uint32_t i, Place& place) {
            if_left<kFormat, kDecodeQuads<kFormat>>(
                lanes, args, args.runs, rest, i, place,
                [&](const Tile& tile) { decode_tile<kFormat>(lanes, args, tile, place); });
        });
    });
}

void decode_sparse(const DecodeArgs& args, Queue) {
    blocks(args.runs, [&](const auto& block, uint32_t i, auto& memory) {
        decode_sparse_block(block, args, i, memory);
    });
}

void merge(const MergeArgs& args, Queue queue) {
    tiles(args.runs, queue,
          [&](const auto& lanes, uint32_t i, Place& place) { merge_tile(lanes, args, i, place); });
}

void norms(const NormsArgs& args, Queue) {
    const codec::IeeeScope ieee;
    EmulatedLanes lanes;
    Place place;
    for (int64_t i = 0; i * codec::kNormChunk < args.num_elements; ++i) {
        norms_chunk(lanes, args, i, place);
    }
    norms_total(lanes, args);
}

void digest(const DigestArgs& args, Queue queue) {
    const auto tiles = static_cast<int64_t>(num_digest_tiles(args));
    const auto stride = static_cast<uint64_t>(num_warps(tiles, queue, 3));
    by_alignment(args, [&](auto alignment) {
        const EmulatedLanes lanes;
        for (uint64_t warp = 0; warp < stride; ++warp) {
            digest_tiles<decltype(alignment)::value>(lanes, args, warp, stride);
        }
    });
}

void upload(void* target, const void* data, size_t num_bytes, Queue) {
    std::memcpy(target, data, num_bytes);
}

}  // namespace diloco::cuda
