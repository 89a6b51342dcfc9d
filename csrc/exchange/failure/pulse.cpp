#include "exchange/failure/pulse.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>
#include <utility>

namespace diloco {
namespace {

using std::chrono::milliseconds;

// The store serves one beat and one read of each waiting member in this time.
constexpr milliseconds kLongestPeriod{1000};
constexpr milliseconds kShortestPeriod{200};
constexpr int kBeatsWithinLimit = 8;

}  // namespace

Pulse::Pulse(c10::intrusive_ptr<c10d::Store> store, const std::string& prefix, int64_t replica,
             const std::vector<int64_t>& members, milliseconds limit)
    : store_(std::move(store)),
      own_key_(prefix + "/beat/" + std::to_string(replica)),
      limit_(limit),
      period_(std::clamp(limit / kBeatsWithinLimit, kShortestPeriod, kLongestPeriod)) {
    for (const int64_t member : members) {
        if (member == replica) continue;
        Peer peer;
        peer.replica = member;
        peer.key = prefix + "/beat/" + std::to_string(member);
        peers_.push_back(std::move(peer));
    }
}

void Pulse::beat() {
    const auto now = Clock::now();
    if (!store_ || (num_beats_ > 0 && now - last_beat_ < period_)) return;
    last_beat_ = now;
    const std::string value = std::to_string(++num_beats_);
    try {
        store_->set(own_key_, std::vector<uint8_t>(value.begin(), value.end()));
    } catch (const std::exception&) {
        is_answered_ = false;
        // A member that cannot read the store suspects no other member.
    }
}

void Pulse::look() {
    const auto now = Clock::now();
    if (!store_ || now - last_look_ < period_) return;
    // Time in which this process stood still and did not read is no silence of a peer.
    const auto passed = std::min<Clock::duration>(now - last_look_, 2 * period_);
    last_look_ = now;
    try {
        find_new_keys();
        read_counters();
    } catch (const std::exception&) {
        is_answered_ = false;
        return;
    }
    is_answered_ = true;
    for (Peer& peer : peers_) {
        peer.silent = peer.has_changed ? Clock::duration::zero() : peer.silent + passed;
    }
}

// get() of a key that does not exist would wait for it.
void Pulse::find_new_keys() {
    for (Peer& peer : peers_) {
        if (!peer.is_known) peer.is_known = store_->check({peer.key});
    }
}

void Pulse::read_counters() {
    std::vector<std::string> keys;
    for (Peer& peer : peers_) {
        peer.has_changed = false;
        if (peer.is_known) keys.push_back(peer.key);
    }
    if (keys.empty()) return;
    const auto values = store_->multiGet(keys);
    TORCH_CHECK(values.size() == keys.size(), "the store gave ", values.size(), " values for ",
                keys.size(), " keys");
    auto value = values.begin();
    for (Peer& peer : peers_) {
        if (!peer.is_known) continue;
        peer.has_changed = *value != peer.seen;
        peer.seen = *value++;
    }
}

void Pulse::forgive() {
    for (Peer& peer : peers_) peer.silent = Clock::duration::zero();
    last_look_ = Clock::now();
}

std::vector<int64_t> Pulse::suspects() const {
    std::vector<int64_t> found;
    for (const Peer& peer : peers_) {
        if (peer.silent >= limit_) found.push_back(peer.replica);
    }
    return found;
}

double Pulse::seconds_silent(int64_t replica) const {
    for (const Peer& peer : peers_) {
        if (peer.replica == replica) return std::chrono::duration<double>(peer.silent).count();
    }
    return 0.0;
}

}  // namespace diloco
