#include "exchange/link/life.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <stdexcept>

#include "exchange/link/link.h"

namespace diloco {

using link::ConnectionPtr;
using link::Frame;
using link::FrameKind;
using link::PeerLife;
using std::chrono::milliseconds;
using State = link::Connection::State;

namespace link {
namespace {

constexpr milliseconds kMostStandstill{1000};
constexpr milliseconds kLeastSilence{1000};
constexpr milliseconds kApart{300};
constexpr int kPhaseBits = 8;
constexpr std::array<const char*, 7> kPhases{"",           "steps",   "exchange", "evaluation",
                                             "checkpoint", "copying", "cut off"};

double seconds_of(Clock::duration time) { return std::chrono::duration<double>(time).count(); }

bool is_equal(const Address& one, const Address& other) {
    return one.length == other.length && std::memcmp(&one.storage, &other.storage, one.length) == 0;
}

}  // namespace

const char* name_of(Phase phase) { return kPhases.at(static_cast<size_t>(phase)); }

Phase phase_of(const std::string& name) {
    const auto found = std::find(kPhases.begin(), kPhases.end(), name);
    if (found == kPhases.end()) throw std::invalid_argument("there is no phase \"" + name + "\"");
    return static_cast<Phase>(found - kPhases.begin());
}

Clock::duration OwnClock::at(Clock::time_point now) const {
    return passed_ +
           std::clamp<Clock::duration>(now - ticked_at_, Clock::duration::zero(), kMostStandstill);
}

void OwnClock::tick(Clock::time_point now) {
    passed_ = at(now);
    ticked_at_ = now;
}

void Life::hear(Clock::duration at) {
    heard_at_ = at;
    if (!moved_at_) moved_at_ = at;
    first_refusal_.reset();
    is_replaced_ = false;
}

void Life::hear_beat(const Frame& beat, Clock::duration at) {
    // Beats come over two connections, so an older beat may arrive after a newer one.
    if (static_cast<int32_t>(beat.ticket - last_beat_) <= 0) return;
    last_beat_ = beat.ticket;
    if (beat.offset != inner_step_ || beat.total != num_sent_) moved_at_ = at;
    inner_step_ = beat.offset;
    num_sent_ = beat.total;
    phase_ = beat.tag < kPhases.size() ? static_cast<Phase>(beat.tag) : Phase::kUnknown;
}

void Life::hear_round(uint64_t num_bytes, Clock::duration at) {
    num_heard_ += num_bytes;
    moved_at_ = at;
}

void Life::accept(const Address& address) {
    address_ = address;
    first_refusal_.reset();
    is_replaced_ = false;
}

void Life::take(const Address& address) {
    const bool is_same = address_ && is_equal(*address_, address);
    if (is_same && !is_replaced_) first_refusal_.reset();
}

void Life::refuse(const Address& address, Clock::time_point now) {
    if (!address_ || !is_equal(*address_, address)) return;
    last_refusal_ = now;
    if (!first_refusal_) first_refusal_ = now;
}

void Life::replace(const Address& address, Clock::time_point now) {
    refuse(address, now - kApart);
    refuse(address, now);
    is_replaced_ = first_refusal_.has_value();
}

PeerLife Life::facts(Clock::duration at) const {
    PeerLife facts;
    facts.inner_step = inner_step_;
    facts.phase = name_of(phase_);
    if (!heard_at_) return facts;
    facts.silent_s = seconds_of(at - *heard_at_);
    facts.still_s = seconds_of(at - *moved_at_);
    facts.is_refused = first_refusal_ && *last_refusal_ - *first_refusal_ >= kApart &&
                       at - *heard_at_ >= kLeastSilence;
    return facts;
}

}  // namespace link

// ----------------------------------------------------------------------------------- beats

void Link::set_progress(uint64_t inner_step, link::Phase phase) {
    progress_ = inner_step << link::kPhaseBits | static_cast<uint64_t>(phase);
}

std::vector<PeerLife> Link::life() const {
    check_process();
    const Lock lock(mutex_);
    const auto at = own_clock_.at(Clock::now());
    std::vector<PeerLife> found;
    for (const auto& [id, peer] : peers_) {
        if (!is_wanted(*peer)) continue;
        found.push_back(peer->life.facts(at));
        found.back().nonce = link::to_hex(id.first);
        found.back().is_connected = is_connected(*peer);
    }
    return found;
}

// Whether this process has a group with the peer, or names it in a list of reach().
bool Link::is_wanted(const link::Peer& peer) const {
    return peer.num_users > 0 || is_reached(peer.id);
}

void Link::beat(Lock& lock, Clock::time_point now) {
    own_clock_.tick(now);
    const uint64_t progress = progress_;
    Frame frame;
    frame.kind = static_cast<uint8_t>(FrameKind::kBeat);
    frame.ticket = ++num_beats_;
    frame.offset = progress >> link::kPhaseBits;
    frame.tag = static_cast<uint32_t>(progress & ((1 << link::kPhaseBits) - 1));
    std::vector<PeerPtr> unwanted;
    for (const auto& [id, peer] : peers_) {
        if (peer->lanes.empty()) continue;
        link::Lane& lane = peer->lanes[0];
        if (!is_wanted(*peer)) {
            if (lane.dial && lane.dial->is_for_copies) unwanted.push_back(peer);
            continue;
        }
        frame.total = peer->life.num_heard();
        for (const ConnectionPtr& connection : {lane.own, lane.theirs}) {
            if (!connection || connection->state != State::kOpen) continue;
            auto& control = connection->control;
            // A beat that is still waiting, because the peer does not read, is replaced.
            if (control.empty() || control.back().frame.kind != frame.kind) control.emplace_back();
            control.back().frame = frame;
            mark_ready(connection);
        }
        const bool may_redial = peer->life.address() && is_reached(id);
        if (!is_connected(*peer) && !lane.dial && may_redial) redial(peer);
    }
    for (const PeerPtr& peer : unwanted) stop_dial(lock, peer->lanes[0]);
}

// Redials a peer without a connection at the address where it was: if the peer's process has ended,
// its host refuses the connection.
void Link::redial(const PeerPtr& peer) {
    auto dial = std::make_shared<link::Dial>();
    dial->peer = peer;
    dial->addresses = {*peer->life.address()};
    dial->is_for_copies = dial->is_redial = true;
    dial->share = limits_.greeting;
    peer->lanes[0].dial = dial;
    dials_.push_back(dial);
}

// Whether the peer's own host answers this dial, and not a proxy or a relay.
bool Link::is_direct(const link::Dial& dial) const { return !proxy_ && !dial.is_relayed; }

// -------------------------------------------------------------------------------- messages

bool Link::tell(const std::string& nonce, const std::string& service,
                const std::vector<uint8_t>& bytes) {
    check_process();
    if (bytes.size() > link::kMostTellBytes) {
        throw std::invalid_argument("a message has at most " +
                                    std::to_string(link::kMostTellBytes) + " bytes, got " +
                                    std::to_string(bytes.size()));
    }
    const link::Nonce wanted = link::nonce_of(nonce);
    Lock lock(mutex_);
    PeerPtr peer;
    // On a link with keys, another process may claim the same nonce: prefer the peer that is in a
    // group or a reach() list of this process.
    for (auto it = peers_.lower_bound({wanted, {}}); it != peers_.end(); ++it) {
        if (it->first.first != wanted) break;
        if (!peer || is_wanted(*it->second)) peer = it->second;
    }
    const ConnectionPtr connection = peer ? way_to(*peer) : nullptr;
    if (!connection || connection->state != State::kOpen || is_closing_) return false;
    const uint64_t cost = bytes.size() + link::kTellCost;
    if (connection->told_bytes + cost > link::kMostToldBytes) return false;
    connection->told_bytes += cost;
    peer->idle_since = Clock::now();
    link::OutFrame out;
    out.frame.kind = static_cast<uint8_t>(FrameKind::kTell);
    out.frame.token = link::hash_of(service);
    out.frame.length = static_cast<uint32_t>(bytes.size());
    out.copy = bytes;
    connection->messages.push_back(std::move(out));
    flush(lock, connection, false);
    return true;
}

std::vector<std::pair<std::string, std::vector<uint8_t>>> Link::told(const std::string& service,
                                                                     milliseconds timeout) {
    check_process();
    const uint64_t hash = link::hash_of(service);
    std::vector<std::pair<std::string, std::vector<uint8_t>>> found;
    Lock lock(mutex_);
    const size_t& num_waiting = num_told_[hash];
    replied_.wait_for(lock, timeout, [&] { return is_closing_ || num_waiting > 0; });
    for (const auto& [id, peer] : peers_) {
        drop_told(*peer, [&, &id = id](link::Told& one) {
            if (one.service != hash) return false;
            found.emplace_back(link::to_hex(id.first), std::move(one.bytes));
            return true;
        });
    }
    return found;
}

// Removes the messages of a peer for which `wants` is true.
template <class Wants>
void Link::drop_told(link::Peer& peer, Wants wants) {
    const auto is_dropped = [&](link::Told& one) {
        const uint64_t cost = one.bytes.size() + link::kTellCost;
        if (!wants(one)) return false;
        peer.told_bytes -= cost;
        --num_told_[one.service];
        return true;
    };
    peer.told.erase(std::remove_if(peer.told.begin(), peer.told.end(), is_dropped),
                    peer.told.end());
}

void Link::forget_told(link::Peer& peer) {
    drop_told(peer, [](const link::Told&) { return true; });
}

void Link::on_tell(const ConnectionPtr& connection, const Frame& frame) {
    connection->left = frame.length;
    connection->peer->idle_since = Clock::now();
    // Drop the message if this program has never called told() for its service.
    if (num_told_.count(frame.token) == 0) {
        ++num_dropped_;
        return;
    }
    const auto bytes = std::make_shared<std::vector<uint8_t>>(frame.length);
    const auto target = std::make_shared<link::Message>();
    target->data = bytes->data();
    target->num_bytes = frame.length;
    target->token = frame.token;
    target->is_told = true;
    target->owner = bytes;
    connection->target = target;
    if (frame.length == 0) end_payload(connection);
}

// Stores a message for told(). If the peer's messages need more room than allowed, its oldest
// messages are dropped.
void Link::end_tell(link::Peer& peer, const link::Message& message) {
    const auto& bytes = *static_cast<const std::vector<uint8_t>*>(message.owner.get());
    peer.told.push_back({message.token, bytes});
    peer.told_bytes += bytes.size() + link::kTellCost;
    ++num_told_[message.token];
    const uint64_t most =
        is_wanted(peer) ? link::kMostToldBytes : link::kMostTellBytes + link::kTellCost;
    while (peer.told_bytes > most) {
        const link::Told& oldest = peer.told.front();
        peer.told_bytes -= oldest.bytes.size() + link::kTellCost;
        --num_told_[oldest.service];
        peer.told.pop_front();
        ++num_dropped_;
    }
    replied_.notify_all();
}

}  // namespace diloco
