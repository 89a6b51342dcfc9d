#include "exchange/link/copies.h"

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

// The part of the bytes sent that copies have while rounds send.
constexpr double kShare = 0.05;
constexpr double kMostCredit = 16 * kCopyBytes;
// So long after its last byte a round counts as sending: between two of its messages; and while a
// message waits for the kernel to take more. A peer that reads nothing for longer holds no copy up.
constexpr milliseconds kPause{50}, kStall{500};

}  // namespace

bool CopyShare::is_busy(Clock::time_point now) const {
    return now - sent_at_ < (waits_ ? kStall : kPause);
}

void CopyShare::count_round(uint64_t num_bytes, bool earns, Clock::time_point now) {
    if (num_bytes == 0) return;
    if (!is_busy(now)) credit_ = 0;
    sent_at_ = now;
    if (!earns) return;
    const double earned = static_cast<double>(num_bytes) * kShare / (1 - kShare);
    credit_ = std::min(credit_ + earned, kMostCredit);
}

void CopyShare::count_copies(uint64_t num_bytes, Clock::time_point now) {
    // Bytes that leave while no round sends cost nothing.
    if (is_busy(now)) credit_ = std::max(credit_ - static_cast<double>(num_bytes), -kMostCredit);
}

bool CopyShare::is_open(bool waits, Clock::time_point now) {
    waits_ = waits;
    return !is_busy(now) || credit_ > 0;
}

void Request::answer(std::vector<uint8_t> head, Body body) const {
    const std::shared_ptr<Link> owner = link.lock();
    if (owner) owner->answer(*this, std::move(head), std::move(body));
}

}  // namespace link

// ------------------------------------------------------------------------------- who answers

void Link::serve(const std::string& service, const std::shared_ptr<link::Responder>& responder) {
    check_process();
    const Lock lock(mutex_);
    if (responder) {
        responders_[link::hash_of(service)] = responder;
    } else {
        responders_.erase(link::hash_of(service));
    }
}

void Link::on_request(const ConnectionPtr& connection, const Frame& frame, const uint8_t* payload) {
    if (connection->num_requests >= link::kMostRequests) {
        throw ProtocolError("more than " + std::to_string(link::kMostRequests) +
                            " requests that are open");
    }
    ++connection->num_requests;
    connection->peer->idle_since = Clock::now();
    link::Request request;
    request.link = weak_from_this();
    request.connection = connection;
    request.connection_id = connection->id;
    request.ticket = frame.ticket;
    request.bytes.assign(payload, payload + frame.length);
    const auto found = responders_.find(frame.token);
    const auto responder = found == responders_.end() ? nullptr : found->second.lock();
    if (responder) {
        responder->take(std::move(request));
    } else {
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
    connection->control.push_back(std::move(out));
    if (body.num_bytes == 0) {
        --connection->num_requests;
    } else {
        auto message = std::make_shared<link::Message>();
        message->is_send = true;
        // The link only reads what it sends.
        message->data = const_cast<uint8_t*>(body.data);
        message->num_bytes = body.num_bytes;
        message->ticket = ticket;
        message->owner = std::move(body.owner);
        connection->copies.push_back(std::move(message));
    }
    mark_ready(connection);
}

// Whether copies may leave now.
bool Link::may_copy(Clock::time_point now) {
    const bool waits = std::any_of(connections_.begin(), connections_.end(),
                                   [](const auto& entry) { return !entry.second->bulk.empty(); });
    return share_.is_open(waits, now);
}

// Looks again at connections whose copies had to wait.
void Link::resume_copies(Clock::time_point now) {
    is_copying_ = false;
    for (const auto& [id, connection] : connections_) {
        if (connection->copies.empty() || connection->state != State::kOpen) continue;
        is_copying_ = true;
        if (connection->can_write && may_copy(now)) mark_ready(connection);
    }
}

// ---------------------------------------------------------------------------------- who asks

std::vector<std::string> Link::reach(const std::string& service,
                                     const std::vector<link::Place>& peers) {
    check_process();
    std::vector<std::string> troubles(peers.size());
    std::vector<link::PeerId> ids;
    std::vector<size_t> missing;
    {
        Lock lock(mutex_);
        for (size_t i = 0; i < peers.size(); ++i) {
            ids.push_back(peer_id_of(i, peers[i]));
            const PeerPtr peer = peer_of(ids.back(), "the process at " + peers[i].address);
            peer->idle_since = Clock::now();
            if (peer->lanes.empty()) peer->lanes.resize(1);
            if (!way_to(*peer) && !peer->lanes[0].dial) missing.push_back(i);
        }
        std::set<link::PeerId> wanted(ids.begin(), ids.end());
        const uint64_t hash = link::hash_of(service);
        const auto former = std::exchange(reached_[hash], std::move(wanted));
        if (ids.empty()) {
            reached_.erase(hash);
            replies_.erase(hash);
        }
        for (const link::PeerId& id : former) {
            const auto found = peers_.find(id);
            if (found == peers_.end() || is_reached(id)) continue;
            stop_dial(lock, found->second->lanes[0]);
        }
    }
    // Without the mutex: a name server may take its time.
    std::vector<std::shared_ptr<link::Dial>> dials;
    for (const size_t i : missing) {
        const bool is_relayed = peers[i].address.empty();
        const std::string& dialled = is_relayed ? peers[i].relay : peers[i].address;
        const auto place = split_place(dialled);
        auto dial = std::make_shared<link::Dial>();
        if (place) dial->addresses = addresses_of(*place);
        if (dial->addresses.empty()) {
            troubles[i] = dialled.empty() ? "it has no address that others can dial"
                                          : "its address " + dialled + " is not known here";
            continue;
        }
        dial->target = *place;
        dial->is_relayed = is_relayed;
        dial->share = limits_.greeting;
        dials.push_back(dial);
        dials.back()->lane = 0;
        dial->peer = std::make_shared<link::Peer>();
        dial->peer->id = ids[i];
    }
    const Lock lock(mutex_);
    for (const auto& dial : dials) {
        dial->peer = peer_of(dial->peer->id, "");
        link::Lane& lane = dial->peer->lanes[0];
        if (is_closing_ || way_to(*dial->peer) || lane.dial) continue;
        lane.dial = dial;
        dials_.push_back(dial);
        wake();
    }
    for (size_t i = 0; i < peers.size(); ++i) {
        const PeerPtr peer = peer_of(ids[i], "");
        const auto dial = peer->lanes[0].dial;
        if (!way_to(*peer) && troubles[i].empty()) troubles[i] = dial ? trouble_of(*dial) : "";
    }
    return troubles;
}

// Whether anybody in this process wants a way to the peer.
bool Link::is_reached(const link::PeerId& id) const {
    return std::any_of(reached_.begin(), reached_.end(),
                       [&](const auto& entry) { return entry.second.count(id) > 0; });
}

// The connection over which this process asks a peer; null without one.
ConnectionPtr Link::way_to(const link::Peer& peer) {
    if (peer.lanes.empty()) return nullptr;
    const link::Lane& lane = peer.lanes[0];
    return lane.own ? lane.own : lane.theirs;
}

uint32_t Link::ask(const link::Place& peer, const std::string& service,
                   const std::vector<uint8_t>& request, uint64_t most_bytes) {
    check_process();
    if (request.size() > link::kMostHeadBytes) {
        throw std::invalid_argument("a request has at most " +
                                    std::to_string(link::kMostHeadBytes) + " bytes");
    }
    Lock lock(mutex_);
    const auto known = peers_.find(peer_id_of(0, peer));
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
    out.frame.length = static_cast<uint32_t>(request.size());
    out.frame.total = most_bytes;
    out.copy = request;
    connection->control.push_back(std::move(out));
    connection->has_carried = true;
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

void Link::on_answer(const ConnectionPtr& connection, const Frame& frame, const uint8_t* payload) {
    Inquiry* const inquiry = inquiry_of(connection, frame);
    if (!inquiry) return;
    if (inquiry->target || frame.total > inquiry->most_bytes) {
        throw ProtocolError("an answer that nobody has asked for");
    }
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

// The connection has ended: nothing more comes of what was asked over it.
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
