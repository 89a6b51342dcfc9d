// The schedule: every chunk goes through its steps in order, and memory is reused only when free.
#include <cstdio>
#include <map>
#include <string>

#include "check.h"
#include "exchange/engine/schedule.h"

using diloco::Action;
using diloco::make_schedule;
using diloco::Schedule;

namespace {

void check(int num_chunks, int num_phases, int num_lanes, int window) {
    const Schedule schedule = make_schedule(num_chunks, num_phases, num_lanes, window);
    EXPECT(schedule.back().action == Action::kVote);
    std::map<std::pair<Action, int>, size_t> when;
    for (size_t i = 0; i < schedule.size(); ++i) {
        const auto& step = schedule[i];
        EXPECT(when.emplace(std::make_pair(step.action, step.chunk), i).second);
        if (step.action != Action::kVote) EXPECT(step.lane == step.chunk % num_lanes);
    }
    EXPECT(schedule.size() == static_cast<size_t>(num_chunks) * (num_phases == 2 ? 5 : 2) + 1);
    for (int k = 0; k < num_chunks; ++k) {
        const size_t posted = when.at({Action::kPostExchange, k});
        const size_t waited = when.at({Action::kWaitExchange, k});
        EXPECT(posted < waited);
        // Chunk k + window is received where chunk k was.
        const bool has_next = k + window < num_chunks;
        if (has_next) EXPECT(waited < when.at({Action::kPostExchange, k + window}));
        if (num_phases == 1) continue;
        const size_t reduced = when.at({Action::kReduce, k});
        const size_t published = when.at({Action::kPostPublish, k});
        EXPECT(waited < reduced && reduced < published);
        EXPECT(published < when.at({Action::kWaitPublish, k}));
        if (has_next) EXPECT(reduced < when.at({Action::kPostExchange, k + window}));
        // The receipts of a chunk live in a ring of 2 * window + 1.
        const int later = k + 2 * window + 1;
        if (later < num_chunks) {
            EXPECT(when.at({Action::kWaitPublish, k}) < when.at({Action::kPostExchange, later}));
        }
    }
}

}  // namespace

int main() {
    for (int num_chunks : {1, 2, 3, 7, 16, 33}) {
        for (int num_phases : {1, 2}) {
            for (int num_lanes : {1, 2, 3}) {
                for (int window : {1, 2, 3, 8, 50})
                    check(num_chunks, num_phases, num_lanes, window);
            }
        }
    }
    EXPECT(make_schedule(5, 0, 1, 4).size() == 1);
    std::puts("schedule: ok");
}
