// Notices on the store: who failed where, who left, who can reach whom, and what follows from it.
// The group is silent once it is broken.
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

// The epoch that follows another, as those say who have entered it.
struct Successor {
    int64_t epoch = -1;
    std::vector<int64_t> members;
};

// The notices of one epoch. Each member has one report on the store, which holds all that it has
// said; what does not get there is sent again. A store that does not answer is treated as one
// without notices, after at most `patience` for the first question and at once for the next ones.
class Board {
  public:
    Board(c10::intrusive_ptr<c10d::Store> store, std::chrono::milliseconds patience,
          std::string prefix, int64_t replica, std::vector<int64_t> members);

    // Whether our connection to the store has broken: it will not come back.
    bool is_store_lost() const;

    // Ours; its calls end within the patience. Null without a store.
    const c10::intrusive_ptr<c10d::Store>& store() const { return store_; }

    // `cause` is for the others to read; `waited_in_vain`: for a header, up to the timeout.
    void report_failure(const std::string& cause, bool waited_in_vain);
    void report_departure(int64_t inner_step);

    // Answers a failure that somebody else has reported; says nothing new after one of our own.
    void report_presence(bool is_idle);

    // Which of the members we could connect to just now, and which not.
    void report_reach(const std::vector<int64_t>& reached, const std::vector<int64_t>& unreached);

    // Puts what we have said on the store where it is not there yet; whether all of it is there. At
    // first that is an empty report: the others can then read all reports in one call.
    bool send();

    // True once any member has reported a failure / has left.
    bool is_failed();
    bool is_left();

    // What the first one that failed has said of it; empty when the store does not answer.
    std::string first_failure();

    // Who goes on: decided by the first member that has heard all, or whose patience is over, and
    // the same for all of them. None when the store does not answer, and nobody can be heard.
    // Nobody is judged before the others could read that there is a failure. `spent`: of the
    // patience, since our report.
    std::optional<Verdict> agree(std::chrono::milliseconds spent);

    // The epoch that others of this one have gone on in, and its members; -1 and none when there
    // is none yet.
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

    std::mutex sending_;  // held while we send, so that what is newer arrives later
    std::mutex mutex_;    // of the following
    Report own_;
    std::string alarm_;  // that we have failed, and why, for those that wait; empty: none, or sent
    bool is_parting_ = false;  // that we leave is to be sent, likewise
    int64_t num_said_ = 1;
    int64_t num_sent_ = 0;

    // Of the calls since they were last set.
    std::atomic<bool> is_answering_{true};
    std::atomic<bool> is_gone_{false};  // it will not answer later, either
};

}  // namespace diloco
