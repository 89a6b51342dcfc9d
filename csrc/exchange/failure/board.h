// Notices on the store: failures, departures, reachability, and the verdict that follows. Members
// of a broken group can no longer message each other; they read the store.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

#include "exchange/failure/verdict.h"

namespace diloco {

// The epoch that follows another, from the notices of members that have entered it.
struct Successor {
    int64_t epoch = -1;
    std::vector<int64_t> members;
};

// The notices of one epoch. Each member has one report on the store, which holds all of the
// member's notices; a notice that does not arrive is sent again. A store that does not answer is
// treated as one without notices, after at most `patience` for the first question and at once for
// the next ones.
class Board {
  public:
    Board(c10::intrusive_ptr<c10d::Store> store, std::chrono::milliseconds patience,
          std::string prefix, int64_t replica, std::vector<int64_t> members);

    // Whether the board's connection to the store has broken, for good.
    bool is_store_lost() const;

    // The board's own store, whose calls end within the patience. Null without a store.
    const c10::intrusive_ptr<c10d::Store>& store() const { return store_; }

    // `cause` is for the others to read; `waited_in_vain`: for a header, up to the timeout.
    void report_failure(const std::string& cause, bool waited_in_vain);
    void report_departure(int64_t inner_step);

    // Answers a failure that another member has reported; does nothing after a report of this
    // member.
    void report_presence(bool is_idle);

    // Reports the group for which this member leaves the present one, before its connections end;
    // empty: for none that leaves a member out.
    void report_next_group(const std::vector<int64_t>& members);

    // Reports which members this one could just connect to, and which not.
    void report_reach(const std::vector<int64_t>& reached, const std::vector<int64_t>& unreached);

    // Puts this member's unsent notices on the store; returns whether all are there. The first
    // report is empty: the other members can then read all reports in one call.
    bool send();

    // True once any member has reported a failure / has left.
    bool is_failed();
    bool is_left();

    // The cause that the first failed member gave; empty when the store does not answer.
    std::string first_failure();

    // The verdict on which members go on. The first member that has read all reports, or whose
    // patience is over, decides it for all. None when the store does not answer. No member is
    // judged before all could read that there is a failure. `spent`: the part of the patience that
    // has passed since this member's report.
    std::optional<Verdict> agree(std::chrono::milliseconds spent);

    // The epoch in which other members of this one have gone on, with its members; epoch -1 without
    // members when there is none yet.
    Successor successor();

  private:
    std::string key(const char* what, int64_t replica) const;
    template <typename Body>
    bool ask(Body body);
    bool has(const std::string& key);
    std::string get(const std::string& key);
    bool set(const std::string& key, const std::string& value);
    std::string set_once(const std::string& key, const std::string& value);
    template <typename Change>
    void say(Change change);
    bool is_sent();
    void find_reports();
    bool hear_all();
    std::optional<Verdict> read_verdict();
    std::optional<Verdict> propose(const Verdict& verdict);

    c10::intrusive_ptr<c10d::Store> store_;  // bounded; null without a store
    std::chrono::milliseconds patience_;
    std::string prefix_;
    int64_t replica_;
    std::vector<int64_t> members_;

    // Engine thread only.
    Reports reports_;
    std::set<int64_t> known_;  // members whose report is on the store

    std::mutex sending_;  // held while sending, so that newer notices arrive later
    std::mutex mutex_;    // guards the members below
    Report own_;
    std::string alarm_;        // this member's unsent failure, for waiting members; empty: none
    bool is_parting_ = false;  // this member's departure is still to be sent
    int64_t num_said_ = 1;
    int64_t num_sent_ = 0;

    // How the calls since the last reset went.
    std::atomic<bool> is_answering_{true};
    std::atomic<bool> is_gone_{false};  // the store will not answer later, either
};

}  // namespace diloco
