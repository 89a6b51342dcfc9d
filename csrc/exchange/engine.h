// The exchange engine of one replica: a thread that runs jobs in the order of their submission.
//
// The engine thread never takes the GIL. A job whose epoch breaks fails with a report of who did
// not answer; the engine then refuses work until attach() gives it the next epoch's groups.
#pragma once

#include <sys/types.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "exchange/board.h"
#include "exchange/faults.h"
#include "exchange/job.h"
#include "exchange/session.h"

namespace diloco {

struct EngineOptions {
    int64_t replica = 0;
    std::chrono::milliseconds timeout{1800000};
    // How long a replica that saw a failure waits for the reports of the others.
    std::chrono::milliseconds report_patience{3000};
    // Asked by a caller that waits, a few times a second; what it throws ends the wait.
    std::function<void()> check_signals{};
};

class Engine {
  public:
    explicit Engine(EngineOptions options);
    ~Engine();
    Engine(const Engine&) = delete;
    Engine& operator=(const Engine&) = delete;

    // Starts an epoch. `groups`: two for each lane; empty for a single replica. The store carries
    // failure reports under `prefix`. Waits until no job runs, as emulate_link() does, and throws
    // after the timeout.
    void attach(Membership membership, std::vector<BackendPtr> groups,
                c10::intrusive_ptr<c10d::Store> store, const std::string& prefix);

    // Encodes on the calling thread while the engine thread ships, then returns; `job` has a plan.
    void start(const JobPtr& job);

    // Queues a job without a payload of its own to encode.
    void submit(const JobPtr& job);

    // Grows the shared receive buffer; call before the first job that needs it. A job that runs
    // keeps the one that it has.
    void reserve_staging(int64_t num_bytes);

    void emulate_link(double gbps, double rtt_ms);
    void inject_fault(const Fault& fault);

    // Finishes what is queued within `patience`, tells the peers, ends the threads. Idempotent.
    // Rethrows at its end what check_signals() threw, which ends the patience.
    void close(std::chrono::milliseconds patience, int64_t inner_step);

    // Why the current epoch is dead; empty while it lives.
    std::string dead_reason() const;

    // False in a forked child, where neither the threads nor the groups' threads exist: there an
    // Engine must be leaked, not destroyed.
    bool is_own_process() const;
    void check_process() const;

  private:
    void loop();
    void watch();
    void run(const JobPtr& job);
    void fail_epoch(const Job& job, Failure& failure);
    void blame(Failure& failure, const std::string& where);
    void refuse_if_dead() const;
    bool wait_until_idle(std::unique_lock<std::mutex>& lock, std::chrono::milliseconds patience);
    void require_idle(std::unique_lock<std::mutex>& lock);
    void encode_all(const JobPtr& job);

    const EngineOptions options_;
    const pid_t pid_;

    mutable std::mutex mutex_;
    std::condition_variable changed_;
    std::condition_variable watch_changed_;
    std::deque<JobPtr> queue_;
    std::vector<JobPtr> finished_;  // freed by a caller's thread, which may need the GIL for it
    JobPtr running_;
    bool is_busy_ = false;
    Clock::time_point running_since_{};
    bool is_attached_ = false;
    bool is_closing_ = false;
    bool is_finished_ = false;  // the engine thread takes no more jobs
    int64_t leave_step_ = -1;
    std::string dead_reason_;
    Failure dead_failure_;
    int64_t epoch_ = 0;
    std::vector<Fault> next_faults_;  // for the next job
    double link_gbps_ = 0.0;
    double link_rtt_ms_ = 0.0;
    std::shared_ptr<Session> session_;
    std::shared_ptr<Board> board_;  // the watcher may look at it while the next one is attached
    at::Tensor staging_;

    FaultInjector faults_;  // engine thread only
    std::unique_ptr<std::thread> thread_;
    std::unique_ptr<std::thread> watcher_;
};

}  // namespace diloco
