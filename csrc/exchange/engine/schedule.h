// The order of the steps of one exchange: a pure function of (chunks, phases, lanes, window).
//
// Every rank computes the same list, so on each group the messages are posted in one order
// everywhere, whatever finishes first. Drivers walk the list: the engine's thread for host memory,
// streams.py for devices.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace diloco {

enum class Action : uint8_t {
    kPostExchange,  // phase 1: each rank's run goes to its owner (one phase: all runs to all ranks)
    kWaitExchange,
    kReduce,       // the owner decodes all ranks' runs, averages, encodes once
    kPostPublish,  // phase 2: the owner's encoded run goes to everybody
    kWaitPublish,
    kVote,
};

struct Step {
    Action action;
    int32_t chunk;
    int32_t lane;

    bool operator==(const Step& other) const {
        return action == other.action && chunk == other.chunk && lane == other.lane;
    }
};

using Schedule = std::vector<Step>;

// At most `window` chunks are in flight in each phase. One phase: exchange only.
Schedule make_schedule(int num_chunks, int num_phases, int num_lanes, int window);

const char* action_name(Action action);

}  // namespace diloco
