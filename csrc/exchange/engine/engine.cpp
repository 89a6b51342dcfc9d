#include "exchange/engine/engine.h"

#include <c10/core/DeviceGuard.h>
#include <pthread.h>
#include <unistd.h>

#include <exception>
#include <utility>

#include "codec/serial.h"
#include "exchange/engine/control.h"
#include "exchange/engine/words.h"
#include "exchange/transport/pages.h"

namespace diloco {

using std::chrono::milliseconds;

void check_process(pid_t owner) {
    TORCH_CHECK(getpid() == owner, "this DiLoCo belongs to process ", owner,
                " and cannot be used in its forked child ", getpid(),
                ": create a new DiLoCo there");
}

Engine::Engine(EngineOptions options)
    : options_(options),
      pid_(getpid()),
      listener_(options_.listens ? Listener(options_.interface) : Listener()) {
    thread_ = std::make_unique<std::thread>([this] { loop(); });
    try {
        watcher_ = std::make_unique<std::thread>([this] { watch(); });
    } catch (...) {
        close(milliseconds(0), -1);
        throw;
    }
}

Engine::~Engine() { close(milliseconds(0), -1); }

bool Engine::is_own_process() const { return getpid() == pid_; }

void Engine::check_process() const { diloco::check_process(pid_); }

std::string Engine::dead_reason() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return dead_reason_;
}

Failure Engine::dead_failure() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return dead_failure_;
}

bool Engine::is_store_lost() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return board_ && board_->is_store_lost();
}

std::string Engine::abort_reason() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return abort_reason_;
}

void Engine::refuse_if_dead() const {
    TORCH_CHECK(!is_closing_, "this DiLoCo is closed");
    TORCH_CHECK(is_attached_, "this replica is in no group yet");
    TORCH_CHECK(dead_reason_.empty(), "epoch ", epoch_,
                " of this replica's group is dead: ", dead_reason_,
                ". Call change_group() with the replicas that live");
}

// ------------------------------------------------------------------- from the callers' threads

void Engine::attach(Membership membership, std::vector<BackendPtr> groups,
                    c10::intrusive_ptr<c10d::Store> store, const std::string& prefix) {
    check_process();
    TORCH_CHECK(membership.size() == 1 || (!groups.empty() && groups.size() % 2 == 0),
                "attach: each lane needs two groups, got ", groups.size());
    const std::vector<int64_t> members = membership.replicas;
    auto board = std::make_shared<Board>(std::move(store), options_.report_patience, prefix,
                                         options_.replica, members);
    auto pulse = std::make_shared<Pulse>(board->store(), prefix, options_.replica, members,
                                         options_.suspect_after);
    auto ways = std::make_shared<Ways>(options_.replica, members, membership.addresses,
                                       options_.report_patience / 2, options_.suspect_after);
    auto session = std::make_shared<Session>(std::move(membership), std::move(groups),
                                             options_.timeout, faults_);
    std::shared_ptr<Session> old;
    {
        std::unique_lock<std::mutex> lock(mutex_);
        require_idle(lock);
        session->emulate_link(link_gbps_, link_rtt_ms_);
        epoch_ = session->membership().epoch;
        old = std::exchange(session_, std::move(session));
        board_ = std::move(board);
        pulse_ = std::move(pulse);
        ways_ = std::move(ways);
        num_members_ = members.size();
        dead_reason_.clear();
        abort_reason_.clear();
        are_streams_under_way_ = false;
        streams_trouble_.clear();
        is_attached_ = true;
        is_sealed_ = false;
    }
}

void Engine::announce(const std::vector<int64_t>& members) {
    check_process();
    std::unique_lock<std::mutex> lock(mutex_);
    const std::shared_ptr<Board> board = board_;
    lock.unlock();
    if (board) board->report_next_group(members);
}

void Engine::seal() {
    check_process();
    std::shared_ptr<Session> dead;  // freed without the lock
    std::unique_lock<std::mutex> lock(mutex_);
    is_sealed_ = true;
    if (dead_reason_.empty()) {
        dead_reason_ = kSealed;
        dead_failure_ = Failure();
        dead_failure_.kind = "SyncError";
        dead_failure_.stage = "start";
        dead_failure_.message = kSealed;
    }
    if (session_) session_->abort();
    require_idle(lock);
    dead = std::move(session_);
    session_.reset();
}

// Returns whether no job runs within `patience`. If check_signals() throws, the lock is released.
bool Engine::wait_until_idle(std::unique_lock<std::mutex>& lock, milliseconds patience) {
    constexpr milliseconds kSlice{100};
    const auto deadline = Clock::now() + patience;
    const auto is_idle = [this] { return queue_.empty() && !is_busy_; };
    while (!changed_.wait_until(lock, std::min(deadline, Clock::now() + kSlice), is_idle)) {
        if (Clock::now() >= deadline) return false;
        if (!options_.check_signals) continue;
        lock.unlock();
        options_.check_signals();
        lock.lock();
    }
    return true;
}

// Waits until the session may be changed: neither a job nor close() uses it.
void Engine::require_idle(std::unique_lock<std::mutex>& lock) {
    const bool is_idle = wait_until_idle(lock, options_.timeout);
    TORCH_CHECK(!is_closing_, "this DiLoCo is closed");
    TORCH_CHECK(is_idle, "an exchange that was started before is still under way after ",
                rounded(std::chrono::duration<double>(options_.timeout).count()), " s");
}

void Engine::reserve_staging(int64_t num_bytes) {
    check_process();
    const auto is_enough = [&] { return staging_.defined() && staging_.numel() >= num_bytes; };
    {
        std::lock_guard<std::mutex> lock(mutex_);
        if (is_enough()) return;
    }
    at::Tensor larger = empty_pages(num_bytes);
    std::lock_guard<std::mutex> lock(mutex_);
    if (!is_enough()) std::swap(staging_, larger);
}

void Engine::emulate_link(double gbps, double rtt_ms) {
    check_process();
    std::unique_lock<std::mutex> lock(mutex_);
    require_idle(lock);
    link_gbps_ = gbps;
    link_rtt_ms_ = rtt_ms;
    if (session_) session_->emulate_link(gbps, rtt_ms);
}

void Engine::inject_fault(const Fault& fault) {
    std::lock_guard<std::mutex> lock(mutex_);
    next_faults_.push_back(fault);
}

void Engine::close(milliseconds patience, int64_t inner_step) {
    if (!is_own_process()) return;
    std::exception_ptr interrupt;
    {
        std::unique_lock<std::mutex> lock(mutex_);
        if (is_closing_) return;
        is_closing_ = true;
        leave_step_ = inner_step;
        changed_.notify_all();
        bool is_idle = false;
        try {
            is_idle = wait_until_idle(lock, patience);
        } catch (...) {
            interrupt = std::current_exception();
            lock.lock();
        }
        // A job that still waits for a peer ends here, and the jobs queued behind it fail.
        if (!is_idle && session_) session_->abort();
    }
    thread_->join();
    if (watcher_) watcher_->join();
    listener_.close();
    std::shared_ptr<Session> session;  // session and board are freed without the lock
    std::shared_ptr<Board> board;
    std::shared_ptr<Pulse> pulse;
    std::vector<JobPtr> finished;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        session.swap(session_);
        board.swap(board_);
        pulse.swap(pulse_);
        finished.swap(finished_);
    }
    if (interrupt) std::rethrow_exception(interrupt);
}

// ---------------------------------------------------------------------- on the engine's threads

void Engine::loop() {
    pthread_setname_np(pthread_self(), "diloco-engine");
    // Kernels called from here stay on this thread: the intra-op pool belongs to the training loop.
    const codec::SerialScope serial;
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
        changed_.wait(lock, [this] { return is_closing_ || !queue_.empty(); });
        if (queue_.empty()) break;
        running_ = queue_.front();
        queue_.pop_front();
        is_busy_ = true;
        running_since_ = Clock::now();
        for (Fault& fault : next_faults_) faults_.add(std::move(fault));
        next_faults_.clear();
        const JobPtr job = running_;
        lock.unlock();
        run(job);
        lock.lock();
        finished_.push_back(std::move(running_));
        is_busy_ = false;
        changed_.notify_all();
    }
    is_finished_ = true;
    watch_changed_.notify_one();
    const std::shared_ptr<Session> session = session_;
    const std::shared_ptr<Board> board = board_;
    const int64_t step = leave_step_;
    lock.unlock();
    if (session && session->membership().size() > 1) {
        board->report_departure(step);
        session->leave(step);
    }
}

void Engine::run(const JobPtr& job) {
    // Events leave the thread's device as they found it. In a new thread that is device 0, and the
    // driver would make a context there for a replica that is on another device.
    c10::OptionalDeviceGuard device;
    const auto begin = Clock::now();
    const int64_t faults = minor_faults();
    at::Tensor staging;  // outlives the session, whose messages are received into it
    std::shared_ptr<Session> session;
    Failure failure;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        staging = staging_;
        // A job that is taken from the queue while the epoch is being sealed is not begun.
        if (!is_sealed_) session = session_;
        failure = dead_failure_;
    }
    if (!session) {
        failure.message = subject_of(job->header) + " was not started: " + dead_reason();
        job->finish(std::move(failure));
        return;
    }
    bool is_epoch_dead = true;
    Loss loss;
    failure = Failure();
    failure.kind = "SyncError";
    try {
        if (job->staging) device.reset_device(job->staging->queue->device());
        if (job->lost) throw std::runtime_error(job->lost->reason);
        session->run(*job, staging);
        job->seconds["total"] = seconds_since(begin);
        job->engine_faults = minor_faults() - faults;
        job->finish();
        return;
    } catch (const Rejected& rejected) {
        failure = rejected.failure;
        is_epoch_dead = failure.kind == "PeerLeft";
    } catch (const TransportError& error) {
        const auto& replicas = session->membership().replicas;
        const int64_t peer = replicas[static_cast<size_t>(std::max(error.peer, 0))];
        failure.message = "replica " + std::to_string(peer) + ": " + error.what();
        failure.cause = error.cause;
        if (!error.is_timeout()) loss.replica = peer;
        loss.waited_in_vain = error.is_timeout() && session->is_waiting_for_headers();
    } catch (const Aborted& error) {
        failure.message = abort_reason().empty() ? error.what() : abort_reason();
    } catch (const std::exception& error) {
        failure.message = text_of(error);
    }
    failure.stage = job->lost ? "exchange" : session->stage();
    failure.seconds = job->lost ? job->lost->seconds : seconds_since(begin);
    if (is_epoch_dead) {
        // The groups are closed first, so that peers waiting for this replica notice at once.
        session.reset();
        fail_epoch(*job, failure, loss);
    } else {
        failure.message = subject_of(job->header) + ": " + failure.message;
    }
    job->finish(std::move(failure));
}

}  // namespace diloco
