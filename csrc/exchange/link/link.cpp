#include "exchange/link/link.h"

#include <sys/epoll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace diloco {

using link::Connection;
using link::Frame;
using link::FrameKind;
using link::MessagePtr;
using link::Peer;
using link::ProtocolError;
using State = link::Connection::State;
using std::chrono::milliseconds;

namespace {

// The most bytes of one connection before the other connections are served.
constexpr size_t kBytesARead = 1024 * 1024;
constexpr size_t kBytesAWrite = 512 * 1024;
constexpr size_t kScratchBytes = 64 * 1024;
constexpr int kMostParts = 64;
constexpr milliseconds kLinger{1000};
constexpr size_t kMostClosedTokens = 256;
constexpr size_t kMostUnknown = 16;

constexpr uint64_t kWakeup = 0;
constexpr uint64_t kListener = 1;

thread_local const Link* served_link = nullptr;  // the link whose thread this is

std::string closed_by(const Peer& peer, const std::string& text) {
    const bool has_cause = !text.empty() && !link::is_just_closed(text);
    return "connection closed by peer: " + peer.name + (has_cause ? ": " + text : "");
}

}  // namespace

std::shared_ptr<Link> Link::open(const std::string& listen, const std::string& advertise,
                                 Limits limits, const std::optional<link::Seed>& seed,
                                 const std::optional<link::Proxy>& proxy) {
    // A forked child leaks the link: there its thread does not run, and its mutexes may be locked.
    return std::shared_ptr<Link>(new Link(listen, advertise, limits, seed, proxy), [](Link* link) {
        if (link->is_own_process()) delete link;
    });
}

Link::~Link() { close(); }

bool Link::is_own_process() const { return pid_ == getpid(); }

void Link::check_process() const {
    if (is_own_process()) return;
    throw std::runtime_error("this link belongs to process " + std::to_string(pid_) +
                             ", from which this process was forked: open a link of its own");
}

std::map<std::string, int64_t> Link::counters() const {
    check_process();
    const Lock lock(mutex_);
    const auto open = open_connections();
    int64_t round_trip_us = 0, num_sent_again = num_sent_again_;
    for (const ConnectionPtr& connection : open) {
        const TcpFacts tcp = tcp_facts_of(connection->fd.get());
        round_trip_us = std::max<int64_t>(round_trip_us, tcp.round_trip_us);
        num_sent_again += tcp.num_sent_again;
    }
    return {{"strangers", num_strangers_},
            {"dropped", num_dropped_},
            {"sent_bytes", sent_bytes_},
            {"received_bytes", received_bytes_},
            {"open", static_cast<int64_t>(open.size())},
            {"connects", num_connects_},
            {"rtt_us", round_trip_us},
            {"retransmits", num_sent_again}};
}

std::vector<Link::ConnectionPtr> Link::open_connections() const {
    std::vector<ConnectionPtr> found;
    for (const auto& [id, connection] : connections_) {
        if (connection->state == State::kOpen) found.push_back(connection);
    }
    return found;
}

// -------------------------------------------------------------------- from the callers' threads

void Link::post(Channel& channel, const MessagePtr& message) {
    Lock lock(mutex_);
    message->token = channel.token;
    message->channel = &channel;
    if (is_closing_) {
        message->is_done = true;
        message->error = "the link was closed";
        return;
    }
    if (message->is_send) {
        channel.post_send(message);
    } else {
        channel.post_recv(message);
    }
    flush_peer(lock, channel.peer);
}

bool Link::is_done(const link::Message& message) const {
    check_process();
    const Lock lock(mutex_);
    return message.is_done;
}

bool Link::wait(const MessagePtr& message, milliseconds timeout) {
    check_process();
    Lock lock(mutex_);
    const auto is_done = [&] { return message->is_done; };
    if (timeout.count() <= 0) {
        message->changed.wait(lock, is_done);
    } else if (!message->changed.wait_for(lock, timeout, is_done)) {
        const std::string far =
            std::to_string(message->moved) + " of " + std::to_string(message->num_bytes) + " bytes";
        end(lock, message,
            "timed out after " + std::to_string(timeout.count()) + " ms with " + far + " " +
                (message->is_send ? "sent to " : "received from ") + message->channel->peer.name);
    }
    if (message->is_aborted) return false;
    if (!message->error.empty()) throw std::runtime_error(message->error);
    return true;
}

void Link::cancel(const MessagePtr& message) {
    if (!is_own_process()) return;
    Lock lock(mutex_);
    end(lock, message, "", true);
}

void Link::close_group(int number, const std::vector<ChannelPtr>& channels) {
    Lock lock(mutex_);
    for (const ChannelPtr& channel : channels) {
        if (!channel) continue;
        channel->closed.insert(number);
        end_all(lock, *channel, number, "the group was closed");
        if (is_closing_) continue;
        channel->forget_group(number);
        channel->put(FrameKind::kEnd, number, 0, 0, 0, 0);
        flush_peer(lock, channel->peer);
        if (--channel->num_open == 0) forget_channel(channel->peer, channel->token);
    }
}

void Link::forget_channel(Peer& peer, uint64_t token) {
    peer.channels.erase(token);
    --peer.num_users;
    peer.idle_since = Clock::now();
    if (closed_tokens_.empty() || closed_tokens_.back() != token) closed_tokens_.push_back(token);
    if (closed_tokens_.size() > kMostClosedTokens) closed_tokens_.pop_front();
}

void Link::close() {
    if (!is_own_process()) return;
    const std::lock_guard<std::mutex> once(close_mutex_);
    {
        Lock lock(mutex_);
        if (!std::exchange(is_closing_, true)) {
            for (const auto& [id, peer] : std::map(peers_)) {
                for (const auto& [token, channel] : std::map(peer->channels)) {
                    end_all(lock, *channel, -1, "the link was closed");
                }
            }
        }
        announce();
        shake_due_.notify_all();
        replied_.notify_all();
        wake();
    }
    if (shake_thread_.joinable()) shake_thread_.join();
    if (thread_.joinable()) thread_.join();
    // Free the descriptors now: Python may keep the closed link for long.
    const Lock lock(mutex_);
    reserve_.clear();
    epoll_.reset();
    wakeup_.reset();
}

// Ends a message in any state. Waits until no system call touches the message's memory.
void Link::end(Lock& lock, const MessagePtr& message, const std::string& error, bool is_aborted) {
    if (message->is_done) return;
    message->is_cancelled = true;
    ++num_cancelling_;
    io_done_.wait(lock, [&] { return !message->is_in_io; });
    --num_cancelling_;
    if (message->is_done) return;
    Channel& channel = *message->channel;
    const auto lane = static_cast<size_t>(message->number / 2);
    const ConnectionPtr connection = channel.peer.lanes[lane].chosen;
    if (message->is_send && connection) {
        connection->withdraw(message);
        if (connection->has_output() && connection->can_write) mark_ready(connection);
    }
    message->is_aborted = is_aborted;
    channel.finish(message, error);
}

void Link::end_all(Lock& lock, Channel& channel, int number, const std::string& error) {
    for (const MessagePtr& message : channel.unfinished(number)) end(lock, message, error);
}

// ---------------------------------------------------------------------------------- the thread

void Link::loop() {
    served_link = this;
    Lock lock(mutex_);
    scratch_.resize(kScratchBytes);
    while (!is_closing_) pass(lock);
    linger(lock);
}

// One pass of the link's thread: waits for events, serves ready connections, and runs the timers.
void Link::pass(Lock& lock) {
    std::array<epoll_event, 64> events;
    const int timeout = next_timeout(Clock::now());
    lock.unlock();
    const int count =
        epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), timeout);
    lock.lock();
    for (int i = 0; i < count; ++i) {
        const epoll_event& event = events[static_cast<size_t>(i)];
        handle_event(lock, event.data.u64, event.events);
    }
    // A connection that becomes ready again while it is served waits for the next pass.
    for (size_t i = ready_.size(); i > 0; --i) {
        const ConnectionPtr connection = ready_.front();
        ready_.pop_front();
        connection->is_ready = false;
        serve(lock, connection);
    }
    run_timers(lock, Clock::now());
}

int Link::next_timeout(Clock::time_point now) const {
    constexpr int kOften = 20;
    if (!ready_.empty()) return 0;
    if (!dials_.empty() || !strangers_.empty() || !is_accepting_ || is_closing_ || is_copying_) {
        return kOften;
    }
    const auto due = std::min(next_sweep_, next_beat_);
    const auto left = std::chrono::ceil<milliseconds>(due - now).count();
    return static_cast<int>(std::max<int64_t>(left, 0));
}

void Link::handle_event(Lock& lock, uint64_t id, uint32_t events) {
    if (id == kWakeup) {
        uint64_t count = 0;
        if (::read(wakeup_.get(), &count, sizeof(count)) > 0) is_woken_ = false;
        return;
    }
    if (id == kListener) return accept_some(lock);
    const auto it = connections_.find(id);
    if (it == connections_.end()) return;
    Connection& connection = *it->second;
    if (events & EPOLLOUT) {
        connection.can_write = true;
        ++connection.num_writable;
    }
    if (events & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR)) connection.can_read = true;
    if (events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) connection.is_hung_up = true;
    mark_ready(it->second);
}

void Link::mark_ready(const ConnectionPtr& connection) {
    if (!std::exchange(connection->is_ready, true)) ready_.push_back(connection);
    if (served_link != this) wake();
}

void Link::wake() {
    if (std::exchange(is_woken_, true)) return;
    const uint64_t one = 1;
    if (write(wakeup_.get(), &one, sizeof(one)) < 0) is_woken_ = false;
}

void Link::announce() {
    ++num_changes_;
    changed_.notify_all();
}

void Link::serve(Lock& lock, const ConnectionPtr& connection) {
    switch (connection->state) {
        case State::kClosed:
            return;
        case State::kConnecting:
            if (connection->can_write || connection->is_hung_up) finish_connect(lock, connection);
            break;
        case State::kProxied:
            ask_proxy(lock, connection);
            break;
        case State::kSecuring:
            secure(lock, connection);
            break;
        case State::kAsking:
        case State::kAsked:
            greet(lock, connection);
            break;
        case State::kOpen:
            break;
    }
    if (connection->state != State::kOpen) return;
    // After a failed write, read the bytes that the peer sent before it closed the connection.
    if (connection->is_cut) connection->can_read = true;
    flush(lock, connection, true);
    read(lock, connection);
    if (connection->state != State::kOpen) return;
    if (connection->can_read) return mark_ready(connection);
    if (connection->is_cut) disconnect(lock, connection, std::string(connection->trouble));
}

// ------------------------------------------------------------------------------------- writing

// Writes what waits on a connection. Any thread may call it, so that a short message needs no
// wake-up of the link's thread; only that thread calls it `with_bulk`, for large messages and
// copies.
void Link::flush(Lock& lock, const ConnectionPtr& connection, bool with_bulk) {
    Connection& it = *connection;
    size_t budget = kBytesAWrite;
    const auto with_copies = [&] { return with_bulk && it.has_copies() && may_copy(Clock::now()); };
    while (budget > 0 && it.state == State::kOpen && it.can_write && !it.is_writing && !it.is_cut) {
        const bool has_copies = with_copies();
        if (!it.has_output(with_bulk) && !has_copies) break;
        std::array<iovec, kMostParts> parts;
        const int num_parts =
            it.plan_write(parts.data(), kMostParts, budget, with_bulk, has_copies);
        if (num_parts == 0 && !it.has_unsent) return;  // its first message is being cancelled
        size_t planned = 0;
        for (int i = 0; i < num_parts; ++i) planned += parts[static_cast<size_t>(i)].iov_len;
        it.is_writing = true;
        const bool has_bulk = !it.bulk.empty();
        const uint64_t num_writable = it.num_writable;
        lock.unlock();
        const link::Moved moved = it.transmit(parts.data(), num_parts);
        lock.lock();
        it.is_writing = false;
        it.has_unsent = it.session && moved.is_blocked;
        const size_t done = moved.num_bytes;
        if (has_bulk && done > 0) it.heard_at = Clock::now();
        const Connection::Written written = it.wrote(done);
        for (const MessagePtr& message : written.complete) {
            if (message->channel) message->channel->finish(message, "");
            if (message->owner) --it.num_requests;
        }
        it.num_requests -= written.num_answered;
        if (written.round_bytes > 0) it.round_at = Clock::now();
        share_.count_round(written.round_bytes, is_copying_, Clock::now());
        if (written.copy_bytes > 0) {
            share_.count_copies(written.copy_bytes);
            it.peer->idle_since = Clock::now();
        }
        if (num_cancelling_ > 0) io_done_.notify_all();
        if (moved.is_over) {
            it.is_cut = true;
            it.trouble = moved.trouble;
        }
        // If the kernel has reported room during the call (num_writable has changed), can_write
        // stays set.
        const bool is_full = moved.is_blocked || (!it.session && done > 0 && done < planned);
        if (is_full && it.num_writable == num_writable) {
            it.can_write = false;
        }
        sent_bytes_ += static_cast<int64_t>(done);
        budget -= std::min(budget, done);
    }
    const bool has_more = it.can_write && (it.has_output() || with_copies()) && !it.is_writing;
    is_copying_ = is_copying_ || it.has_copies();
    if (it.state == State::kOpen && (has_more || it.is_cut)) mark_ready(connection);
}

void Link::flush_peer(Lock& lock, Peer& peer) {
    for (size_t i = 0; i < peer.lanes.size(); ++i) {
        const ConnectionPtr connection = peer.lanes[i].chosen;
        if (connection && connection->has_output()) flush(lock, connection, false);
    }
}

// ------------------------------------------------------------------------------------- reading

void Link::read(Lock& lock, const ConnectionPtr& connection) {
    Connection& it = *connection;
    size_t budget = kBytesARead;
    while (budget > 0 && it.state == State::kOpen && it.can_read) {
        std::array<iovec, 2> parts;
        const int num_parts = it.plan_read(parts.data(), scratch_.data(), scratch_.size());
        const size_t planned = parts[0].iov_len + (num_parts > 1 ? parts[1].iov_len : 0);
        const MessagePtr target = it.target;
        lock.unlock();
        const link::Moved moved = it.receive(parts.data(), num_parts);
        lock.lock();
        if (target) target->is_in_io = false;
        if (num_cancelling_ > 0) io_done_.notify_all();
        const size_t num_bytes = moved.num_bytes;
        received_bytes_ += static_cast<int64_t>(num_bytes);
        budget -= std::min(budget, num_bytes);
        // Without TLS, a read that is shorter than planned means that the kernel has no more bytes.
        // A TLS session reports that itself (is_blocked).
        const bool is_short = !it.session && num_bytes > 0 && num_bytes < planned;
        if (moved.is_blocked || (is_short && !it.is_hung_up)) it.can_read = false;
        if (num_bytes > 0) {
            it.heard_at = Clock::now();
            it.is_pinged = false;
            const auto at = own_clock_.at(it.heard_at);
            it.peer->life.hear(at);
            if (target && !target->owner) it.peer->life.hear_round(num_bytes, at);
            if (it.took(num_bytes)) end_payload(connection);
            parse(lock, connection);
        }
        if (moved.is_over) {
            const bool is_known = !moved.trouble.empty();
            return disconnect(lock, connection, is_known ? moved.trouble : std::string(it.trouble));
        }
    }
}

void Link::parse(Lock& lock, const ConnectionPtr& connection) {
    Connection& it = *connection;
    const std::shared_ptr<Peer> peer = it.peer;
    try {
        while (it.state == State::kOpen && it.num_staged() > 0) {
            if (it.left > 0) {
                if (it.take_staged()) end_payload(connection);
                continue;
            }
            if (it.num_staged() < sizeof(Frame)) break;
            Frame frame;
            std::memcpy(&frame, it.staging.data() + it.begin, sizeof(frame));
            const bool has_payload = link::is_short(frame.kind);
            if (has_payload && frame.length <= link::kEagerBytes &&
                it.num_staged() < sizeof(frame) + frame.length) {
                break;
            }
            on_frame(lock, connection, frame, it.staging.data() + it.begin + sizeof(frame));
            it.begin += sizeof(frame) + (has_payload ? frame.length : 0);
        }
        flush_peer(lock, *peer);
    } catch (const ProtocolError& error) {
        disconnect(lock, connection, std::string("it has broken the protocol: ") + error.what());
    }
}

void Link::end_payload(const ConnectionPtr& connection) {
    const MessagePtr target = std::exchange(connection->target, nullptr);
    if (!target) return;
    if (target->channel) target->channel->on_data_end(target);
    if (!target->owner || target->moved < target->num_bytes) return;
    if (target->is_told) {
        end_tell(*connection->peer, *target);
    } else {
        end_inquiry(target->ticket);
    }
}

namespace {

void check_frame(const Frame& frame) {
    const auto kind = static_cast<FrameKind>(frame.kind);
    if (frame.magic != Frame::kFrameMagic) throw ProtocolError("no frame where one must begin");
    if (kind < FrameKind::kJoin || kind > FrameKind::kTell) {
        throw ProtocolError("a frame of kind " + std::to_string(frame.kind));
    }
    uint64_t most = 0;
    if (kind == FrameKind::kEager) most = link::kEagerBytes;
    if (kind == FrameKind::kRequest || kind == FrameKind::kAnswer) most = link::kMostHeadBytes;
    if (kind == FrameKind::kTell) most = link::kMostTellBytes;
    const bool is_part = kind == FrameKind::kData || kind == FrameKind::kCopy;
    if (is_part) most = link::kFragmentBytes;
    if (frame.length > most || (is_part && frame.length == 0)) {
        throw ProtocolError("a frame of " + std::to_string(frame.length) + " bytes");
    }
    if (frame.number >= 2 * link::kMostLanes) throw ProtocolError("a frame of no group");
}

}  // namespace

void Link::on_frame(Lock& lock, const ConnectionPtr& connection, const Frame& frame,
                    const uint8_t* payload) {
    check_frame(frame);
    const auto kind = static_cast<FrameKind>(frame.kind);
    if (kind == FrameKind::kPing || kind == FrameKind::kPong) {
        if (kind == FrameKind::kPing) connection->put(FrameKind::kPong);
        mark_ready(connection);
        return announce();
    }
    if (kind == FrameKind::kRequest) return on_request(connection, frame, payload);
    if (kind == FrameKind::kAnswer) return on_reply(connection, frame, payload);
    if (kind == FrameKind::kCopy) return on_copy(connection, frame);
    if (kind == FrameKind::kTell) return on_tell(connection, frame);
    if (kind == FrameKind::kBeat) {
        // The peer wants this connection, so it does not count as idle.
        connection->peer->idle_since = Clock::now();
        return connection->peer->life.hear_beat(frame, own_clock_.at(Clock::now()));
    }
    connection->has_carried = true;
    if (kind == FrameKind::kData) connection->left = frame.length;
    const ChannelPtr channel = channel_of(*connection->peer, frame);
    // Frames of a group that this process has closed are dropped, but for credit, which is for all
    // groups of the channel.
    const bool is_wanted =
        channel && (kind == FrameKind::kCredit || channel->closed.count(frame.number) == 0);
    if (!is_wanted) {
        if (channel && kind == FrameKind::kEager) channel->take_eager();
        ++num_dropped_;
        return;
    }
    switch (kind) {
        case FrameKind::kJoin:
            if (frame.tag >= link::kMostLanes || frame.total > link::kMostLanes) {
                throw ProtocolError("a lane that cannot be");
            }
            channel->joined.insert(static_cast<int>(frame.tag));
            channel->num_lanes = frame.total;
            if (frame.offset != 0 && channel->state != Channel::State::kUnknown &&
                static_cast<int>(frame.tag) < channel->own_lanes) {
                channel->answer_join(static_cast<int>(frame.tag));
            }
            announce();
            break;
        case FrameKind::kGrant:
            channel->on_grant(frame);
            break;
        case FrameKind::kEager:
            channel->on_eager(frame, payload);
            break;
        case FrameKind::kData:
            connection->target = channel->on_data(frame);
            if (!connection->target) ++num_dropped_;
            break;
        case FrameKind::kCredit:
            channel->on_credit(frame);
            break;
        case FrameKind::kOffer:
            channel->on_offer(frame);
            break;
        case FrameKind::kRefuse:
            channel->on_refuse(frame);
            break;
        case FrameKind::kPing:
        case FrameKind::kPong:
        case FrameKind::kRequest:
        case FrameKind::kAnswer:
        case FrameKind::kCopy:
        case FrameKind::kBeat:
        case FrameKind::kTell:
            break;
        case FrameKind::kEnd:
            channel->ended.insert(frame.number);
            end_all(lock, *channel, frame.number,
                    closed_by(*connection->peer, "it has closed the group"));
            announce();
            break;
    }
}

// The channel of a frame, or null. If the peer has called connect() before this process, a channel
// is made here, which keeps the peer's frames until this process calls connect().
Link::ChannelPtr Link::channel_of(Peer& peer, const Frame& frame) {
    const auto it = peer.channels.find(frame.token);
    if (it != peer.channels.end()) return it->second;
    switch (static_cast<FrameKind>(frame.kind)) {
        case FrameKind::kData:
        case FrameKind::kCredit:
        case FrameKind::kRefuse:
            return nullptr;
        default:
            break;
    }
    const auto& closed = closed_tokens_;
    if (std::find(closed.begin(), closed.end(), frame.token) != closed.end()) return nullptr;
    ChannelPtr oldest;
    size_t num_unknown = 0;
    for (const auto& [token, channel] : peer.channels) {
        if (channel->state != Channel::State::kUnknown) continue;
        ++num_unknown;
        if (!oldest || channel->since < oldest->since) oldest = channel;
    }
    if (num_unknown >= kMostUnknown) {
        ++num_dropped_;
        peer.channels.erase(oldest->token);
    }
    return peer.channels[frame.token] = std::make_shared<Channel>(peer, frame.token);
}

// ----------------------------------------------------------------------------------- the end

bool Link::is_connected(const Peer& peer) {
    return std::any_of(peer.lanes.begin(), peer.lanes.end(),
                       [](const link::Lane& lane) { return lane.own || lane.theirs; });
}

// Fails the channels of a peer that may have lost messages with its ended connections.
void Link::lose(Lock& lock, Peer& peer, const std::string& text) {
    const std::vector<link::End> ends = std::exchange(peer.ends, {});
    announce();
    for (const auto& [token, channel] : std::map(peer.channels)) {
        if (!channel->has_lost(ends)) continue;
        switch (channel->state) {
            case Channel::State::kUnknown:
                peer.channels.erase(token);
                break;
            case Channel::State::kForming:
                // `dead` lets the waiting connect() fail, which tells the peer.
                if (channel->has_messages()) channel->dead = closed_by(peer, text);
                channel->forget();
                break;
            case Channel::State::kOpen:
                if (channel->dead.empty()) channel->dead = closed_by(peer, text);
                end_all(lock, *channel, -1, channel->dead);
                break;
        }
    }
}

void Link::disconnect(Lock& lock, const ConnectionPtr& connection, const std::string& text) {
    Connection& it = *connection;
    if (it.state == State::kClosed) return;
    const bool was_open = std::exchange(it.state, State::kClosed) == State::kOpen;
    if (was_open) num_sent_again_ += tcp_facts_of(it.fd.get()).num_sent_again;
    epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, it.fd.get(), nullptr);
    connections_.erase(it.id);
    strangers_.remove(it.id);
    if (was_open && !it.is_writing) it.say_bye();
    shutdown(it.fd.get(), SHUT_RDWR);
    if (const auto dial = std::exchange(it.dial, nullptr)) {
        dial_failed(*dial, text.empty() ? link::kHasClosed : text);
    }
    if (was_open) {
        link::Lane& lane = it.peer->lanes[static_cast<size_t>(it.lane)];
        for (ConnectionPtr* place : {&lane.own, &lane.theirs, &lane.chosen}) {
            if (*place == connection) place->reset();
        }
        if (it.has_carried) it.peer->ends.push_back({it.lane, Clock::now()});
        if (it.has_carried && (!text.empty() || !is_connected(*it.peer))) {
            lose(lock, *it.peer, text);
        }
    }
    it.target.reset();
    lose_inquiries(it.id);
    // A thread that is writing has its own reference to the connection: the queues must stay as
    // they are, and the descriptor is closed when it drops the reference.
    if (!it.is_writing) {
        it.control.clear();
        it.messages.clear();
        it.bulk.clear();
        it.short_copies.clear();
        it.copies.clear();
        it.batch.clear();
    }
    announce();
}

// Writes what waits, shuts the sending side down, and reads until the peers close, for at most a
// second. A socket that is closed with unread bytes resets its connection, and the peer would lose
// bytes that it has not read yet.
void Link::linger(Lock& lock) {
    const auto deadline = Clock::now() + kLinger;
    listener_.reset();
    // A peer and its dial hold references to each other; stop_dial() breaks the cycle.
    for (const auto& dial : std::vector(dials_)) {
        stop_dial(lock, dial->peer->lanes[static_cast<size_t>(dial->lane)]);
    }
    for (const auto& [id, connection] : std::unordered_map(connections_)) {
        if (connection->state != State::kOpen) disconnect(lock, connection, "");
    }
    while (!connections_.empty() && Clock::now() < deadline) {
        for (const ConnectionPtr& connection : open_connections()) {
            flush(lock, connection, false);
            if (connection->has_output() || connection->is_writing) continue;
            connection->say_bye();
            if (!connection->has_unsent) shutdown(connection->fd.get(), SHUT_WR);
        }
        pass(lock);
    }
    for (const ConnectionPtr& connection : open_connections()) disconnect(lock, connection, "");
    ready_.clear();
}

}  // namespace diloco
