// Notices on the store: who failed where, who left. The group is silent once it is broken.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

namespace diloco {

struct Departure {
    int64_t replica;
    int64_t inner_step;
};

// Who said what about a failure.
struct RollCall {
    std::vector<int64_t> silent;   // dead, hanging, or cut off
    std::vector<int64_t> idle;     // alive, in no exchange
    bool is_store_silent = false;  // nobody could be heard
};

// The notices of one epoch. A store that does not answer is treated as one without notices, after
// at most `patience` for the first question and at once for the next ones.
class Board {
  public:
    Board(c10::intrusive_ptr<c10d::Store> store, std::chrono::milliseconds patience,
          std::string prefix, int64_t replica, std::vector<int64_t> members);

    void report_failure(const std::string& text);
    void report_departure(int64_t inner_step);

    // Answers a failure that somebody else has reported; once.
    void report_presence();

    // True once any member has reported a failure / has left.
    bool is_failed();
    bool is_left();
    std::vector<Departure> departures();

    // Waits up to the patience for every member to report, to answer or to leave.
    RollCall call_roll();

  private:
    std::string key(const char* what, int64_t replica) const;
    bool has(const std::string& key);
    void set(const std::string& key, const std::string& value);

    c10::intrusive_ptr<c10d::Store> store_;  // bounded; null without a store
    std::chrono::milliseconds patience_;
    std::string prefix_;
    int64_t replica_;
    std::vector<int64_t> members_;
    bool has_answered_ = false;             // watcher only
    std::atomic<bool> is_answering_{true};  // the store, when it was last asked
};

}  // namespace diloco
