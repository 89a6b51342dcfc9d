// How an engine looks after its peers: the watcher's thread, and the text of a failure.
#include <pthread.h>

#include <algorithm>
#include <utility>

#include "exchange/engine/engine.h"
#include "exchange/engine/words.h"

namespace diloco {
namespace {

using std::chrono::milliseconds;

// How often the watcher looks at the store. Jobs shorter than this are not watched.
constexpr milliseconds kWatchPeriod{250};
// A process that was killed no longer listens so much later.
constexpr milliseconds kEndOfProcess{100};

double in_seconds(milliseconds time) { return std::chrono::duration<double>(time).count(); }

std::vector<int64_t> without(std::vector<int64_t> values, int64_t value) {
    values.erase(std::remove(values.begin(), values.end(), value), values.end());
    return values;
}

std::string departures_of(const std::vector<Departure>& left) {
    std::vector<int64_t> replicas;
    std::vector<int64_t> steps;
    for (const Departure& gone : left) {
        replicas.push_back(gone.replica);
        steps.push_back(gone.inner_step);
    }
    const char* words = left.size() == 1 ? " closed its DiLoCo and left, at inner step "
                                         : " closed their DiLoCo and left, at inner steps ";
    return replicas_of(replicas) + words + list_of(steps);
}

// The members' reports about themselves, in words, without the verdict.
std::string findings_of(const Verdict& verdict, int64_t replica, double patience_s) {
    std::vector<std::string> parts;
    if (!verdict.left.empty()) parts.push_back(departures_of(verdict.left));
    if (!verdict.silent.empty()) {
        parts.push_back(replicas_of(verdict.silent) + " did not report within " +
                        rounded(patience_s) + " s");
    }
    if (!verdict.cuts.empty()) parts.push_back(cuts_of(verdict.cuts));
    if (!verdict.left_out.empty()) {
        parts.push_back(replicas_of(verdict.survivors) + " left " + replicas_of(verdict.left_out) +
                        " out of the group");
    }
    if (parts.empty()) parts.push_back("all other replicas live and have reported");
    const auto idle = without(verdict.idle, replica);
    if (!idle.empty()) {
        parts.push_back(replicas_of(idle) + (idle.size() == 1 ? " is" : " are") +
                        " in no exchange");
    }
    std::string text;
    for (const std::string& part : parts) text += (text.empty() ? "" : "; ") + part;
    return text;
}

// The consequence for this replica, where the findings do not already say it.
std::string conclusion_of(const Verdict& verdict, int64_t replica, int64_t next_epoch) {
    const auto& missing = verdict.missing;
    if (std::find(missing.begin(), missing.end(), replica) != missing.end()) {
        const std::string self = "without replica " + std::to_string(replica);
        const std::string way_back =
            ": replica " + std::to_string(replica) +
            " may come back as a newcomer: close this DiLoCo, then make a new one with "
            "init=\"join\"";
        if (next_epoch < 0) return "; the others have decided to go on " + self + way_back;
        return "; the group went on " + self + " in epoch " + std::to_string(next_epoch) + way_back;
    }
    return verdict.cuts.empty() ? "" : "; the others go on without " + replicas_of(missing);
}

}  // namespace

// ------------------------------------------------------------------------------ the watcher

// Reads the peers' notices, and beats so that the peers know this replica alive. A running job
// ends when another replica reports a failure, or when a peer is silent, cannot be reached, or left
// before its header: a job that waits for a third peer would not notice. Between jobs this replica
// answers a failure with a report, so that no peer takes a replica in training for dead. Exchanges
// on streams are watched like jobs, but the caller's thread ends them. A replica without peers
// beats too: newcomers wait for a living replica.
void Engine::watch() {
    pthread_setname_np(pthread_self(), "diloco-watch");
    Memory memory;
    std::unique_lock<std::mutex> lock(mutex_);
    while (!is_finished_) {
        // The watcher has its own clock: jobs never have to wake it.
        watch_changed_.wait_for(lock, kWatchPeriod, [this] { return is_finished_; });
        if (is_finished_ || !board_) continue;
        const Sight seen = sight();
        // A sealed replica is alive, and must still answer that it is.
        const bool is_asked = num_members_ > 1 && (session_ != nullptr || is_sealed_);
        // The store may be slow: meanwhile the session can end, and close its groups.
        lock.unlock();
        listener_.drain();
        seen.pulse->beat();
        seen.board->send();
        const Finding finding = is_asked ? look(seen, memory) : Finding();
        lock.lock();
        if (!session_ || epoch_ != seen.epoch) continue;
        if (is_busy_) {
            act_on(finding, seen);
        } else if (are_streams_under_way_ && streams_since_ == seen.since) {
            streams_trouble_ = finding.trouble;
        }
    }
}

// Holds the mutex.
void Engine::act_on(const Finding& finding, const Sight& seen) {
    if (running_since_ == seen.since) {
        std::lock_guard<std::mutex> lock(running_->mutex);
        running_->waiting = finding.waiting;
    }
    if (finding.trouble.empty()) return;
    if (finding.is_at_header && !session_->is_waiting_for_headers()) return;
    if (abort_reason_.empty()) abort_reason_ = finding.trouble;
    session_->abort();
}

// Holds the mutex.
Engine::Sight Engine::sight() const {
    Sight seen;
    seen.epoch = epoch_;
    seen.board = board_;
    seen.pulse = pulse_;
    seen.ways = ways_;
    seen.is_idle = !is_busy_;
    seen.is_running = is_busy_ && Clock::now() - running_since_ >= kWatchPeriod;
    if (!is_busy_ && are_streams_under_way_ && session_) {
        seen.is_on_streams = Clock::now() - streams_since_ >= kWatchPeriod;
        seen.since = streams_since_;
    }
    if (!seen.is_running || !session_) return seen;
    seen.since = running_since_;
    // The engine thread writes other fields of the header meanwhile.
    seen.subject = subject_of(running_->header);
    seen.is_at_header = session_->is_waiting_for_headers();
    seen.num_messages = session_->num_messages();
    const int rank = session_->awaited_rank();
    if (rank >= 0) seen.awaited = session_->membership().replicas[static_cast<size_t>(rank)];
    return seen;
}

Engine::Finding Engine::look(const Sight& seen, Memory& memory) {
    if (memory.epoch != seen.epoch) {
        memory = Memory();
        memory.epoch = seen.epoch;
    }
    if (!seen.is_idle && !seen.is_running) return {};
    if (seen.board->is_failed()) {
        // A job is ended before the failure is answered. A replica whose job cannot end yet,
        // because the job waits for the replica's own values, must not be taken for dead.
        const bool was_ended = !abort_reason().empty();
        if ((seen.is_idle || was_ended) && !memory.has_answered) {
            memory.has_answered = true;
            seen.board->report_presence(seen.is_idle && !seen.is_on_streams);
            const Ways::Results results = seen.ways->try_all();
            seen.board->report_reach(results.reached, results.unreached);
        }
        const bool is_asked = !was_ended && (!seen.is_idle || seen.is_on_streams);
        const std::string reported = is_asked ? seen.board->first_failure() : "";
        return {reported.empty() ? "another replica has reported a failure" : reported, false, ""};
    }
    if (seen.is_idle && !seen.is_on_streams) return {};
    if (seen.is_at_header && seen.board->is_left()) return {"another replica has left", true, ""};
    return look_at_peers(seen, memory);
}

// Finds peers that are silent or cannot be reached, while no message arrives.
Engine::Finding Engine::look_at_peers(const Sight& seen, Memory& memory) {
    if (memory.since != seen.since || memory.num_messages != seen.num_messages) {
        memory.since = seen.since;
        memory.num_messages = seen.num_messages;
        seen.pulse->forgive();
        seen.ways->forgive();
    }
    seen.pulse->look();
    seen.ways->look();
    Finding finding;
    if (seen.awaited >= 0) {
        const std::string heard =
            seen.pulse->is_answered()
                ? "last heard of " + rounded(seen.pulse->seconds_silent(seen.awaited)) + " s ago"
                : "the store does not answer";
        finding.waiting = "replica " + std::to_string(seen.awaited) + " to begin " + seen.subject +
                          " (" + heard + ")";
    } else {
        finding.waiting = "the payloads and votes of " + seen.subject;
    }
    const std::string limit = rounded(in_seconds(options_.suspect_after)) + " s";
    const auto silent = seen.pulse->suspects();
    const auto lost = seen.ways->lost();
    if (!silent.empty()) {
        finding.trouble = "nothing was heard of " + replicas_of(silent) + " for " + limit;
    } else if (!lost.empty()) {
        finding.trouble = replicas_of(lost) + " could not be reached for " + limit;
    }
    return finding;
}

// ----------------------------------------------------------------- exchanges on streams

void Engine::watch_streams(bool are_under_way) {
    std::lock_guard<std::mutex> lock(mutex_);
    are_streams_under_way_ = are_under_way;
    streams_since_ = Clock::now();
    streams_trouble_.clear();
}

std::string Engine::streams_trouble() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return streams_trouble_;
}

void Engine::give_up(const JobPtr& job) {
    check_process();
    {
        std::lock_guard<std::mutex> lock(mutex_);
        TORCH_CHECK(!is_closing_, "this DiLoCo is closed");
        queue_.push_back(job);
    }
    changed_.notify_all();
}

// ------------------------------------------------------------------------------- a failure

void Engine::fail_epoch(const Job& job, Failure& failure, const Loss& loss) {
    const std::string where = subject_of(job.header) + " failed at " + failure.stage + " after " +
                              rounded(failure.seconds) + " s";
    std::shared_ptr<Session> dead;
    bool is_closing, is_sealed;
    int64_t leave_step;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        dead = std::move(session_);
        session_.reset();
        dead_reason_ = where;
        is_closing = is_closing_;
        is_sealed = is_sealed_;
        leave_step = leave_step_;
    }
    dead.reset();
    // The other members must not count on a replica that closes.
    if (is_closing) board_->report_departure(leave_step);
    board_->report_failure(failure.message.empty() ? where : failure.message, loss.waited_in_vain);
    if (is_closing) {
        failure.message = where + ": this DiLoCo was closed";
    } else if (is_sealed) {
        // No peer is to blame, and seal() waits for this thread alone.
        failure.message = where + ": " + kSealed;
    } else {
        blame(failure, where, loss);
    }
    std::lock_guard<std::mutex> lock(mutex_);
    dead_failure_ = failure;
    dead_reason_ = failure.message;
}

// Completes the failure with the members' verdict.
void Engine::blame(Failure& failure, const std::string& where, const Loss& loss) {
    if (!board_->store()) {
        // The agreement of the group finds out which members live.
        if (loss.replica >= 0) failure.missing = {loss.replica};
        const std::string lost =
            loss.replica < 0 ? "" : "the connection to " + replicas_of(failure.missing) + " is lost";
        const std::string cause = failure.message.empty() ? lost : failure.message;
        failure.message = where + (cause.empty() ? "" : ": " + cause);
        return;
    }
    const auto begin = Clock::now();
    const Ways::Results results = ways_->try_all();
    board_->report_reach(results.reached, results.unreached);
    const auto spent = std::chrono::duration_cast<milliseconds>(Clock::now() - begin);
    const std::optional<Verdict> verdict = board_->agree(spent);
    if (!verdict) {
        blame_alone(failure, where, loss, results);
        return;
    }
    failure.missing = verdict->missing;
    failure.survivors = verdict->survivors;
    failure.cuts = verdict->cuts;
    const std::string cause = failure.message.empty() ? "" : " (" + failure.message + ")";
    if (!verdict->left.empty() && failure.stage == "header") {
        failure.kind = "PeerLeft";
        failure.replicas.clear();
        failure.inner_steps.clear();
        for (const Departure& gone : verdict->left) {
            failure.replicas.push_back(gone.replica);
            failure.inner_steps.push_back(gone.inner_step);
        }
    }
    const auto& missing = failure.missing;
    if (std::find(missing.begin(), missing.end(), options_.replica) != missing.end()) {
        failure.kind = "LeftBehind";
        failure.went_on_in = board_->successor().epoch;
    }
    failure.message =
        where + cause + ": " +
        findings_of(*verdict, options_.replica, in_seconds(options_.report_patience)) +
        conclusion_of(*verdict, options_.replica, failure.went_on_in);
}

// Without the store no member counts as missing: it may be alive and unable to report.
void Engine::blame_alone(Failure& failure, const std::string& where, const Loss& loss,
                         Ways::Results results) {
    if (failure.kind == "PeerLeft") {
        failure.missing = failure.replicas;
        std::vector<Departure> left;
        for (size_t i = 0; i < failure.replicas.size(); ++i) {
            left.push_back({failure.replicas[i], failure.inner_steps[i]});
        }
        failure.message = where + ": " + departures_of(left);
        return;
    }
    const auto has = [](const std::vector<int64_t>& replicas, int64_t replica) {
        return std::find(replicas.begin(), replicas.end(), replica) != replicas.end();
    };
    if (has(results.reached, loss.replica)) {
        // The kernel closes the sockets of a dead process one after the other: this one may have
        // lost its connections, and still listen.
        std::this_thread::sleep_for(kEndOfProcess);
        results = ways_->try_all();
    }
    failure.missing = results.refused;
    const bool is_lost = has(results.unreached, loss.replica);
    if (is_lost && !has(failure.missing, loss.replica)) failure.missing.push_back(loss.replica);
    std::sort(failure.missing.begin(), failure.missing.end());
    const std::string cause = failure.message.empty() ? "" : " (" + failure.message + ")";
    failure.message = where + cause + ": ";
    if (!failure.missing.empty()) {
        failure.message += "the connection to " + replicas_of(failure.missing) + " is lost; ";
    }
    failure.message += "who else is gone cannot be told, because the store does not answer: ";
    // A slow answer is no loss: a replica that then turned to another store would be alone there.
    failure.message +=
        board_->is_store_lost()
            ? "call change_group() with the replicas that live, and with another store as store="
            : "call change_group() with the replicas that live; if the store stays silent, all of "
              "them with another store as store=";
}

}  // namespace diloco
