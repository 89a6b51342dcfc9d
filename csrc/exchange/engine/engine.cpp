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
    : options_(std::move(options)), pid_(getpid()), thread_([this] { loop(); }) {}

Engine::~Engine() { close(milliseconds(0)); }

bool Engine::is_own_process() const { return getpid() == pid_; }

void Engine::check_process() const { diloco::check_process(pid_); }

std::optional<Failure> Engine::dead_failure() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return dead_;
}

void Engine::refuse_if_dead() const {
    TORCH_CHECK(!is_closing_, "this DiLoCo is closed");
    TORCH_CHECK(is_attached_, "this replica is in no group yet");
    TORCH_CHECK(!dead_, "epoch ", epoch_, " of this replica's group is dead: ", dead_->message,
                ". Call change_group() with the replicas that live");
}

// ------------------------------------------------------------------- from the callers' threads

void Engine::attach(Membership membership, std::vector<BackendPtr> groups) {
    check_process();
    TORCH_CHECK(membership.size() == 1 || (!groups.empty() && groups.size() % 2 == 0),
                "attach: each lane needs two groups, got ", groups.size());
    std::shared_ptr<Session> session;
    try {
        session =
            std::make_shared<Session>(membership, std::move(groups), options_.timeout, faults_);
    } catch (const TransportError& error) {
        // A member may have died before this group began.
        const int64_t peer = membership.replicas[static_cast<size_t>(error.peer)];
        throw std::runtime_error("replica " + std::to_string(peer) + ": " + error.what());
    }
    std::shared_ptr<Session> old;  // freed without the lock
    std::unique_lock<std::mutex> lock(mutex_);
    require_idle(lock);
    session->emulate_link(link_gbps_, link_rtt_ms_);
    epoch_ = session->membership().epoch;
    old = std::exchange(session_, std::move(session));
    dead_.reset();
    is_attached_ = true;
    is_sealed_ = false;
}

void Engine::seal() {
    check_process();
    std::shared_ptr<Session> dead;  // freed without the lock
    std::unique_lock<std::mutex> lock(mutex_);
    is_sealed_ = true;
    if (!dead_) {
        dead_.emplace();
        dead_->kind = "SyncError";
        dead_->stage = "start";
        dead_->message = kSealed;
    }
    if (session_) session_->abort();
    const bool is_idle = wait_until_idle(lock, options_.timeout);
    if (is_closing_) return;  // close() frees the session
    check_idle(is_idle);
    dead = std::move(session_);
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
    check_idle(is_idle);
}

void Engine::check_idle(bool is_idle) const {
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

void Engine::close(milliseconds patience) {
    if (!is_own_process()) return;
    std::exception_ptr interrupt;
    {
        std::unique_lock<std::mutex> lock(mutex_);
        if (is_closing_) return;
        is_closing_ = true;
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
    thread_.join();
    std::shared_ptr<Session> session;  // freed without the lock, as the jobs are
    std::vector<JobPtr> finished;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        session.swap(session_);
        finished.swap(finished_);
    }
    if (interrupt) std::rethrow_exception(interrupt);
}

// ----------------------------------------------------------------------- on the engine's thread

void Engine::loop() {
    pthread_setname_np(pthread_self(), "diloco-engine");
    // Kernels called from here stay on this thread: the intra-op pool belongs to the training loop.
    const codec::SerialScope serial;
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
        changed_.wait(lock, [this] { return is_closing_ || !queue_.empty(); });
        if (queue_.empty()) return;
        JobPtr job = std::move(queue_.front());
        queue_.pop_front();
        is_busy_ = true;
        for (Fault& fault : next_faults_) faults_.add(std::move(fault));
        next_faults_.clear();
        lock.unlock();
        run(job);
        lock.lock();
        finished_.push_back(std::move(job));
        is_busy_ = false;
        changed_.notify_all();
    }
}

void Engine::run(const JobPtr& job) {
    // The guard sets this thread's device while the job runs. A new thread is on device 0, and CUDA
    // would create a context there even though the replica is on another device.
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
        failure = dead_.value_or(Failure());
    }
    if (!session) {
        failure.message = subject_of(job->header) + " was not started: " + failure.message;
        job->finish(std::move(failure));
        return;
    }
    failure = Failure();
    failure.kind = "SyncError";
    bool is_epoch_dead = true;
    try {
        if (job->staging) device.reset_device(job->staging->queue->device());
        session->run(*job, staging);
        job->seconds["total"] = seconds_since(begin);
        job->engine_faults = minor_faults() - faults;
        job->finish();
        return;
    } catch (const Rejected& rejected) {
        failure = rejected.failure;
        is_epoch_dead = false;
    } catch (const TransportError& error) {
        const auto& replicas = session->membership().replicas;
        const int64_t peer = replicas[static_cast<size_t>(std::max(error.peer, 0))];
        failure.message = "replica " + std::to_string(peer) + ": " + error.what();
        failure.cause = error.cause;
        if (!error.is_timeout()) failure.missing = {peer};
    } catch (const std::exception& error) {
        failure.message = text_of(error);
    }
    failure.stage = session->stage();
    failure.seconds = seconds_since(begin);
    if (is_epoch_dead) {
        session.reset();
        fail_epoch(*job, failure);
    } else {
        failure.message = subject_of(job->header) + ": " + failure.message;
    }
    job->finish(std::move(failure));
}

// Ends the epoch after a failed job. It does not decide which members live: the group's agreement
// does.
void Engine::fail_epoch(const Job& job, Failure& failure) {
    const std::string where = subject_of(job.header) + " failed at " + failure.stage + " after " +
                              rounded(failure.seconds) + " s: ";
    // The session is freed after the lock is released. That closes the connections, so that peers
    // which wait for this replica notice at once.
    std::shared_ptr<Session> dead;
    std::lock_guard<std::mutex> lock(mutex_);
    dead = std::move(session_);
    if (is_closing_ || is_sealed_) {
        // No peer is to blame.
        failure.missing.clear();
        failure.message = is_closing_ ? "this DiLoCo was closed" : kSealed;
    }
    failure.message = where + failure.message;
    dead_ = failure;
}

}  // namespace diloco
