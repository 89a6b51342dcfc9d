// Breadth-first search of all states of a model, the way to a broken invariant, and liveness.
#pragma once

#include <array>
#include <functional>
#include <string>
#include <vector>

#include "rules.h"

namespace agreement {

// The states that were seen, by the 64-bit hash of each: 1e8 states collide with a chance of 3e-4.
class Visited {
  public:
    Visited() : slots_(1 << 16, kEmpty) {}

    size_t size() const { return hashes_.size(); }
    uint64_t hash(size_t index) const { return hashes_[index]; }
    uint32_t parent(size_t index) const { return parents_[index]; }

    // Returns the index of a state; is_new tells whether the state was not known.
    uint32_t insert(uint64_t hash, uint32_t parent, bool& is_new) {
        if (hashes_.size() * 2 > slots_.size()) grow();
        size_t at = hash & (slots_.size() - 1);
        while (slots_[at] != kEmpty && hashes_[slots_[at]] != hash)
            at = (at + 1) & (slots_.size() - 1);
        is_new = slots_[at] == kEmpty;
        if (is_new) {
            slots_[at] = static_cast<uint32_t>(hashes_.size());
            hashes_.push_back(hash);
            parents_.push_back(parent);
        }
        return slots_[at];
    }
    void prefetch(uint64_t hash) const { __builtin_prefetch(&slots_[hash & (slots_.size() - 1)]); }

  private:
    static constexpr uint32_t kEmpty = ~0u;

    void grow() {
        slots_.assign(slots_.size() * 2, kEmpty);
        for (size_t index = 0; index < hashes_.size(); ++index) {
            size_t at = hashes_[index] & (slots_.size() - 1);
            while (slots_[at] != kEmpty) at = (at + 1) & (slots_.size() - 1);
            slots_[at] = static_cast<uint32_t>(index);
        }
    }

    std::vector<uint32_t> slots_;
    std::vector<uint64_t> hashes_;
    std::vector<uint32_t> parents_;
};

struct Options {
    size_t most = 200'000'000;  // states
    bool checks_liveness = false;
    bool counts_outcomes = false;
    const State* start = nullptr;  // instead of the first state of the rules
    // Ends the search at the first state for which this returns true.
    std::function<bool(const State&)> target;
};

struct Found {
    size_t num_states = 0;
    size_t num_events = 0;
    std::array<size_t, kActs> seen{};  // how often each kind of event could happen
    // How many states differ in their outcome, and the sum of the hashes of these.
    size_t num_outcomes = 0;
    uint64_t outcomes = 0;
    bool is_exhaustive = false;
    bool was_reached = false;  // the target
    std::string broken;        // the invariant; "" for none
    std::vector<Event> trail;  // the way to it, or to the target
    double seconds = 0;
};

// Takes the events with these sentences one after another. Returns how many the rules permitted.
size_t follow(const Rules& rules, const std::vector<const char*>& sentences, State& state);

Found search(const Rules& rules, const Options& options);

}  // namespace agreement
