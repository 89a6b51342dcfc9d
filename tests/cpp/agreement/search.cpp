#include "search.h"

#include <algorithm>
#include <chrono>
#include <deque>
#include <unordered_set>

namespace agreement {
namespace {

constexpr uint32_t kNoParent = ~0u;

// The events from the first state to that with an index, found again by their hashes.
std::vector<Event> trail_to(const Rules& rules, const Visited& visited, uint32_t index,
                            const State& start) {
    std::vector<uint32_t> way;
    for (; index != kNoParent; index = visited.parent(index)) way.push_back(index);
    std::reverse(way.begin(), way.end());
    std::vector<Event> events;
    State state = start;
    for (size_t k = 1; k < way.size(); ++k) {
        const State from = state;
        bool is_found = false;
        rules.successors(from, [&](const Event& event, const State& after, const char*) {
            if (is_found || hash_of(after) != visited.hash(way[k])) return;
            is_found = true;
            events.push_back(event);
            state = after;
        });
    }
    return events;
}

// Edges without faults, in the order of their sources.
struct Graph {
    std::vector<uint64_t> first;  // of each state in targets
    std::vector<uint32_t> targets;
    std::vector<uint8_t> is_good;  // settled, or excused

    // Returns a state from which no good state can be reached, or kNoParent.
    uint32_t dead_end() {
        const size_t size = is_good.size();
        for (bool changes = true; changes;) {
            changes = false;
            for (size_t k = size; k-- > 0;) {
                if (is_good[k]) continue;
                for (uint64_t e = first[k]; e < first[k + 1]; ++e) {
                    if (!is_good[targets[e]]) continue;
                    is_good[k] = 1;
                    changes = true;
                    break;
                }
            }
        }
        const auto bad = std::find(is_good.begin(), is_good.end(), 0);
        return bad == is_good.end() ? kNoParent : static_cast<uint32_t>(bad - is_good.begin());
    }
};

}  // namespace

size_t follow(const Rules& rules, const std::vector<const char*>& sentences, State& state) {
    size_t num_taken = 0;
    for (const char* expected : sentences) {
        const State from = state;
        bool is_found = false;
        rules.successors(from, [&](const Event& event, const State& after, const char* broken) {
            if (is_found || broken != nullptr || sentence(event) != expected) return;
            is_found = true;
            state = after;
        });
        if (!is_found) break;
        ++num_taken;
    }
    return num_taken;
}

Found search(const Rules& rules, const Options& options) {
    const auto begin = std::chrono::steady_clock::now();
    Found found;
    Visited visited;
    Graph graph;
    std::deque<State> queue;
    const State start = options.start == nullptr ? rules.start() : *options.start;
    bool is_new = false;
    visited.insert(hash_of(start), kNoParent, is_new);
    queue.push_back(start);
    uint32_t ends_at = kNoParent;
    Event last{};
    struct Next {
        Event event;
        uint64_t hash;
        State state;
    };
    std::vector<Next> nexts;
    std::unordered_set<uint64_t> outcomes;
    for (uint32_t index = 0; !queue.empty(); ++index) {
        const State state = queue.front();
        queue.pop_front();
        if (options.target && options.target(state)) {
            found.was_reached = true;
            ends_at = index;
            break;
        }
        if (options.counts_outcomes && outcomes.insert(rules.outcome(state)).second) {
            found.outcomes += rules.outcome(state);
        }
        if (options.checks_liveness) {
            graph.first.push_back(graph.targets.size());
            graph.is_good.push_back(rules.is_settled(state) || rules.is_excused(state));
        }
        nexts.clear();
        rules.successors(state, [&](const Event& event, const State& after, const char* broken) {
            ++found.num_events;
            ++found.seen[size_t(event.act)];
            if (broken != nullptr && found.broken.empty()) {
                found.broken = broken;
                last = event;
            }
            const uint64_t hash = hash_of(after);
            visited.prefetch(hash);
            nexts.push_back({event, hash, after});
        });
        if (!found.broken.empty()) {
            ends_at = index;
            break;
        }
        for (const Next& next : nexts) {
            const uint32_t to = visited.insert(next.hash, index, is_new);
            if (is_new) queue.push_back(next.state);
            if (options.checks_liveness && to != index && !is_fault(next.event.act)) {
                graph.targets.push_back(to);
            }
        }
        if (visited.size() > options.most) break;
    }
    found.num_states = visited.size();
    found.num_outcomes = outcomes.size();
    found.is_exhaustive = queue.empty() && rules.num_truncated == 0;
    if (options.checks_liveness && found.is_exhaustive && ends_at == kNoParent) {
        graph.first.push_back(graph.targets.size());
        ends_at = graph.dead_end();
        if (ends_at != kNoParent) found.broken = "L1: no common record can be reached any more";
    }
    if (ends_at != kNoParent) {
        found.trail = trail_to(rules, visited, ends_at, start);
        if (!found.broken.empty() && found.broken[0] != 'L') found.trail.push_back(last);
    }
    found.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    return found;
}

}  // namespace agreement
