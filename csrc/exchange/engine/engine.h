// The exchange engine of one replica: a thread that runs jobs in the order of their submission.
//
// The engine thread never takes the GIL. A job whose epoch breaks fails, and says which connection
// was lost; the engine then refuses work until attach() gives it the next epoch's groups. The
// engine judges no peer: a job waits until its timeout, or until seal() or close() ends it.
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
    // Called by a waiting caller a few times a second; an exception from it ends the wait.
    std::function<void()> check_signals{};
};

// The message of the failure of an epoch that a change of the group has ended.
constexpr char kSealed[] = "a change of the group has begun";

class Engine {
  public:
    explicit Engine(EngineOptions options);
    ~Engine();
    Engine(const Engine&) = delete;
    Engine& operator=(const Engine&) = delete;

    // Starts an epoch. `groups`: two for each lane; empty for a single replica. Waits until no job
    // runs, as emulate_link() does, and throws after the timeout.
    void attach(Membership membership, std::vector<BackendPtr> groups);

    // Ends the epoch for good: the running job fails, queued jobs are not begun, the groups are
    // closed. After the return no vote leaves and none is heard. Waits for this replica's own
    // engine thread, never for a peer, and throws after the timeout. Idempotent; attach() begins
    // anew.
    void seal();

    // Encodes on the calling thread while the engine thread ships, then returns; `job` has a plan.
    void start(const JobPtr& job);

    // Sends a job that start() held. `is_reset`: the job's payload is of weight 0, and its header
    // says so. If the epoch died meanwhile, the job fails like jobs that were queued before.
    void ship(const JobPtr& job, bool is_reset);

    // Queues a job without a payload of its own to encode.
    void submit(const JobPtr& job);

    // Grows the shared receive buffer; call before the first job that needs it. A running job
    // keeps its buffer.
    void reserve_staging(int64_t num_bytes);

    void emulate_link(double gbps, double rtt_ms);
    void inject_fault(const Fault& fault);

    // Finishes queued jobs within `patience`, ends the thread and the connections. Idempotent. An
    // exception of check_signals() ends the patience and is rethrown at the end.
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
    std::vector<JobPtr> finished_;  // freed by a caller's thread: freeing may need the GIL
    bool is_busy_ = false;
    bool is_attached_ = false;
    bool is_sealed_ = false;
    bool is_closing_ = false;
    std::optional<Failure> dead_;
    int64_t epoch_ = 0;
    std::vector<Fault> next_faults_;  // for the next job
    double link_gbps_ = 0.0;
    double link_rtt_ms_ = 0.0;
    std::shared_ptr<Session> session_;
    at::Tensor staging_;

    FaultInjector faults_;  // engine thread only
    std::thread thread_;    // last: uses all of the above
};

}  // namespace diloco
