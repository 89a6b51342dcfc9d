// The order of the steps of one exchange: a pure function of (chunks, phases, lanes, window).
//
// Every rank computes the same list, so all ranks post the messages of a group in the same order,
// whichever message arrives first. The engine thread carries out the steps for host memory, and
// diloco_comm/exchange/nccl/streams.py for NCCL on devices.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace diloco {

enum class Action : uint8_t {
    // Posts a chunk's messages of the first phase. With two phases each run goes to the rank that
    // averages it, its owner; with one phase all runs go to all ranks.
    kPostExchange,
    kWaitExchange,
    kReduce,       // the owner of a run decodes it from all ranks, averages, and encodes the mean
    kPostPublish,  // second phase: each owner sends its encoded mean to all ranks
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

// At most `window` chunks are in flight in each phase. With one phase, kReduce, kPostPublish and
// kWaitPublish do not occur; with none, only kVote does.
Schedule make_schedule(int num_chunks, int num_phases, int num_lanes, int window);

const char* action_name(Action action);

}  // namespace diloco
