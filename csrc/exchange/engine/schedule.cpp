#include "exchange/engine/schedule.h"

#include <algorithm>
#include <stdexcept>

namespace diloco {
namespace {

class Builder {
  public:
    Builder(int num_lanes, size_t capacity) : num_lanes_(num_lanes) { steps_.reserve(capacity); }

    void add(Action action, int chunk) { steps_.push_back({action, chunk, chunk % num_lanes_}); }

    Schedule finish() {
        steps_.push_back({Action::kVote, -1, 0});
        return std::move(steps_);
    }

  private:
    int num_lanes_;
    Schedule steps_;
};

void add_one_phase(Builder& builder, int num_chunks, int window) {
    for (int k = 0; k < std::min(window, num_chunks); ++k) builder.add(Action::kPostExchange, k);
    for (int k = 0; k < num_chunks; ++k) {
        builder.add(Action::kWaitExchange, k);
        if (k + window < num_chunks) builder.add(Action::kPostExchange, k + window);
    }
}

void add_two_phases(Builder& builder, int num_chunks, int window) {
    for (int k = 0; k < std::min(window, num_chunks); ++k) builder.add(Action::kPostExchange, k);
    for (int k = 0; k < num_chunks; ++k) {
        builder.add(Action::kWaitExchange, k);
        builder.add(Action::kReduce, k);
        builder.add(Action::kPostPublish, k);
        if (k + window < num_chunks) builder.add(Action::kPostExchange, k + window);
        if (k - window + 1 >= 0) builder.add(Action::kWaitPublish, k - window + 1);
    }
    for (int k = std::max(0, num_chunks - window + 1); k < num_chunks; ++k) {
        builder.add(Action::kWaitPublish, k);
    }
}

}  // namespace

Schedule make_schedule(int num_chunks, int num_phases, int num_lanes, int window) {
    if (num_chunks < 0 || num_lanes < 1 || window < 1 || num_phases < 0 || num_phases > 2) {
        throw std::invalid_argument(
            "make_schedule: num_chunks >= 0, num_phases 0..2, lanes >= 1, "
            "window >= 1");
    }
    Builder builder(num_lanes, static_cast<size_t>(5 * num_chunks + 1));
    if (num_phases == 1) add_one_phase(builder, num_chunks, window);
    if (num_phases == 2) add_two_phases(builder, num_chunks, window);
    return builder.finish();
}

const char* action_name(Action action) {
    switch (action) {
        case Action::kPostExchange:
            return "post_exchange";
        case Action::kWaitExchange:
            return "wait_exchange";
        case Action::kReduce:
            return "reduce";
        case Action::kPostPublish:
            return "post_publish";
        case Action::kWaitPublish:
            return "wait_publish";
        case Action::kVote:
            return "vote";
    }
    return "unknown";
}

}  // namespace diloco
