// Whether the members live: each raises a counter on the store, and a waiting member reads the
// others' counters. No two clocks are compared, and time in which the reader stood still counts
// little.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

namespace diloco {

// The counters of one epoch, under `prefix`. Used by the watcher's thread alone, except the
// constructor.
class Pulse {
  public:
    using Clock = std::chrono::steady_clock;

    // A member is suspected when its counter stood still for `limit` on the reader's clock. With a
    // null store no member is suspected.
    Pulse(c10::intrusive_ptr<c10d::Store> store, const std::string& prefix, int64_t replica,
          const std::vector<int64_t>& members, std::chrono::milliseconds limit);

    // Raises this member's counter, at most once in a period.
    void beat();

    // Reads the others' counters, at most once in a period.
    void look();

    // Call when a wait is over or has progressed: silence counts from the next read on.
    void forgive();

    // Whether the store answered when it was last asked.
    bool is_answered() const { return is_answered_; }

    // Members whose counters have stood still for the limit; and a counter's standstill in seconds.
    std::vector<int64_t> suspects() const;
    double seconds_silent(int64_t replica) const;

  private:
    struct Peer {
        int64_t replica = 0;
        std::string key;
        bool is_known = false;  // the member's key exists
        bool has_changed = false;
        std::vector<uint8_t> seen;
        Clock::duration silent{};
    };

    void find_new_keys();
    void read_counters();

    c10::intrusive_ptr<c10d::Store> store_;
    std::string own_key_;
    Clock::duration limit_;
    Clock::duration period_;
    std::vector<Peer> peers_;
    bool is_answered_ = true;
    int64_t num_beats_ = 0;
    Clock::time_point last_beat_{};
    Clock::time_point last_look_{};
};

}  // namespace diloco
