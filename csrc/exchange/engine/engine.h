// The exchange engine of one replica: a thread that runs jobs in the order of their submission.
//
// The engine thread never takes the GIL. If a connection is lost, the running job fails and names
// the peer, and the epoch is dead: the engine refuses work until attach() gives it the groups of
// the next epoch. The engine does not decide which peers live: a job waits for them until its
// timeout, or until seal() or close() ends it.
#pragma once

#include <sys/types.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "exchange/engine/faults.h"
#include "exchange/engine/job.h"
#include "exchange/engine/session.h"

namespace diloco {

struct EngineOptions {
    std::chrono::milliseconds timeout{1800000};
    // Called ten times a second by a caller that waits; an exception from it ends the wait.
    std::function<void()> check_signals{};
};

// The failure's message when seal() has ended the epoch.
constexpr char kSealed[] = "a change of the group has begun";

class Engine {
  public:
    explicit Engine(EngineOptions options);
    ~Engine();
    Engine(const Engine&) = delete;
    Engine& operator=(const Engine&) = delete;

    // Starts an epoch. `groups` are two process groups for each lane; none for a single replica.
    // Waits until no job runs, as emulate_link() does, and throws after the timeout.
    void attach(Membership membership, std::vector<BackendPtr> groups);

    // Ends the epoch for good: the running job fails, queued jobs are not begun, the groups are
    // closed. After the return no vote leaves and none is heard. Waits for this replica's own
    // engine thread, never for a peer, and throws after the timeout. Idempotent; attach() begins
    // anew.
    void seal();

    // Encodes the payload on the calling thread, and returns. The engine thread sends what is
    // encoded, meanwhile or later. `job` has a plan.
    void start(const JobPtr& job);

    // Queues a job with is_held, which start() has only encoded. With `is_reset` the header gives
    // the payload weight 0. If the epoch has died since start(), the job fails.
    void ship(const JobPtr& job, bool is_reset);

    // Queues a job without a payload of its own to encode.
    void submit(const JobPtr& job);

    // Grows the shared receive buffer; call before the first job that needs it. A running job
    // keeps its buffer.
    void reserve_staging(int64_t num_bytes);

    void emulate_link(double gbps, double rtt_ms);
    void inject_fault(const Fault& fault);

    // Waits up to `patience` for the queued jobs, then ends the thread and the connections.
    // Idempotent. An exception of check_signals() ends the waiting, and is rethrown at the end.
    void close(std::chrono::milliseconds patience);

    // Why the current epoch is dead; null while it lives.
    std::optional<Failure> dead_failure() const;

    // False in a forked child, where neither the thread nor the groups' threads exist: there an
    // Engine must be leaked, not destroyed.
    bool is_own_process() const;
    void check_process() const;

  private:
    void loop();
    void run(const JobPtr& job);
    void fail_epoch(const Job& job, Failure& failure);
    void refuse_if_dead() const;
    bool wait_until_idle(std::unique_lock<std::mutex>& lock, std::chrono::milliseconds patience);
    void require_idle(std::unique_lock<std::mutex>& lock);
    void check_idle(bool is_idle) const;
    void encode_all(const JobPtr& job);

    const EngineOptions options_;
    const pid_t pid_;

    mutable std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<JobPtr> queue_;
    std::vector<JobPtr> finished_;  // freed on a caller's thread: freeing tensors may need the GIL
    bool is_busy_ = false;
    bool is_attached_ = false;
    bool is_sealed_ = false;
    bool is_closing_ = false;
    std::optional<Failure> dead_;
    int64_t epoch_ = 0;
    std::vector<Fault> next_faults_;  // the engine thread adds them before the next job
    double link_gbps_ = 0.0;
    double link_rtt_ms_ = 0.0;
    std::shared_ptr<Session> session_;
    at::Tensor staging_;

    FaultInjector faults_;  // engine thread only
    std::thread thread_;    // the last member, because the thread uses all members above
};

}  // namespace diloco
