#include "exchange/link/copies.h"

#include <linux/sockios.h>
#include <sys/ioctl.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "exchange/link/link.h"

namespace diloco {

using link::ConnectionPtr;
using link::Frame;
using link::FrameKind;
using link::Inquiry;
using link::ProtocolError;
using link::Reply;
using std::chrono::milliseconds;
using State = link::Connection::State;

namespace link {
namespace {

// The copies' share of all bytes while rounds are being sent.
constexpr double kShare = 0.05;
constexpr double kMostCredit = 16 * kCopyBytes;
// If no byte of a round could be sent for this time, copies need not wait for the round.
constexpr milliseconds kStall{500};

}  // namespace

bool CopyShare::is_busy(Clock::time_point now) const {
    return has_rounds_ && now - sent_at_ < kStall;
}

void CopyShare::count_round(uint64_t num_bytes, bool earns, Clock::time_point now) {
    if (num_bytes == 0) return;
    sent_at_ = now;
    if (!earns) return;
    const double earned = static_cast<double>(num_bytes) * kShare / (1 - kShare);
    credit_ = std::min(credit_ + earned, kMostCredit);
}

void CopyShare::count_copies(uint64_t num_bytes) {
    credit_ = std::max(credit_ - static_cast<double>(num_bytes), -kMostCredit);
}

bool CopyShare::is_open(bool has_rounds, Clock::time_point now) {
    has_rounds_ = has_rounds;
    return !is_busy(now) || credit_ > 0;
}

void Request::answer(std::vector<uint8_t> head, Body body) const {
    const std::shared_ptr<Link> owner = link.lock();
    if (owner) owner->answer(*this, std::move(head), std::move(body));
}

}  // namespace link

// ------------------------------------------------------------------------------- who answers

void Link::set_responder(const std::string& service,
                         const std::shared_ptr<link::Responder>& responder) {
    check_process();
    const Lock lock(mutex_);
    if (responder) {
        responders_[link::hash_of(service)] = responder;
    } else {
        responders_.erase(link::hash_of(service));
    }
}

void Link::on_request(const ConnectionPtr& connection, const Frame& frame, const uint8_t* payload) {
    if (++connection->num_requests > link::kMostRequests) {
        throw ProtocolError("more than " + std::to_string(link::kMostRequests) +
                            " requests that are open");
    }
    connection->peer->idle_since = Clock::now();
    link::Request request;
    request.link = weak_from_this();
    request.connection = connection;
    request.connection_id = connection->id;
    request.ticket = frame.ticket;
    request.bytes.assign(payload, payload + frame.length);
    const auto found = responders_.find(frame.token);
    const auto responder = found == responders_.end() ? nullptr : found->second.lock();
    if (!responder || !responder->take(std::move(request))) {
        put_answer(connection, frame.ticket, {}, {});
    }
}

void Link::answer(const link::Request& request, std::vector<uint8_t> head, link::Body body) {
    const ConnectionPtr connection = request.connection.lock();
    const Lock lock(mutex_);
    if (!connection || connection->state != State::kOpen) return;
    put_answer(connection, request.ticket, std::move(head), std::move(body));
}

void Link::put_answer(const ConnectionPtr& connection, uint32_t ticket, std::vector<uint8_t> head,
                      link::Body body) {
    link::OutFrame out;
    out.frame.kind = static_cast<uint8_t>(FrameKind::kAnswer);
    out.frame.ticket = ticket;
    out.frame.length = static_cast<uint32_t>(head.size());
    out.frame.total = body.num_bytes;
    out.copy = std::move(head);
    out.ends_request = body.num_bytes == 0;
    connection->control.push_back(std::move(out));
    if (body.num_bytes > 0) {
        auto message = std::make_shared<link::Message>();
        message->is_send = true;
        // A message for sending is only read, so the cast is safe.
        message->data = const_cast<uint8_t*>(body.data);
        message->num_bytes = body.num_bytes;
        message->ticket = ticket;
        message->owner = std::move(body.owner);
        connection->copies_like(*message).push_back(message);
    }
    mark_ready(connection);
}

// Whether fragments of copies may be sent now.
bool Link::may_copy(Clock::time_point now) {
    const auto has_round = [&](const auto& entry) {
        const link::Connection& it = *entry.second;
        int num_unheard = 0;
        return !it.bulk.empty() ||
               (now - it.round_at < link::kStall &&
                ioctl(it.fd.get(), SIOCOUTQ, &num_unheard) == 0 && num_unheard > 0);
    };
    return share_.is_open(std::any_of(connections_.begin(), connections_.end(), has_round), now);
}

// Resumes the connections on which copies wait, if copies may be sent now.
void Link::resume_copies(Clock::time_point now) {
    is_copying_ = false;
    for (const auto& [id, connection] : connections_) {
        if (!connection->has_copies() || connection->state != State::kOpen) continue;
        is_copying_ = true;
        if (connection->can_write && may_copy(now)) mark_ready(connection);
    }
}

// ---------------------------------------------------------------------------------- who asks

std::vector<std::string> Link::reach(const std::string& service,
                                     const std::vector<link::Place>& peers) {
    check_process();
    const size_t size = peers.size();
    std::vector<std::string> troubles(size);
    std::vector<link::PeerId> ids(size);
    std::set<link::PeerId> wanted;
    for (size_t i = 0; i < size; ++i) {
        try {
            wanted.insert(ids[i] = peer_id_of("that process", peers[i]));
        } catch (const std::invalid_argument& error) {
            troubles[i] = error.what();
        }
    }
    std::vector<size_t> missing;
    {
        Lock lock(mutex_);
        for (size_t i = 0; i < size; ++i) {
            if (!troubles[i].empty()) continue;
            const link::Peer& peer = *reached_peer(ids[i], peers[i].address);
            // A peer that can be dialled directly is dialled even if its own connection is there:
            // only a dial shows later that the peer's host refuses, and so that the peer has ended.
            const bool is_direct = !peers[i].address.empty() && !proxy_;
            const bool is_known = peer.lanes[0].own || peer.life.address() || !is_direct;
            const auto& dial = peer.lanes[0].dial;
            if ((!way_to(peer) || !is_known) && (!dial || dial->is_redial)) missing.push_back(i);
        }
        const uint64_t hash = link::hash_of(service);
        const auto former = std::exchange(reached_[hash], std::move(wanted));
        if (size == 0) reached_.erase(hash);
        for (const link::PeerId& id : former) {
            const auto found = peers_.find(id);
            if (found == peers_.end() || is_reached(id)) continue;
            link::Lane& lane = found->second->lanes[0];
            if (lane.dial && lane.dial->is_for_copies) stop_dial(lock, lane);
        }
    }
    for (const size_t i : missing) {
        const bool is_relayed = peers[i].address.empty();
        const std::string& dialled = is_relayed ? peers[i].relay : peers[i].address;
        auto dial = std::make_shared<link::Dial>();
        if (const auto place = split_place(dialled)) {
            dial->addresses = known_addresses(ids[i], *place);
            dial->target = *place;
        }
        if (dial->addresses.empty()) {
            troubles[i] = dialled.empty() ? "it has no address that others can dial"
                                          : "its address " + dialled + " is not known here";
            continue;
        }
        dial->is_relayed = is_relayed;
        dial->is_for_copies = true;
        dial->share = limits_.greeting;
        Lock lock(mutex_);
        dial->peer = reached_peer(ids[i], peers[i].address);
        link::Lane& lane = dial->peer->lanes[0];
        if (lane.dial && lane.dial->is_redial) stop_dial(lock, lane);
        if (is_closing_ || lane.own || lane.dial) continue;
        lane.dial = dial;
        dials_.push_back(dial);
        wake();
    }
    const Lock lock(mutex_);
    for (size_t i = 0; i < size; ++i) {
        if (!troubles[i].empty()) continue;
        const link::Peer& peer = *reached_peer(ids[i], peers[i].address);
        const auto& dial = peer.lanes[0].dial;
        if (!way_to(peer)) troubles[i] = dial ? trouble_of(*dial) : "the link was closed";
    }
    return troubles;
}

// The peer of this id, with at least one lane.
Link::PeerPtr Link::reached_peer(const link::PeerId& id, const std::string& address) {
    PeerPtr peer = peer_of(id, "the process at " + address);
    peer->idle_since = Clock::now();
    if (peer->lanes.empty()) peer->lanes.resize(1);
    return peer;
}

// Looks up a target without holding the mutex, since a name server may be slow. An unknown host is
// looked up again only after a pause: ten times as long as the look-up, and at least a second.
std::vector<Address> Link::known_addresses(const link::PeerId& id,
                                           const std::pair<std::string, std::string>& target) {
    constexpr milliseconds kLeastPause{1000};
    constexpr int kPauses = 10;
    const auto begin = Clock::now();
    {
        const Lock lock(mutex_);
        const auto unknown = unknown_hosts_.find(id);
        if (unknown != unknown_hosts_.end() && begin < unknown->second) return {};
    }
    std::vector<Address> found = addresses_of(target);
    const auto end = Clock::now();
    const Lock lock(mutex_);
    unknown_hosts_.erase(id);
    if (found.empty()) {
        const auto pause = std::max<Clock::duration>(kLeastPause, kPauses * (end - begin));
        unknown_hosts_[id] = end + pause;
    }
    return found;
}

// Whether the peer is in a list that reach() has been given.
bool Link::is_reached(const link::PeerId& id) const {
    return std::any_of(reached_.begin(), reached_.end(),
                       [&](const auto& entry) { return entry.second.count(id) > 0; });
}

// The connection over which this process sends requests and messages to a peer, or null.
ConnectionPtr Link::way_to(const link::Peer& peer) {
    if (peer.lanes.empty()) return nullptr;
    const link::Lane& lane = peer.lanes[0];
    return lane.own ? lane.own : lane.theirs;
}

uint32_t Link::request(const link::Place& peer, const std::string& service,
                       const std::vector<uint8_t>& bytes, uint64_t most_bytes) {
    check_process();
    if (bytes.size() > link::kMostHeadBytes) {
        throw std::invalid_argument("a request has at most " +
                                    std::to_string(link::kMostHeadBytes) + " bytes");
    }
    const link::PeerId id = peer_id_of("that process", peer);
    Lock lock(mutex_);
    const auto known = peers_.find(id);
    const ConnectionPtr connection = known == peers_.end() ? nullptr : way_to(*known->second);
    if (!connection || connection->state != State::kOpen || is_closing_) return 0;
    known->second->idle_since = Clock::now();
    const uint32_t ticket = ++last_ticket_;
    Inquiry& inquiry = inquiries_[ticket];
    inquiry.service = link::hash_of(service);
    inquiry.connection_id = connection->id;
    inquiry.most_bytes = most_bytes;
    inquiry.reply.ticket = ticket;
    link::OutFrame out;
    out.frame.kind = static_cast<uint8_t>(FrameKind::kRequest);
    out.frame.token = inquiry.service;
    out.frame.ticket = ticket;
    out.frame.length = static_cast<uint32_t>(bytes.size());
    out.copy = bytes;
    connection->control.push_back(std::move(out));
    flush(lock, connection, false);
    return ticket;
}

std::vector<Reply> Link::replies(const std::string& service, milliseconds timeout) {
    check_process();
    const uint64_t hash = link::hash_of(service);
    Lock lock(mutex_);
    replied_.wait_for(lock, timeout, [&] { return is_closing_ || !replies_[hash].empty(); });
    return std::exchange(replies_[hash], {});
}

uint64_t Link::arrived(const std::vector<uint32_t>& tickets) const {
    check_process();
    const Lock lock(mutex_);
    uint64_t num_bytes = 0;
    for (const uint32_t ticket : tickets) {
        const auto found = inquiries_.find(ticket);
        if (found != inquiries_.end() && found->second.target) {
            num_bytes += found->second.target->moved;
        }
    }
    return num_bytes;
}

void Link::forget(const std::vector<uint32_t>& tickets) {
    if (!is_own_process()) return;
    const Lock lock(mutex_);
    for (const uint32_t ticket : tickets) inquiries_.erase(ticket);
}

Inquiry* Link::inquiry_of(const ConnectionPtr& connection, const Frame& frame) {
    const auto found = inquiries_.find(frame.ticket);
    if (found == inquiries_.end() || found->second.connection_id != connection->id) return nullptr;
    connection->peer->idle_since = Clock::now();
    return &found->second;
}

void Link::on_reply(const ConnectionPtr& connection, const Frame& frame, const uint8_t* payload) {
    Inquiry* const inquiry = inquiry_of(connection, frame);
    if (!inquiry) return;
    if (inquiry->target) throw ProtocolError("two answers to one request");
    if (frame.total > inquiry->most_bytes) return end_inquiry(frame.ticket);
    inquiry->reply.head.assign(payload, payload + frame.length);
    if (frame.total == 0) return end_inquiry(frame.ticket);
    const std::shared_ptr<uint8_t[]> bytes(new uint8_t[frame.total]);
    inquiry->reply.body = {bytes, bytes.get(), frame.total};
    inquiry->target = std::make_shared<link::Message>();
    inquiry->target->data = bytes.get();
    inquiry->target->num_bytes = frame.total;
    inquiry->target->ticket = frame.ticket;
    inquiry->target->owner = bytes;
}

void Link::on_copy(const ConnectionPtr& connection, const Frame& frame) {
    connection->left = frame.length;
    const Inquiry* const inquiry = inquiry_of(connection, frame);
    if (!inquiry) return;
    const link::MessagePtr& target = inquiry->target;
    if (!target || frame.offset != target->moved || frame.total != target->num_bytes ||
        frame.length > frame.total - frame.offset) {
        throw ProtocolError("a fragment that does not fit its answer");
    }
    connection->target = target;
}

void Link::end_inquiry(uint32_t ticket) {
    const auto found = inquiries_.find(ticket);
    if (found == inquiries_.end()) return;
    replies_[found->second.service].push_back(std::move(found->second.reply));
    inquiries_.erase(found);
    replied_.notify_all();
}

// Answers the open requests of a connection that has ended with empty replies.
void Link::lose_inquiries(uint64_t connection_id) {
    for (auto it = inquiries_.begin(); it != inquiries_.end();) {
        if (it->second.connection_id != connection_id) {
            ++it;
            continue;
        }
        replies_[it->second.service].push_back({it->first, {}, {}});
        it = inquiries_.erase(it);
        replied_.notify_all();
    }
}

}  // namespace diloco
