#include "exchange/board.h"

#include <thread>
#include <utility>

namespace diloco {
namespace {

std::vector<uint8_t> bytes_of(const std::string& text) { return {text.begin(), text.end()}; }

}  // namespace

Board::Board(c10::intrusive_ptr<c10d::Store> store, std::string prefix, int64_t replica,
             std::vector<int64_t> members)
    : store_(std::move(store)),
      prefix_(std::move(prefix)),
      replica_(replica),
      members_(std::move(members)) {}

std::string Board::key(const char* what, int64_t replica) const {
    return prefix_ + "/" + what + "/" + std::to_string(replica);
}

bool Board::has(const std::string& key) {
    if (!store_) return false;
    try {
        return store_->check({key});
    } catch (const std::exception&) {
        return false;
    }
}

void Board::set(const std::string& key, const std::string& value) {
    if (!store_) return;
    try {
        store_->set(key, bytes_of(value));
    } catch (const std::exception&) {
        // The store died with its host: peers will see the broken connections instead.
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

RollCall Board::call_roll(std::chrono::milliseconds patience) {
    const auto deadline = std::chrono::steady_clock::now() + patience;
    while (true) {
        RollCall roll;
        for (const int64_t member : members_) {
            if (member == replica_ || has(key("failed", member)) || has(key("left", member))) {
                continue;
            }
            (has(key("present", member)) ? roll.idle : roll.silent).push_back(member);
        }
        if (roll.silent.empty() || std::chrono::steady_clock::now() >= deadline) return roll;
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
}

}  // namespace diloco
