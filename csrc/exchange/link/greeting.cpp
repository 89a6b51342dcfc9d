// The beginning of a link's connections (accepting, dialling, greeting), and the link's timers.
#include <netdb.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "exchange/link/link.h"

namespace diloco {

using link::Answer;
using link::Dial;
using link::Hello;
using link::Nonce;
using link::Status;
using State = link::Connection::State;
using std::chrono::milliseconds;

namespace {

// The most connections of processes that are in no group and no reach() list of this process.
constexpr size_t kMostIdle = 256;
constexpr int kMostAcceptsAPass = 64;
constexpr milliseconds kAcceptPause{100};
constexpr milliseconds kLongestPause{500};
constexpr milliseconds kSweepPeriod{1000};
constexpr milliseconds kPingPeriod{5000};
// Many proxies end a connection over which nothing has come for a minute.
constexpr milliseconds kProxyPeriod{20000};
constexpr milliseconds kEndPatience{1000};

bool watch(int epoll, int fd, uint64_t id, uint32_t events) {
    epoll_event event{};
    event.events = events;
    event.data.u64 = id;
    return epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event) == 0;
}

// The host and port of a text "host:port"; throws std::invalid_argument for another text.
std::pair<std::string, std::string> place_of(const char* name, const std::string& text) {
    const auto place = split_place(text);
    if (!place) {
        throw std::invalid_argument(std::string(name) + " must be \"host:port\", got \"" + text +
                                    "\"");
    }
    return *place;
}

Descriptor open_listener(const std::string& listen) {
    const auto [host, port] = place_of("listen", listen);
    int error = 0;
    const auto found = look_up(host, port, AI_PASSIVE | AI_NUMERICSERV);
    if (found.empty()) {
        throw std::runtime_error("this process cannot listen at " + listen +
                                 ": this host is not known here");
    }
    for (const Address& address : found) {
        Descriptor fd([&] { return listen_at(address); });
        if (fd) return fd;
        error = errno;
    }
    throw std::runtime_error("this process cannot listen at " + listen + ": " +
                             std::strerror(error));
}

// The advertised address, with port 0 replaced by the listening port.
std::string published(const std::string& advertise, const std::string& listening) {
    if (advertise.empty()) return "";
    const std::string port = place_of("advertise", advertise).second;
    if (port != "0" || listening.empty()) return advertise;
    return advertise.substr(0, advertise.rfind(':')) + listening.substr(listening.rfind(':'));
}

}  // namespace

Link::Link(const std::string& listen, const std::string& advertise, Limits limits,
           const std::optional<link::Seed>& seed, const std::optional<link::Proxy>& proxy)
    : limits_(limits),
      pid_(getpid()),
      nonce_(link::random_bytes<sizeof(Nonce)>()),
      nonce_text_(link::to_hex(nonce_)),
      proxy_(proxy) {
    if (seed) identity_ = link::Identity::open(*seed);
    if (!listen.empty()) {
        link::raise_descriptors();
        listener_ = open_listener(listen);
        reserve_.fill();
    }
    address_ = published(advertise, listener_ ? name_of_socket(listener_.get()) : "");
    epoll_ = Descriptor([] { return epoll_create1(EPOLL_CLOEXEC); });
    wakeup_ = Descriptor([] { return eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK); });
    if (!watch(epoll_.get(), wakeup_.get(), 0, EPOLLIN) ||
        (listener_ && !watch(epoll_.get(), listener_.get(), 1, EPOLLIN))) {
        throw std::runtime_error(std::string("the link's sockets cannot be watched: ") +
                                 std::strerror(errno));
    }
    next_sweep_ = Clock::now() + kSweepPeriod;
    next_beat_ = Clock::now() + link::kBeatPeriod;
    thread_ = std::thread([this] { loop(); });
    if (identity_) shake_thread_ = std::thread([this] { shake_hands(); });
}

Link::PeerPtr Link::peer_of(const link::PeerId& id, const std::string& name) {
    PeerPtr& peer = peers_[id];
    if (!peer) {
        peer = std::make_shared<link::Peer>();
        peer->id = id;
        peer->name = name;
        peer->idle_since = Clock::now();
        peer->lanes.reserve(link::kMostLanes);  // references to lanes stay valid
    }
    return peer;
}

// Makes a connection of a socket, and watches it by epoll; returns null if epoll fails.
Link::ConnectionPtr Link::add_connection(Descriptor fd, State state) {
    auto connection = std::make_shared<link::Connection>();
    connection->id = ++last_id_;
    connection->fd = std::move(fd);
    connection->state = state;
    link::set_options(connection->fd.get());
    if (!watch(epoll_.get(), connection->fd.get(), connection->id,
               EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET)) {
        return nullptr;
    }
    connections_.emplace(connection->id, connection);
    return connection;
}

// ----------------------------------------------------------------------------------- strangers

void Link::accept_some(Lock& lock) {
    for (int i = 0; i < kMostAcceptsAPass; ++i) {
        Descriptor fd([&] {
            return accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
        });
        const int error = fd ? 0 : errno;
        if (error == EAGAIN) return;
        if (fd) {
            add_stranger(lock, std::move(fd));
        } else if (link::is_exhausted(error) && !reserve_.release()) {
            // The closed stranger's descriptor is free in the next pass of the link's thread.
            return strangers_.empty() ? pause_accepting() : end_a_stranger(lock);
        }
    }
}

void Link::add_stranger(Lock& lock, Descriptor fd) {
    if (strangers_.size() >= most_strangers_) end_a_stranger(lock);
    const ConnectionPtr connection =
        add_connection(std::move(fd), identity_ ? State::kSecuring : State::kAsked);
    if (!connection) return;
    connection->deadline = Clock::now() + limits_.greeting;
    strangers_.add(connection->id, link::origin_of(connection->fd.get()));
}

// Closes one stranger, to make room for a new connection.
void Link::end_a_stranger(Lock& lock) {
    while (true) {
        const ConnectionPtr chosen = connections_.at(strangers_.choose());
        uint8_t first = 0;
        const bool has_bytes = recv(chosen->fd.get(), &first, 1, MSG_PEEK | MSG_DONTWAIT) > 0;
        // The stranger may have spoken already: its first byte may still be unread in the socket.
        // Then the stranger counts as one that has spoken, and another one may be chosen.
        if (has_bytes && strangers_.hear(chosen->id)) continue;
        return refuse_stranger(lock, chosen);
    }
}

void Link::adopt(Descriptor fd) {
    check_process();
    Lock lock(mutex_);
    if (is_closing_) return;
    add_stranger(lock, std::move(fd));
    wake();
}

// Stops accepting for a moment, when no descriptor is left. New connections stay in the kernel's
// queue meanwhile.
void Link::pause_accepting() {
    epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, listener_.get(), nullptr);
    is_accepting_ = false;
    accept_at_ = Clock::now() + kAcceptPause;
}

// Closes an accepted connection that did not greet properly. A `why` that is not empty is shown to
// a user whose connect() fails because a member is missing.
void Link::refuse_stranger(Lock& lock, const ConnectionPtr& connection, const std::string& why) {
    ++num_strangers_;
    if (!why.empty()) {
        last_refusal_ = name_of_peer(connection->fd.get()) + " was refused: " + why;
        refused_at_ = Clock::now();
    }
    disconnect(lock, ConnectionPtr(connection), "");
}

// Closes a connection that this process has accepted or dialled, before its greeting is over.
void Link::refuse(Lock& lock, const ConnectionPtr& connection, const std::string& why) {
    if (!connection->dial) return refuse_stranger(lock, connection, why);
    disconnect(lock, connection, why);
}

// Tells a dialler that has begun with TLS that this link has no keys.
void Link::answer_tls(const ConnectionPtr& connection) {
    // Read what has come first: a socket that is closed with unread bytes resets the connection,
    // and the peer would lose the answer.
    while (recv(connection->fd.get(), scratch_.data(), scratch_.size(), MSG_DONTWAIT) > 0) continue;
    Answer answer;
    answer.status = static_cast<uint32_t>(Status::kNoKeys);
    connection->say(&answer, sizeof(answer));
}

// Reads a Hello (if this process was dialled) or the Answer to its own, and no byte beyond.
void Link::greet(Lock& lock, const ConnectionPtr& connection) {
    link::Connection& it = *connection;
    const bool is_asked = it.state == State::kAsked;
    const size_t size = is_asked ? sizeof(Hello) : sizeof(Answer);
    while (it.can_read && it.end < size) {
        const iovec part{it.staging.data() + it.end, size - it.end};
        const link::Moved moved = it.receive(&part, 1);
        it.end += moved.num_bytes;
        if (it.end > 0) strangers_.hear(it.id);
        if (moved.is_blocked) it.can_read = false;
        const size_t known = std::min(it.end, link::kGreeting.size());
        if (std::memcmp(it.staging.data(), link::kGreeting.data(), known) != 0) {
            if (!is_asked) return refuse(lock, connection, "another program answers there");
            if (it.staging[0] != link::kTlsHandshake) return refuse_stranger(lock, connection);
            answer_tls(connection);
            return refuse_stranger(lock, connection, "it has keys, and this link has none");
        }
        if (moved.is_over && it.end < size) {
            if (is_asked) return refuse_stranger(lock, connection);
            const bool is_said = !moved.trouble.empty();
            return refuse(lock, connection, is_said ? moved.trouble : link::kHasClosed);
        }
    }
    if (it.end < size) return;
    it.end = 0;
    if (is_asked) {
        on_hello(lock, connection);
    } else {
        on_answer(lock, connection);
    }
}

namespace {

// The id of the process that greets with this nonce on the connection.
link::PeerId id_of(const link::Connection& connection, const Nonce& nonce) {
    return {nonce, connection.session ? connection.session->peer() : link::PublicKey{}};
}

// Why a greeting was refused, for the user of this process; empty if the other process reports it.
std::string why_refused(Status status, const link::PeerId& id) {
    if (status == Status::kHasKeys) return "it has no keys, and this link has";
    if (status != Status::kOtherKey) return "";
    return "it says that it is a process of another key; it has the key " + link::to_hex(id.second);
}

}  // namespace

// Whether a member of a group has this nonce and another key.
bool Link::is_other_key(const link::PeerId& id) const {
    const auto first = peers_.lower_bound({id.first, link::PublicKey{}});
    for (auto it = first; it != peers_.end() && it->first.first == id.first; ++it) {
        if (it->second->num_users > 0 && it->first.second != id.second) return true;
    }
    return false;
}

void Link::on_hello(Lock& lock, const ConnectionPtr& connection) {
    Hello hello;
    std::memcpy(&hello, connection->staging.data(), sizeof(hello));
    Answer answer;
    Status status = Status::kWelcome;
    const link::PeerId id = id_of(*connection, hello.own);
    if (is_other_key(id)) status = Status::kOtherKey;
    if (hello.wanted != nonce_) status = Status::kOtherProcess;
    if (hello.version != link::kLinkVersion) status = Status::kOtherVersion;
    if (identity_ && !connection->session) status = Status::kHasKeys;
    answer.status = static_cast<uint32_t>(status);
    // A dialler that does not know this process's nonce is not told the nonce.
    if (status == Status::kWelcome) answer.own = nonce_;
    const bool is_sound = hello.own != nonce_ && hello.lane < link::kMostLanes;
    const std::string trouble = connection->say(&answer, sizeof(answer));
    if (!trouble.empty() || !is_sound || status != Status::kWelcome) {
        return refuse_stranger(lock, connection, why_refused(status, id));
    }
    size_t num_idle = 0;
    for (const auto& [known, peer] : peers_) {
        if (is_wanted(*peer)) continue;
        for (const link::Lane& lane : peer->lanes) num_idle += lane.theirs ? 1 : 0;
    }
    const auto known = peers_.find(id);
    const bool is_member = known != peers_.end() && is_wanted(*known->second);
    if (num_idle >= kMostIdle && !is_member) return refuse_stranger(lock, connection);
    strangers_.remove(connection->id);
    connection->peer = peer_of(id, "a process at " + name_of_peer(connection->fd.get()));
    connection->lane = static_cast<int>(hello.lane);
    settle(lock, connection, false);
}

// Makes a connection a part of its lane after the greeting; from now on it carries frames.
void Link::settle(Lock& lock, const ConnectionPtr& connection, bool is_own) {
    link::Peer& peer = *connection->peer;
    const auto index = static_cast<size_t>(connection->lane);
    if (peer.lanes.size() <= index) peer.lanes.resize(index + 1);
    const ConnectionPtr former = is_own ? peer.lanes[index].own : peer.lanes[index].theirs;
    if (former) disconnect(lock, former, "it has connected anew");
    if (!peer.ends.empty()) lose(lock, peer, "it has connected anew");
    link::Lane& lane = peer.lanes[index];
    (is_own ? lane.own : lane.theirs) = connection;
    if (!is_own) lane.theirs_since = Clock::now();
    connection->state = State::kOpen;
    connection->heard_at = Clock::now();
    peer.life.hear(own_clock_.at(connection->heard_at));
    ++num_connects_;
    announce();
}

// --------------------------------------------------------------------------------------- dials

void Link::start(const std::shared_ptr<Dial>& dial) {
    const Address& address = dial->addresses[dial->next];
    Descriptor fd([&] {
        return socket(address.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    });
    if (!fd) return dial_failed(*dial, unreachable(std::strerror(errno)));
    if (::connect(fd.get(), address.get(), address.length) != 0 && errno != EINPROGRESS) {
        const int error = errno;
        if (error == ECONNREFUSED && is_direct(*dial)) {
            dial->peer->life.refuse(address, Clock::now());
        }
        return dial_failed(*dial, unreachable(std::strerror(error)));
    }
    dial->connection = add_connection(std::move(fd), State::kConnecting);
    if (!dial->connection) return dial_failed(*dial, unreachable(std::strerror(errno)));
    dial->connection->peer = dial->peer;
    dial->connection->lane = dial->lane;
    dial->connection->dial = dial;
    dial->connection->deadline = Clock::now() + dial->share;
}

void Link::finish_connect(Lock& lock, const ConnectionPtr& connection) {
    int error = 0;
    socklen_t length = sizeof(error);
    getsockopt(connection->fd.get(), SOL_SOCKET, SO_ERROR, &error, &length);
    if (const Dial& dial = *connection->dial; is_direct(dial)) {
        const Address& address = dial.addresses[dial.next];
        if (error == 0) dial.peer->life.take(address);
        if (error == ECONNREFUSED) dial.peer->life.refuse(address, Clock::now());
    }
    if (error != 0) {
        return disconnect(lock, connection,
                          unreachable(is_reset(error) ? link::kHasClosed : std::strerror(error)));
    }
    if (!proxy_) return begin_dialled(lock, connection);
    const auto& [host, port] = connection->dial->target;
    connection->request = std::make_unique<link::ProxyRequest>(*proxy_, host, port);
    connection->state = State::kProxied;
    ask_proxy(lock, connection);
}

// Goes on with the request to the proxy until it would have to wait for bytes.
void Link::ask_proxy(Lock& lock, const ConnectionPtr& connection) {
    link::Connection& it = *connection;
    while (it.request->trouble().empty()) {
        const std::string due = it.request->take_due();
        if (!due.empty() && !it.say(due.data(), due.size()).empty()) {
            it.request->end();
            continue;
        }
        if (it.request->is_granted()) {
            has_proxy_answered_ = true;
            it.request.reset();
            begin_dialled(lock, connection);
            // Bytes of the answer may have come already, for which epoll reports no new event.
            if (it.state == State::kAsking) greet(lock, connection);
            return;
        }
        if (!it.can_read) return;
        const iovec part{it.staging.data(), it.staging.size()};
        const link::Moved moved = it.receive(&part, 1);
        if (moved.is_blocked) it.can_read = false;
        it.request->feed(it.staging.data(), moved.num_bytes);
        if (moved.is_over) it.request->end();
    }
    const std::shared_ptr<Dial> dial = it.dial;
    const std::string trouble = it.request->trouble();
    disconnect(lock, connection, trouble);
    // Do not dial again: the proxy would give the same answer.
    if (it.request->is_final()) dial->retry_at = Clock::time_point::max();
    has_proxy_answered_ = true;
    if (!it.request->is_about_user()) return;
    for (const auto& other : dials_) {
        other->trouble = trouble;
        other->retry_at = Clock::time_point::max();
    }
}

// Whether one more dial may begin. The first dial of a connect() asks the proxy alone, and the
// other dials wait for the proxy's answer, at most two seconds: if all dials tried a wrong
// password, the proxy might lock the user out.
bool Link::may_dial(Clock::time_point now) const {
    constexpr milliseconds kFirstTurn{2000};
    if (!proxy_ || has_proxy_answered_) return true;
    bool is_asking = false;
    for (const auto& dial : dials_) {
        if (!dial->connection) continue;
        is_asking = true;
        if (now - dial->begin() > kFirstTurn) return true;
    }
    return !is_asking;
}

// Why a dial has failed before the peer or its relay has said anything.
std::string Link::unreachable(const std::string& why) const {
    return proxy_ ? proxy_->unreachable(why) : why;
}

// Why a dial has not ended in time: whose answer is missing.
std::string Link::silent(const link::Connection& connection) const {
    if (connection.state == State::kConnecting) return unreachable("no answer");
    if (connection.state == State::kProxied) return proxy_->silent();
    return "it does not answer, and may be stopped";
}

// Why a dial has not led to a connection.
std::string Link::trouble_of(const Dial& dial) const {
    constexpr milliseconds kAnswerPatience{1000};
    const bool has_begun = dial.connection && dial.connection->state != State::kConnecting;
    std::string why = dial.trouble;
    if (why.empty()) why = proxy_ && !dial.connection ? proxy_->silent() : unreachable("no answer");
    // Prefer the error of the attempt before, if the present attempt has only just begun.
    if (has_begun && (dial.trouble.empty() || Clock::now() - dial.begin() > kAnswerPatience)) {
        why = silent(*dial.connection);
    }
    if (!dial.is_relayed || !link::is_just_closed(why)) return why;
    return "the relay has closed the connection: that process may have ended or stand still, or "
           "the relay is full";
}

// Goes on with a dial whose connection to the peer or its relay is there.
void Link::begin_dialled(Lock& lock, const ConnectionPtr& connection) {
    if (connection->dial->is_relayed) {
        link::RelayRequest request;
        request.wanted = connection->peer->id.first;
        const std::string trouble = connection->say(&request, sizeof(request));
        if (!trouble.empty()) return disconnect(lock, connection, trouble);
    }
    if (!identity_) return ask(lock, connection);
    connection->state = State::kSecuring;
    queue_shake(connection);
}

// Sends a Hello to the process that this one has dialled.
void Link::ask(Lock& lock, const ConnectionPtr& connection) {
    Hello hello;
    hello.own = nonce_;
    hello.wanted = connection->peer->id.first;
    hello.lane = static_cast<uint32_t>(connection->lane);
    const std::string trouble = connection->say(&hello, sizeof(hello));
    if (!trouble.empty()) return disconnect(lock, connection, trouble);
    connection->state = State::kAsking;
}

void Link::on_answer(Lock& lock, const ConnectionPtr& connection) {
    Answer answer;
    std::memcpy(&answer, connection->staging.data(), sizeof(answer));
    const auto status = static_cast<Status>(answer.status);
    if (status == Status::kOtherVersion || answer.version != link::kLinkVersion) {
        return disconnect(lock, connection,
                          "the process there speaks version " + std::to_string(answer.version) +
                              " of the link's protocol, this process version " +
                              std::to_string(link::kLinkVersion));
    }
    if (status == Status::kHasKeys) {
        return disconnect(lock, connection, "the link there has keys, and this link has none");
    }
    if (status == Status::kOtherKey) {
        return disconnect(lock, connection,
                          "the process there knows this process by another key than " +
                              link::to_hex(public_key()));
    }
    if (status != Status::kWelcome || answer.own != connection->peer->id.first) {
        const Dial& dial = *connection->dial;
        if (status == Status::kOtherProcess && is_direct(dial)) {
            dial.peer->life.replace(dial.addresses[dial.next], Clock::now());
        }
        return disconnect(lock, connection, "another process listens there now");
    }
    const auto dial = std::exchange(connection->dial, nullptr);
    dial->connection.reset();
    if (is_direct(*dial)) connection->peer->life.accept(dial->addresses[dial->next]);
    settle(lock, connection, true);
    stop_dial(lock, connection->peer->lanes[static_cast<size_t>(connection->lane)]);
}

void Link::dial_failed(Dial& dial, const std::string& trouble) {
    dial.connection.reset();
    dial.trouble = trouble;
    dial.retry_at = Clock::now();
    if (++dial.next == dial.addresses.size()) {
        dial.next = 0;
        // If the peer has dialled this process, trying each address once is enough.
        dial.is_over = dial.is_for_copies && way_to(*dial.peer);
        dial.retry_at += dial.pause;
        dial.pause = std::min(2 * dial.pause, kLongestPause);
    }
    announce();
}

void Link::stop_dial(Lock& lock, link::Lane& lane) {
    const auto dial = std::exchange(lane.dial, nullptr);
    if (!dial) return;
    if (!lane.own) lane.trouble = trouble_of(*dial);
    dials_.erase(std::remove(dials_.begin(), dials_.end(), dial), dials_.end());
    const ConnectionPtr connection = std::exchange(dial->connection, nullptr);
    if (!connection) return;
    connection->dial.reset();
    disconnect(lock, connection, "");
}

// -------------------------------------------------------------------------------------- timers

void Link::run_timers(Lock& lock, Clock::time_point now) {
    while (!strangers_.empty()) {
        const ConnectionPtr oldest = connections_.at(strangers_.oldest());
        if (oldest->deadline > now) break;
        refuse_stranger(lock, oldest);
    }
    for (const auto& dial : std::vector(dials_)) {
        const ConnectionPtr connection = dial->connection;
        if (connection && connection->deadline <= now) {
            disconnect(lock, connection, silent(*connection));
        } else if (!connection && dial->is_over) {
            stop_dial(lock, dial->peer->lanes[static_cast<size_t>(dial->lane)]);
        } else if (!connection && dial->retry_at <= now && !is_closing_ && may_dial(now)) {
            start(dial);
        }
    }
    if (!is_accepting_ && accept_at_ <= now && listener_) {
        is_accepting_ = watch(epoll_.get(), listener_.get(), 1, EPOLLIN);
    }
    if (is_copying_) resume_copies(now);
    if (std::exchange(has_new_keys_, false)) end_removed_keys(lock);
    if (next_beat_ <= now && !is_closing_) {
        next_beat_ = now + link::kBeatPeriod;
        beat(lock, now);
    }
    if (next_sweep_ > now) return;
    next_sweep_ = now + kSweepPeriod;
    if (listener_) reserve_.fill();
    sweep(lock, now);
}

void Link::ping(const ConnectionPtr& connection) {
    if (std::exchange(connection->is_pinged, true)) return;
    connection->pinged_at = Clock::now();
    connection->put(link::FrameKind::kPing);
    mark_ready(connection);
}

// Pings a connection over which no byte has come for a while, and closes it if no answer comes. The
// peer's link answers a ping even while its program computes.
void Link::check_life(Lock& lock, const ConnectionPtr& connection, Clock::time_point now) {
    const auto silence = now - connection->heard_at;
    // Count from the ping, too: messages may begin after a long silence, and then the peer needs
    // time to answer.
    const bool is_due =
        connection->is_pinged && now - connection->pinged_at > limits_.silence - kPingPeriod;
    if (silence > limits_.silence && is_due) {
        // On a connection that this process does not send over, no message is lost: the peer checks
        // the connection that it sends over, and may have replaced it.
        const auto lane = static_cast<size_t>(connection->lane);
        if (connection->peer->lanes[lane].chosen != connection) connection->has_carried = false;
        const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(silence).count();
        disconnect(lock, connection,
                   "nothing came over this connection for " + std::to_string(seconds) +
                       " s: a NAT or a firewall may have forgotten it, or the process is stopped");
    } else if (silence > kPingPeriod) {
        ping(connection);
    }
}

// Runs once a second: offers sends that wait for a grant, checks silent connections, and forgets
// channels and peers that this process has not asked for.
void Link::sweep(Lock& lock, Clock::time_point now) {
    for (const auto& [id, peer] : std::map(peers_)) {
        std::set<const link::Connection*> busy{nullptr};
        for (const link::Lane& lane : peer->lanes) {
            if (lane.chosen && !lane.chosen->control.empty()) busy.insert(lane.chosen.get());
        }
        for (const auto& [token, channel] : std::map(peer->channels)) {
            if (channel->state == Channel::State::kOpen) channel->offer(busy);
            if (channel->state == Channel::State::kUnknown &&
                now - channel->since > limits_.grace) {
                peer->channels.erase(token);
                ++num_dropped_;
            }
        }
        if (!peer->ends.empty() && now - peer->ends.front().when > kEndPatience) {
            lose(lock, *peer, "");
        }
        flush_peer(lock, *peer);
        for (const link::Lane& lane : peer->lanes) {
            for (const ConnectionPtr& one : {lane.own, lane.theirs}) {
                if (proxy_ && one && now - one->heard_at > kProxyPeriod) ping(one);
            }
        }
        const auto waits = [](const auto& entry) { return entry.second->has_unfinished(); };
        const auto is_asked = [&, &peer = *peer](const auto& entry) {
            const auto found = connections_.find(entry.second.connection_id);
            return found != connections_.end() && found->second->peer.get() == &peer;
        };
        if (std::any_of(peer->channels.begin(), peer->channels.end(), waits) ||
            std::any_of(inquiries_.begin(), inquiries_.end(), is_asked)) {
            for (const link::Lane& lane : std::vector(peer->lanes)) {
                for (const ConnectionPtr& one : {lane.own, lane.theirs}) {
                    if (one && one->state == State::kOpen) check_life(lock, one, now);
                }
            }
        }
        if (is_wanted(*peer) || now - peer->idle_since < limits_.grace) continue;
        for (const link::Lane& lane : std::vector(peer->lanes)) {
            for (const ConnectionPtr& one : {lane.own, lane.theirs}) {
                if (one) disconnect(lock, one, "");
            }
        }
        forget_told(*peer);
        peers_.erase(id);
    }
}

}  // namespace diloco
