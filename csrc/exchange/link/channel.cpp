#include "exchange/link/channel.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <utility>

namespace diloco::link {
namespace {

bool is_eager(const Message& message) { return message.num_bytes <= kEagerBytes; }

uint64_t key_of(const Frame& frame) { return uint64_t{frame.number} << 32 | frame.tag; }

// Removes a message from the queue of messages that have the same key (group number and tag).
template <class Waiting>
void erase(Waiting& waiting, const MessagePtr& message) {
    const auto [first, last] = waiting.equal_range(message->key());
    for (auto it = first; it != last; ++it) {
        if (it->second == message) {
            waiting.erase(it);
            return;
        }
    }
}

void erase(std::deque<MessagePtr>& queue, const MessagePtr& message) {
    queue.erase(std::remove(queue.begin(), queue.end(), message), queue.end());
}

// The first entry with the key, or end().
template <class Waiting>
auto first_of(Waiting& waiting, uint64_t key) {
    const auto it = waiting.lower_bound(key);
    return it != waiting.end() && it->first == key ? it : waiting.end();
}

std::string too_many(const char* what) {
    return "more than " + std::to_string(kMostEarly) + " " + what + " that nobody expects";
}

}  // namespace

void Channel::forget() {
    joined.clear();
    told.clear();
    num_lanes = 0;
}

bool Channel::has_lost(const std::vector<End>& ends) const {
    const auto num_lanes_used = static_cast<int>(own_lanes > 0 ? own_lanes : kMostLanes);
    return std::any_of(ends.begin(), ends.end(), [&](const End& end) {
        return end.lane < num_lanes_used && since < end.when;
    });
}

void Channel::forget_group(int number) {
    const auto first = early_.lower_bound(uint64_t(number) << 32);
    const auto last = early_.lower_bound(uint64_t(number + 1) << 32);
    const auto num_forgotten = std::distance(first, last);
    early_.erase(first, last);
    for (auto i = num_forgotten; i > 0; --i) take_eager();
}

void Channel::put(FrameKind kind, int number, uint32_t tag, uint32_t ticket, uint64_t offset,
                  uint64_t total) {
    Connection* connection = peer.lanes[static_cast<size_t>(number / 2)].chosen.get();
    if (connection == nullptr) return;
    OutFrame out;
    out.frame.kind = static_cast<uint8_t>(kind);
    out.frame.number = static_cast<uint16_t>(number);
    out.frame.token = token;
    out.frame.tag = tag;
    out.frame.ticket = ticket;
    out.frame.offset = offset;
    out.frame.total = total;
    connection->control.push_back(std::move(out));
}

void Channel::put_join(int lane, int num_lanes, bool wants_answer) {
    put(FrameKind::kJoin, 2 * lane, static_cast<uint32_t>(lane), 0, wants_answer ? 1 : 0,
        static_cast<uint64_t>(num_lanes));
}

void Channel::answer_join(int lane) {
    const Connection* connection = peer.lanes[static_cast<size_t>(lane)].chosen.get();
    // A peer that asks again and again without reading the answers gets no more of them.
    if (connection == nullptr || connection->control.size() >= kMostEarly) return;
    if (dead.empty()) return put_join(lane, own_lanes, false);
    put(FrameKind::kEnd, 2 * lane, 0, 0, 0, 0);
}

std::string Channel::obstacle(int number) const {
    if (!dead.empty()) return dead;
    if (ended.count(number) > 0) {
        return closed_by_peer() + " has closed the group";
    }
    return "";
}

std::string Channel::sizes_differ(const Message& message, uint64_t theirs) const {
    const bool sends = message.is_send;
    return "this process " + std::string(sends ? "sends " : "expects ") +
           std::to_string(message.num_bytes) + " bytes with tag " + std::to_string(message.tag) +
           ", and " + peer.name + (sends ? " expects " : " sends ") + std::to_string(theirs) +
           " bytes";
}

// ------------------------------------------------------------------------------------- sends

void Channel::post_send(const MessagePtr& message) {
    unfinished_.emplace(message.get(), message);
    const std::string obstacle = this->obstacle(message->number);
    if (!obstacle.empty()) {
        finish(message, obstacle);
    } else if (is_eager(*message)) {
        if (num_eager_ < kMostEarly) {
            send_eager(message);
        } else {
            held_.push_back(message);
        }
    } else if (const auto it = first_of(grants_, message->key()); it != grants_.end()) {
        const Grant grant = it->second;
        grants_.erase(it);
        begin(message, grant);
    } else {
        sends_.emplace(message->key(), message);
    }
}

void Channel::send_eager(const MessagePtr& message) {
    ++num_eager_;
    Connection* connection = peer.lanes[static_cast<size_t>(message->number / 2)].chosen.get();
    if (connection == nullptr) return finish(message, closed_by_peer());
    OutFrame out;
    out.frame.kind = static_cast<uint8_t>(FrameKind::kEager);
    out.frame.number = message->number;
    out.frame.length = static_cast<uint32_t>(message->num_bytes);
    out.frame.token = token;
    out.frame.tag = message->tag;
    out.frame.total = message->num_bytes;
    out.copy.assign(message->data, message->data + message->num_bytes);
    out.message = message;
    connection->control.push_back(std::move(out));
}

void Channel::begin(const MessagePtr& send, Grant grant) {
    if (grant.num_bytes != send->num_bytes) return refuse(send, grant.ticket, grant.num_bytes);
    send->ticket = grant.ticket;
    Connection* connection = peer.lanes[static_cast<size_t>(send->number / 2)].chosen.get();
    if (connection == nullptr) return finish(send, closed_by_peer());
    connection->bulk.push_back(send);
}

void Channel::on_grant(const Frame& frame) {
    const auto it = first_of(sends_, key_of(frame));
    if (it == sends_.end()) {
        if (grants_.size() >= kMostEarly) throw ProtocolError(too_many("grants"));
        grants_.emplace(key_of(frame), Grant{frame.ticket, frame.total});
        return;
    }
    const MessagePtr send = it->second;
    sends_.erase(it);
    begin(send, {frame.ticket, frame.total});
}

void Channel::on_credit(const Frame& frame) {
    if (frame.total > num_eager_) throw ProtocolError("a credit for messages that were not sent");
    num_eager_ -= frame.total;
    while (!held_.empty() && num_eager_ < kMostEarly) {
        const MessagePtr message = held_.front();
        held_.pop_front();
        send_eager(message);
    }
}

void Channel::offer(const std::set<const Connection*>& busy) {
    for (auto it = sends_.begin(); it != sends_.end(); it = sends_.upper_bound(it->first)) {
        const Message& send = *it->second;
        const Connection* connection =
            peer.lanes[static_cast<size_t>(send.number / 2)].chosen.get();
        if (busy.count(connection) > 0) continue;
        put(FrameKind::kOffer, send.number, send.tag, 0, 0, send.num_bytes);
    }
}

// ---------------------------------------------------------------------------------- receives

void Channel::post_recv(const MessagePtr& message) {
    unfinished_.emplace(message.get(), message);
    if (const auto it = first_of(early_, message->key()); it != early_.end()) {
        const std::vector<uint8_t> bytes = std::move(it->second);
        early_.erase(it);
        if (bytes.size() != message->num_bytes) {
            finish(message, sizes_differ(*message, bytes.size()));
        } else {
            std::copy(bytes.begin(), bytes.end(), message->data);
            message->moved = bytes.size();
            finish(message, "");
        }
        return take_eager();
    }
    const std::string obstacle = this->obstacle(message->number);
    if (!obstacle.empty()) return finish(message, obstacle);
    recvs_.emplace(message->key(), message);
    if (is_eager(*message)) return;
    if (untouched_.size() < kMostEarly) {
        grant(message);
    } else {
        ungranted_.push_back(message);
    }
}

void Channel::grant(const MessagePtr& recv) {
    recv->ticket = ++last_ticket_;
    granted_.emplace(recv->ticket, recv);
    untouched_.insert(recv->ticket);
    put(FrameKind::kGrant, recv->number, recv->tag, recv->ticket, 0, recv->num_bytes);
}

void Channel::grant_next() {
    while (!ungranted_.empty() && untouched_.size() < kMostEarly) {
        const MessagePtr recv = ungranted_.front();
        ungranted_.pop_front();
        grant(recv);
    }
}

void Channel::take_eager() {
    ++num_taken_;
    give_credit();
}

// Sends the credit for received eager messages, not for each one alone: the fuller the store of
// early messages is, the fewer of them are collected first.
void Channel::give_credit() {
    if (num_taken_ == 0 || 4 * num_taken_ < kMostEarly - early_.size()) return;
    put(FrameKind::kCredit, 0, 0, 0, 0, std::exchange(num_taken_, 0));
}

void Channel::on_eager(const Frame& frame, const uint8_t* bytes) {
    const auto it = first_of(recvs_, key_of(frame));
    if (it == recvs_.end()) {
        if (early_.size() >= kMostEarly) throw ProtocolError(too_many("messages"));
        early_.emplace(key_of(frame), std::vector<uint8_t>(bytes, bytes + frame.length));
        return give_credit();
    }
    const MessagePtr recv = it->second;
    if (recv->num_bytes != frame.length) {
        finish(recv, sizes_differ(*recv, frame.length));
    } else {
        std::copy(bytes, bytes + frame.length, recv->data);
        recv->moved = frame.length;
        finish(recv, "");
    }
    take_eager();
}

// The peer's send has waited for a grant. Usually the grant is on its way; but a posted receive of
// at most kEagerBytes never sends a grant, so different sizes must be noticed here.
void Channel::on_offer(const Frame& frame) {
    const auto it = first_of(recvs_, key_of(frame));
    if (it == recvs_.end() || it->second->num_bytes == frame.total) return;
    const MessagePtr recv = it->second;
    refuse(recv, 0, frame.total);
}

// Fails a message because its size differs from the peer's, and tells the peer: with a ticket the
// peer's receive of that ticket fails, without a ticket the peer's send of this tag.
void Channel::refuse(const MessagePtr& message, uint32_t ticket, uint64_t theirs) {
    put(FrameKind::kRefuse, message->number, message->tag, ticket, 0, message->num_bytes);
    finish(message, sizes_differ(*message, theirs));
}

void Channel::on_refuse(const Frame& frame) {
    MessagePtr message;
    if (frame.ticket == 0) {
        const auto it = first_of(sends_, key_of(frame));
        if (it != sends_.end()) message = it->second;
    } else {
        const auto it = granted_.find(frame.ticket);
        if (it != granted_.end()) message = it->second;
        untouched_.erase(frame.ticket);
        grant_next();
    }
    if (message && message->moved == 0 && !message->is_arriving)
        finish(message, sizes_differ(*message, frame.total));
}

MessagePtr Channel::on_data(const Frame& frame) {
    const auto it = granted_.find(frame.ticket);
    if (untouched_.erase(frame.ticket) > 0) grant_next();
    if (it == granted_.end() || it->second->is_cancelled) return nullptr;
    const MessagePtr recv = it->second;
    if (frame.offset != recv->moved || frame.total != recv->num_bytes ||
        frame.length > frame.total - frame.offset) {
        throw ProtocolError("a fragment that does not fit its message");
    }
    if (std::exchange(recv->is_arriving, true)) {
        throw ProtocolError("two fragments of a message at the same time");
    }
    if (frame.offset == 0) erase(recvs_, recv);
    return recv;
}

void Channel::on_data_end(const MessagePtr& message) {
    message->is_arriving = false;
    if (message->moved == message->num_bytes && !message->is_done) finish(message, "");
}

// --------------------------------------------------------------------------------------- both

void Channel::detach(const MessagePtr& message) {
    if (message->is_send) {
        erase(sends_, message);
        erase(held_, message);
        return;
    }
    erase(recvs_, message);
    erase(ungranted_, message);
    // The ticket stays in untouched_, because the peer has the grant and may still use it.
    const auto it = granted_.find(message->ticket);
    if (it != granted_.end() && it->second == message) granted_.erase(it);
}

void Channel::finish(const MessagePtr& message, const std::string& error) {
    if (message->is_done) return;
    detach(message);
    message->is_done = true;
    message->error = error;
    message->channel = nullptr;
    unfinished_.erase(message.get());
    message->changed.notify_all();
}

std::vector<MessagePtr> Channel::unfinished(int number) const {
    std::vector<MessagePtr> found;
    for (const auto& [raw, message] : unfinished_) {
        if (number < 0 || message->number == number) found.push_back(message);
    }
    return found;
}

}  // namespace diloco::link
