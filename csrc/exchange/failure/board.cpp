#include "exchange/failure/board.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <sstream>
#include <thread>
#include <utility>

#include "exchange/failure/bounded_store.h"

namespace diloco {
namespace {

std::vector<uint8_t> bytes_of(const std::string& text) { return {text.begin(), text.end()}; }

std::string text_of(const std::vector<uint8_t>& bytes) { return {bytes.begin(), bytes.end()}; }

bool contains(const std::vector<int64_t>& values, int64_t value) {
    return std::find(values.begin(), values.end(), value) != values.end();
}

std::vector<int64_t> numbers_in(const std::string& text) {
    std::istringstream words(text);
    std::vector<int64_t> numbers;
    for (int64_t number = 0; words >> number;) numbers.push_back(number);
    return numbers;
}

}  // namespace

Board::Board(c10::intrusive_ptr<c10d::Store> store, std::chrono::milliseconds patience,
             std::string prefix, int64_t replica, std::vector<int64_t> members)
    : patience_(patience),
      prefix_(std::move(prefix)),
      replica_(replica),
      members_(std::move(members)) {
    if (!store) return;
    store_ = bounded(std::move(store), patience);
    try {
        // The board connects anew: the user may wait for hours in the connection that was given.
        store_ = another_connection(*store_);
    } catch (const std::exception&) {
        // The present connection may be sound.
    }
}

bool Board::is_store_lost() const { return store_ && is_lost(*store_); }

std::string Board::key(const char* what, int64_t replica) const {
    return prefix_ + "/" + what + "/" + std::to_string(replica);
}

// Returns whether the store has done the call.
template <typename Body>
bool Board::ask(Body body) {
    if (!store_) return false;
    try {
        body();
        return true;
    } catch (const c10::DistStoreError&) {
        // The store hangs, perhaps for a while.
    } catch (const std::exception&) {
        is_gone_ = true;
    }
    is_answering_ = false;
    return false;
}

bool Board::has(const std::string& key) {
    bool is_there = false;
    ask([&] { is_there = store_->check({key}); });
    return is_there;
}

// The value of an existing key; empty when the store does not answer.
std::string Board::get(const std::string& key) {
    std::string text;
    ask([&] { text = text_of(store_->get(key)); });
    return text;
}

bool Board::set(const std::string& key, const std::string& value) {
    return ask([&] { store_->set(key, bytes_of(value)); });
}

// Sets an absent key, and returns the key's value; nothing when the store does not answer. With a
// store that cannot compare, two members that set a key at once may get different values.
std::string Board::set_once(const std::string& key, const std::string& value) {
    std::string held;
    bool lacks_it = false;
    ask([&] {
        try {
            // With an empty expectation a store sets an absent key, and returns the key's value.
            held = text_of(store_->compareSet(key, {}, bytes_of(value)));
        } catch (const std::exception& error) {
            // A store written in Python reports a missing method by an assertion of torch's.
            lacks_it = std::string(error.what()).find("ot implemented") != std::string::npos;
            if (!lacks_it) throw;
        }
    });
    if (!lacks_it) return held;
    if (!has(key) && !set(key, value)) return "";
    return get(key);
}

template <typename Change>
void Board::say(Change change) {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        change();
        ++num_said_;
    }
    send();
}

bool Board::send() {
    if (!store_) return true;
    std::lock_guard<std::mutex> turn(sending_);
    std::unique_lock<std::mutex> lock(mutex_);
    if (num_sent_ == num_said_) return true;
    const int64_t number = num_said_;
    const std::string report = to_text(own_);
    const std::string alarm = alarm_;
    const bool is_parting = is_parting_;
    lock.unlock();
    // The reports say which member has failed or left, for a reader of this key.
    if (!set(key("report", replica_), report)) return false;
    if (!alarm.empty() && set_once(prefix_ + "/any_failed", alarm).empty()) return false;
    if (is_parting && !set(prefix_ + "/any_left", std::to_string(replica_))) return false;
    lock.lock();
    if (alarm_ == alarm) alarm_.clear();
    if (is_parting) is_parting_ = false;
    num_sent_ = number;
    return num_sent_ == num_said_;
}

void Board::report_failure(const std::string& cause, bool waited_in_vain) {
    say([&] {
        own_.is_here = true;
        own_.is_idle = false;
        own_.waited_in_vain = waited_in_vain;
        alarm_ = "replica " + std::to_string(replica_) + " reports: " + cause;
    });
}

void Board::report_departure(int64_t inner_step) {
    say([&] {
        own_.has_left = true;
        own_.inner_step = inner_step;
        is_parting_ = true;
    });
}

void Board::report_presence(bool is_idle) {
    say([&] {
        if (own_.is_here) return;
        own_.is_here = true;
        own_.is_idle = is_idle;
    });
}

void Board::report_reach(const std::vector<int64_t>& reached,
                         const std::vector<int64_t>& unreached) {
    say([&] {
        own_.has_tried = true;
        own_.reached = reached;
        own_.unreached = unreached;
    });
}

void Board::report_next_group(const std::vector<int64_t>& members) {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        if (own_.goes_on_with == members) return;
    }
    say([&] { own_.goes_on_with = members; });
}

bool Board::is_failed() { return has(prefix_ + "/any_failed"); }

std::string Board::first_failure() { return get(prefix_ + "/any_failed"); }

bool Board::is_left() { return has(prefix_ + "/any_left"); }

// Reads the reports of all members; returns whether every report is complete.
bool Board::hear_all() {
    find_reports();
    std::vector<std::string> keys;
    for (const int64_t member : known_) keys.push_back(key("report", member));
    std::vector<std::vector<uint8_t>> texts;
    if (!keys.empty()) ask([&] { texts = store_->multiGet(keys); });
    if (texts.size() != keys.size()) return false;
    auto text = texts.begin();
    for (const int64_t member : known_) reports_[member] = report_from_text(text_of(*text++));
    {
        // The own report is newer here than on the store.
        std::lock_guard<std::mutex> lock(mutex_);
        reports_[replica_] = own_;
    }
    bool is_complete = true;
    for (const int64_t member : members_) {
        const Report& report = reports_[member];  // inserted empty where there is none yet
        is_complete = is_complete && (report.has_left || (report.is_here && report.has_tried));
    }
    return is_complete;
}

// get() of a key that does not exist would wait for it.
void Board::find_reports() {
    std::vector<int64_t> unknown;
    std::vector<std::string> keys;
    for (const int64_t member : members_) {
        if (member == replica_ || known_.count(member)) continue;
        unknown.push_back(member);
        keys.push_back(key("report", member));
    }
    if (keys.empty()) return;
    bool are_all_there = false;
    if (!ask([&] { are_all_there = store_->check(keys); })) return;
    for (size_t i = 0; i < keys.size(); ++i) {
        if (are_all_there || has(keys[i])) known_.insert(unknown[i]);
    }
}

std::optional<Verdict> Board::agree(std::chrono::milliseconds spent) {
    using Clock = std::chrono::steady_clock;
    if (!store_) return std::nullopt;
    // A machine that stands still for a while costs one slice of the patience.
    const Clock::duration slice = patience_ / 10;
    Clock::duration left = patience_ - std::min(spent, patience_ / 2);
    std::chrono::milliseconds pause{5};
    bool is_told = is_sent();
    while (true) {
        const auto begin = Clock::now();
        is_answering_ = true;
        is_gone_ = false;
        if (!is_told && send()) {
            // Only now can the other members read of the failure, and answer.
            is_told = true;
            left = patience_;
        }
        if (auto verdict = read_verdict()) return verdict;
        const bool is_complete = hear_all();
        const bool is_over = left <= Clock::duration::zero();
        if (is_told && is_answering_ && (is_complete || is_over)) {
            if (auto verdict = propose(decide(reports_))) return verdict;
        }
        // A hanging store may go on soon.
        if (is_gone_ || (is_over && !is_answering_)) return std::nullopt;
        std::this_thread::sleep_for(pause);
        pause = std::min(2 * pause, std::chrono::milliseconds(40));
        left -= std::min<Clock::duration>(Clock::now() - begin, slice);
    }
}

bool Board::is_sent() {
    std::lock_guard<std::mutex> lock(mutex_);
    return num_sent_ == num_said_;
}

// A group that other members are in already, without this one, overrules a verdict that includes
// it.
std::optional<Verdict> Board::read_verdict() {
    std::optional<Verdict> verdict;
    if (has(prefix_ + "/verdict/0")) {
        const std::string text = get(prefix_ + "/verdict/0");
        if (!text.empty()) verdict = verdict_from_text(text);
    }
    if (verdict && !contains(verdict->survivors, replica_)) return verdict;
    const Successor next = successor();
    if (next.epoch < 0 || contains(next.members, replica_)) return verdict;
    Verdict left_out;
    for (const int64_t member : members_) {
        (contains(next.members, member) ? left_out.survivors : left_out.missing).push_back(member);
    }
    left_out.left_out = left_out.missing;
    return left_out;
}

std::optional<Verdict> Board::propose(const Verdict& verdict) {
    const std::string decided = set_once(prefix_ + "/verdict/0", to_text(verdict));
    if (decided.empty()) return std::nullopt;
    return verdict_from_text(decided);
}

Successor Board::successor() {
    Successor next;
    if (!has(prefix_ + "/next")) return next;
    const auto numbers = numbers_in(get(prefix_ + "/next"));
    if (numbers.empty()) return next;
    next.epoch = numbers.front();
    next.members.assign(numbers.begin() + 1, numbers.end());
    return next;
}

}  // namespace diloco
