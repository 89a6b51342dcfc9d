#include "exchange/board.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "exchange/bounded_store.h"

namespace diloco {
namespace {

std::vector<uint8_t> bytes_of(const std::string& text) { return {text.begin(), text.end()}; }

}  // namespace

Board::Board(c10::intrusive_ptr<c10d::Store> store, std::chrono::milliseconds patience,
             std::string prefix, int64_t replica, std::vector<int64_t> members)
    : patience_(patience),
      prefix_(std::move(prefix)),
      replica_(replica),
      members_(std::move(members)) {
    if (!store) return;
    const auto bounded = c10::make_intrusive<BoundedStore>(std::move(store), patience);
    try {
        // A connection of our own: the user may wait for hours in the one that we were given.
        store_ = bounded->clone();
    } catch (const std::exception&) {
        store_ = bounded;
    }
}

std::string Board::key(const char* what, int64_t replica) const {
    return prefix_ + "/" + what + "/" + std::to_string(replica);
}

bool Board::has(const std::string& key) {
    if (!store_) return false;
    bool is_there = false;
    try {
        is_there = store_->check({key});
        is_answering_ = true;
    } catch (const std::exception&) {
        is_answering_ = false;
    }
    return is_there;
}

void Board::set(const std::string& key, const std::string& value) {
    if (!store_) return;
    try {
        store_->set(key, bytes_of(value));
    } catch (const std::exception&) {
        // The store's host died or hangs: peers will see the broken connections instead.
    }
}

void Board::report_failure(const std::string& text) {
    set(key("failed", replica_), text);
    set(prefix_ + "/any_failed", text);
}

void Board::report_departure(int64_t inner_step) {
    set(key("left", replica_), std::to_string(inner_step));
    set(prefix_ + "/any_left", std::to_string(replica_));
}

void Board::report_presence() {
    if (has_answered_) return;
    has_answered_ = true;
    set(key("present", replica_), "");
}

bool Board::is_failed() { return has(prefix_ + "/any_failed"); }

bool Board::is_left() { return has(prefix_ + "/any_left"); }

std::vector<Departure> Board::departures() {
    std::vector<Departure> gone;
    for (const int64_t member : members_) {
        if (member == replica_ || !has(key("left", member))) continue;
        try {
            const std::vector<uint8_t> text = store_->get(key("left", member));
            gone.push_back({member, std::stoll(std::string(text.begin(), text.end()))});
        } catch (const std::exception&) {
            gone.push_back({member, -1});
        }
    }
    return gone;
}

RollCall Board::call_roll() {
    using Clock = std::chrono::steady_clock;
    // A machine that stands still for a while costs one slice of the patience.
    const Clock::duration slice = patience_ / 10;
    Clock::duration left = patience_;
    while (true) {
        const auto begin = Clock::now();
        RollCall roll;
        for (const int64_t member : members_) {
            if (member == replica_ || has(key("failed", member)) || has(key("left", member))) {
                continue;
            }
            (has(key("present", member)) ? roll.idle : roll.silent).push_back(member);
        }
        roll.is_store_silent = !is_answering_;
        if (roll.is_store_silent || roll.silent.empty() || left <= Clock::duration::zero()) {
            return roll;
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        left -= std::min<Clock::duration>(Clock::now() - begin, slice);
    }
}

}  // namespace diloco
