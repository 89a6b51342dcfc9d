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

#include "exchange/engine/job.h"
#include "exchange/engine/session.h"
#include "exchange/failure/board.h"
#include "exchange/failure/faults.h"
#include "exchange/failure/pulse.h"
#include "exchange/failure/reach.h"

namespace diloco {

struct EngineOptions {
    int64_t replica = 0;
    std::chrono::milliseconds timeout{1800000};
    // How long a replica that saw a failure waits for the reports of the others.
    std::chrono::milliseconds report_patience{3000};
    // Called by a waiting caller a few times a second; an exception from it ends the wait.
    std::function<void()> check_signals{};
    // A peer that an exchange waits for is given up after this long a silence.
    std::chrono::milliseconds suspect_after{30000};
    // gloo's network interface, where peers may try to reach this replica. Empty: the interface of
    // the host's name.
    std::string interface{};
    // Whether the engine has a port at which peers may try to reach it.
    bool listens = true;
};

// The dead_reason() of an epoch that a change of the group has ended.
constexpr char kSealed[] = "a change of the group has begun";

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

    // Tells the other members, before seal(), with which replicas this one goes on; empty: with all
    // of them. A member that is left out learns from that why its connections end.
    void announce(const std::vector<int64_t>& members);

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

    // Tells the watcher whether exchanges on a device's streams are under way, which this engine
    // does not run. Each call means that one such exchange has begun or ended. While any is under
    // way, the watcher looks after the peers as it does for a job.
    void watch_streams(bool are_under_way);

    // Why exchanges on streams cannot end; empty while the watcher knows no reason.
    std::string streams_trouble() const;

    // Ends the epoch because of an exchange on streams; the job fails with the members' verdict.
    void give_up(const JobPtr& job);

    // Grows the shared receive buffer; call before the first job that needs it. A running job
    // keeps its buffer.
    void reserve_staging(int64_t num_bytes);

    void emulate_link(double gbps, double rtt_ms);
    void inject_fault(const Fault& fault);

    // Finishes queued jobs within `patience`, tells the peers, ends the threads. Idempotent. An
    // exception of check_signals() ends the patience and is rethrown at the end.
    void close(std::chrono::milliseconds patience, int64_t inner_step);

    // Why the current epoch is dead; empty while it lives.
    std::string dead_reason() const;
    Failure dead_failure() const;

    // Whether this epoch's connection to the store has broken; the engine then asks it no more.
    bool is_store_lost() const;

    // The address where peers may try to reach this replica; empty where it is unknown.
    const std::string& address() const { return listener_.address(); }

    // False in a forked child, where neither the threads nor the groups' threads exist: there an
    // Engine must be leaked, not destroyed.
    bool is_own_process() const;
    void check_process() const;

  private:
    void loop();
    void watch();
    void run(const JobPtr& job);
    std::string abort_reason() const;

    // A copy of the running job's state, made under the mutex for the watcher to read without it.
    struct Sight {
        int64_t epoch = 0;
        bool is_idle = true;         // no job
        bool is_on_streams = false;  // no job, but exchanges on streams to watch
        bool is_running = false;     // longer than the watcher's period: it looks after the job
        bool is_at_header = false;
        int64_t awaited = -1;  // the replica whose header the job waits for
        int64_t num_messages = 0;
        Clock::time_point since{};  // when the job began
        std::string subject;        // of the job
        std::shared_ptr<Board> board;
        std::shared_ptr<Pulse> pulse;
        std::shared_ptr<Ways> ways;
    };
    struct Finding {
        std::string trouble;        // ends the job
        bool is_at_header = false;  // `trouble` ends the job only while it waits for headers
        std::string waiting;        // the peers that the job waits for, in words
    };
    // The watcher's memory from one look to the next.
    struct Memory {
        int64_t epoch = -1;
        bool has_answered = false;
        Clock::time_point since{};
        int64_t num_messages = -1;
    };
    Sight sight() const;
    Finding look(const Sight& seen, Memory& memory);
    Finding look_at_peers(const Sight& seen, Memory& memory);
    void act_on(const Finding& finding, const Sight& seen);

    // The replica to which an exchange lost the connection; -1: none.
    struct Loss {
        int64_t replica = -1;
        bool waited_in_vain = false;  // for a header, up to the timeout
    };
    void fail_epoch(const Job& job, Failure& failure, const Loss& loss);
    void blame(Failure& failure, const std::string& where, const Loss& loss);
    void blame_alone(Failure& failure, const std::string& where, const Loss& loss,
                     Ways::Results results);
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
    std::vector<JobPtr> finished_;  // freed by a caller's thread: freeing may need the GIL
    JobPtr running_;
    bool is_busy_ = false;
    Clock::time_point running_since_{};
    bool are_streams_under_way_ = false;
    Clock::time_point streams_since_{};  // when the last exchange on streams began or ended
    std::string streams_trouble_;
    bool is_attached_ = false;
    bool is_sealed_ = false;
    bool is_closing_ = false;
    bool is_finished_ = false;  // the engine thread takes no more jobs
    int64_t leave_step_ = -1;
    std::string dead_reason_;
    std::string abort_reason_;  // of the current session
    Failure dead_failure_;
    int64_t epoch_ = 0;
    std::vector<Fault> next_faults_;  // for the next job
    double link_gbps_ = 0.0;
    double link_rtt_ms_ = 0.0;
    std::shared_ptr<Session> session_;
    // Shared: the watcher may read the old epoch's while attach() sets the next epoch's.
    std::shared_ptr<Board> board_;
    std::shared_ptr<Pulse> pulse_;
    std::shared_ptr<Ways> ways_;
    size_t num_members_ = 1;
    at::Tensor staging_;

    Listener listener_;
    FaultInjector faults_;  // engine thread only
    std::unique_ptr<std::thread> thread_;
    std::unique_ptr<std::thread> watcher_;
};

}  // namespace diloco
