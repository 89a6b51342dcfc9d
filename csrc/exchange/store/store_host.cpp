#include "exchange/store/store_host.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <iterator>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "exchange/link/connection.h"
#include "exchange/link/link.h"
#include "exchange/link/strangers.h"

namespace diloco {
namespace {

using std::chrono::milliseconds;
using store::Answer;
using store::changes_values;
using store::Channel;
using store::Request;

constexpr size_t kMostClients = 4096;
// How long a client may take for its handshake.
constexpr std::chrono::seconds kHandshake{5};
// How long a client may take to receive an answer.
constexpr std::chrono::seconds kTaken{60};
// The most bytes of unfinished requests and answers of all clients together.
constexpr size_t kMostHeld = size_t{512} << 20;
// kMostTurns: steps for one client before others are served. kMostCallers: connections that are
// accepted in one pass.
constexpr int kMostTurns = 16, kMostCallers = 256;
// The most answers that are remembered, in case their clients ask again, and the bytes of each.
constexpr size_t kMostRemembered = 16384, kMostRememberedBytes = 4096;
// kDeaf: how long no connection is accepted after be_deaf(). kLook: the longest wait of a pass.
constexpr milliseconds kDeaf{100}, kLook{1000};
constexpr size_t kMostClientName = 64;
constexpr uint64_t kMostGreeting = 1024;  // the largest kHello in bytes
// The ids by which epoll reports the listener and poke(). The ids of clients lie between.
constexpr uint64_t kListener = 0, kWake = UINT64_MAX;

store::Packet done(int64_t number, store::Keys parts = {}) {
    return {static_cast<uint8_t>(Answer::kDone), number, std::move(parts)};
}

store::Packet done(store::Records::Record record) {
    return done(0, {std::move(record.bytes), std::to_string(record.revision)});
}

store::Packet failed(const std::string& sentence) {
    return {static_cast<uint8_t>(Answer::kFailed), 0, {sentence}};
}

Request kind_of(const store::Packet& request) { return static_cast<Request>(request.kind); }

size_t bytes_in(const store::Keys& parts) {
    size_t size = 0;
    for (const std::string& part : parts) size += sizeof(part) + part.size();
    return size;
}

}  // namespace

// The state and functions of the host's thread: one epoll loop for all clients.
class StoreHost::Server {
  public:
    explicit Server(Options options);

    // The loop, which runs until stop().
    void run();
    void stop();
    void poke();
    void allow(PublicKeys keys, PublicKeys readers);
    int64_t num_clients() const { return num_clients_; }
    Facts facts() const {
        return {num_open_, num_requests_, received_bytes_, sent_bytes_, num_refused_posts_};
    }

    const std::string table_id;
    store::Table table;
    store::Records records;
    store::Beats beats, posts;

  private:
    using Clock = store::Clock;
    using Packet = store::Packet;
    using Keys = store::Keys;

    enum class Stage {
        kShaking,
        kReading,  // the host reads the next request
        kWaiting,  // the answer waits for keys, a record or the journal
        kWriting,  // the host writes the answer
        kEnded,
    };

    struct Client {
        Client(int id, std::unique_ptr<store::Channel> channel)
            : id(id), channel(std::move(channel)) {}

        const int id;
        const std::unique_ptr<store::Channel> channel;
        Stage stage = Stage::kShaking;
        bool has_spoken = false;
        bool is_stranger = true;  // until its kHello
        std::string name{};       // the random name in its kHello
        uint32_t events = 0;      // the events for which epoll watches the socket
        Clock::time_point deadline = Clock::time_point::max();
        store::Incoming in{};
        store::Outgoing out{};
        size_t held = 0;  // this client's share of held_

        // For kGet and kWait: the keys, and the missing key that the host watches. For kWatch: the
        // run, and the revision that the client knows.
        Keys keys{};
        bool wants_values = false;
        std::optional<std::string> watched{};
        std::string run{};
        uint64_t revision = 0;
    };
    using Waiting = std::unordered_map<std::string, std::set<int>>;

    // The answer to the last request of a client that has changed values.
    struct Remembered {
        int64_t number = 0;
        Packet answer{};
        std::list<std::string>::iterator turn{};
    };

    void accept_all();
    void admit(Descriptor fd);
    void end_a_stranger();
    // Stops or resumes accepting. While no descriptor is left, new connections wait in the kernel's
    // queue.
    void be_deaf(bool is_deaf);
    // Takes up to kMostTurns steps for a client.
    void pump(Client& client);
    // Takes one step for a client; returns whether there may be more to do.
    bool turn(Client& client);
    static bool speaks_alike(Client& client);
    void heard(Client& client);
    Packet answer(Client& client, Packet& request);
    Packet welcome(Client& client, const Packet& request);
    Packet change(Client& client, Packet& request);
    Packet look(const Packet& request);
    void start_wait(Client& client, Packet& request);
    void start_watch(Client& client, const Packet& request);
    void swap(Client& client, const Packet& request);
    void reply(Client& client, const Packet& packet);
    void reply_values(Client& client);
    void reply_record(Client& client);
    void go_on(const Keys& fresh);
    template <typename Body>
    void with_waiting(int id, Body body);
    void finish_swaps();
    void stop_waiting(Client& client);
    void end_late();
    void end_disallowed();
    void look_for(Client& client, uint32_t events);
    void set_deadline(Client& client, Clock::time_point deadline);
    void charge(Client& client);
    void end(Client& client);
    void remove_ended();
    int milliseconds_left() const;
    bool is_allowed(const link::PublicKey& key) const;
    bool may_only_read(const Client& client) const;

    const Descriptor listener_, epoll_, wake_;
    const std::shared_ptr<link::Identity> identity_;
    const std::string process_ = store::random_name();
    const pid_t owner_ = getpid();
    link::Keyring allowed_, readers_;
    std::atomic<bool> is_closing_ = false, is_new_allowed_ = false;
    std::atomic<int64_t> num_clients_ = 0, num_open_ = 0, num_requests_ = 0, received_bytes_ = 0,
                         sent_bytes_ = 0, num_refused_posts_ = 0;

    // Only the host's thread uses the members below.
    int last_id_ = 0;
    std::map<int, std::unique_ptr<Client>> clients_;
    link::Strangers strangers_;
    const size_t most_strangers_ = link::most_strangers();
    link::Reserve reserve_;
    std::set<int> ready_;  // clients that have more to do than pump() did at once
    std::vector<int> ended_;
    std::set<std::pair<Clock::time_point, int>> deadlines_;
    std::optional<Clock::time_point> deaf_until_;
    Waiting waiting_for_key_, waiting_for_record_;
    std::unordered_map<std::string, int> by_name_;
    std::unordered_map<std::string, Remembered> remembered_;
    std::list<std::string> turns_;  // the names in remembered_, the oldest first
    size_t held_ = 0;
};

StoreHost::Server::Server(Options options)
    : table_id(options.table_id.empty() ? store::random_name() : options.table_id),
      table([this] { poke(); }),
      records(options.is_journalled, std::move(options.records), [this] { poke(); }),
      beats(options.drop_after),
      posts(options.drop_after, store::Beats::kMostPosted),
      listener_(std::move(options.listener)),
      epoll_([] { return epoll_create1(EPOLL_CLOEXEC); }),
      wake_([] { return eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK); }),
      identity_(std::move(options.identity)) {
    allowed_.replace(std::move(options.allowed));
    // Non-blocking: a connection may be gone before accept4() takes it, and accept4() must not wait
    // for the next one.
    fcntl(listener_.get(), F_SETFL, fcntl(listener_.get(), F_GETFL) | O_NONBLOCK);
    const auto add = [this](int fd, uint64_t id) {
        epoll_event event{};
        event.events = EPOLLIN;
        event.data.u64 = id;
        if (fd < 0 || epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
            throw std::runtime_error("this process has no descriptors left for a store");
        }
    };
    add(listener_.get(), kListener);
    add(wake_.get(), kWake);
    link::raise_descriptors();
    reserve_.fill();
}

void StoreHost::Server::run() {
    pthread_setname_np(pthread_self(), "diloco-host");
    // Signals are handled by the program's own threads.
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, nullptr);
    std::array<epoll_event, 64> events{};
    while (!is_closing_) {
        const int count = epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()),
                                     milliseconds_left());
        beats.pass_time();
        posts.pass_time();
        if (is_new_allowed_.exchange(false)) end_disallowed();
        for (int i = 0; i < count; ++i) {
            const uint64_t id = events[static_cast<size_t>(i)].data.u64;
            uint64_t times = 0;
            if (id == kListener) {
                accept_all();
            } else if (id == kWake) {
                [[maybe_unused]] const auto got = ::read(wake_.get(), &times, sizeof(times));
            } else if (const auto found = clients_.find(static_cast<int>(id));
                       found != clients_.end()) {
                strangers_.hear(id);
                pump(*found->second);
            }
        }
        for (const int id : std::exchange(ready_, {})) pump(*clients_.at(id));
        go_on(table.take_fresh());
        finish_swaps();
        end_late();
        remove_ended();
        num_open_ = static_cast<int64_t>(clients_.size());
        reserve_.fill();
        if (deaf_until_ && *deaf_until_ <= Clock::now()) be_deaf(false);
    }
    ::shutdown(listener_.get(), SHUT_RDWR);
    clients_.clear();
    reserve_.clear();
}

void StoreHost::Server::stop() {
    is_closing_ = true;
    poke();
}

void StoreHost::Server::poke() {
    // A child of fork() has no thread to wake, and the descriptor's number may belong to another
    // file there.
    if (getpid() != owner_) return;
    constexpr uint64_t kOnce = 1;
    [[maybe_unused]] const auto sent = ::write(wake_.get(), &kOnce, sizeof(kOnce));
}

int StoreHost::Server::milliseconds_left() const {
    if (!ready_.empty()) return 0;
    auto end = Clock::now() + kLook;
    if (!deadlines_.empty()) end = std::min(end, deadlines_.begin()->first);
    if (deaf_until_) end = std::min(end, *deaf_until_);
    const auto left = std::chrono::ceil<milliseconds>(end - Clock::now()).count();
    return static_cast<int>(std::max<int64_t>(left, 0));
}

// ---------------------------------------------------------------------------- who comes and goes

void StoreHost::Server::allow(PublicKeys keys, PublicKeys readers) {
    allowed_.replace(std::move(keys));
    readers_.replace(std::move(readers));
    is_new_allowed_ = true;
    poke();
}

bool StoreHost::Server::is_allowed(const link::PublicKey& key) const {
    return key == identity_->public_key() || allowed_.has(key) || readers_.has(key);
}

bool StoreHost::Server::may_only_read(const Client& client) const {
    if (!client.channel->has_keys()) return false;
    const link::PublicKey& key = client.channel->peer();
    return key != identity_->public_key() && !allowed_.has(key);
}

void StoreHost::Server::end_disallowed() {
    for (auto& [id, client] : clients_) {
        const bool is_known = client->channel->has_keys() && client->stage != Stage::kShaking;
        if (is_known && !is_allowed(client->channel->peer())) end(*client);
    }
}

void StoreHost::Server::accept_all() {
    for (int i = 0; i < kMostCallers; ++i) {
        Descriptor fd([&] {
            return accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
        });
        const int error = fd ? 0 : errno;
        if (link::is_exhausted(error)) {
            if (reserve_.release()) continue;
            // The closed stranger's descriptor is free in the next pass. Without strangers the new
            // connection waits in the kernel's queue until this process has a descriptor.
            end_a_stranger();
            if (ended_.empty()) be_deaf(true);
            return;
        }
        if (!fd) return;
        try {
            admit(std::move(fd));
        } catch (const std::exception&) {
            // There is no memory, or OpenSSL has ended with the process: drop the connection.
        }
    }
}

void StoreHost::Server::admit(Descriptor fd) {
    // Close strangers if there are too many: an allowed client shows its key at once, and does not
    // stay a stranger.
    while (strangers_.size() >= most_strangers_) end_a_stranger();
    remove_ended();
    if (clients_.size() >= kMostClients) return;
    link::set_options(fd.get());
    std::string origin = link::origin_of(fd.get());
    auto channel =
        std::make_unique<Channel>(std::move(fd), identity_, false,
                                  [this](const link::PublicKey& key) { return is_allowed(key); });
    const int id = ++last_id_;
    const auto placed = clients_.emplace(id, std::make_unique<Client>(id, std::move(channel)));
    Client& client = *placed.first->second;
    strangers_.add(static_cast<uint64_t>(id), std::move(origin));
    set_deadline(client, Clock::now() + kHandshake);
    epoll_event event{};
    event.events = client.events = EPOLLIN;
    event.data.u64 = static_cast<uint64_t>(id);
    if (epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, client.channel->fd(), &event) != 0) end(client);
}

void StoreHost::Server::be_deaf(bool is_deaf) {
    epoll_event event{};
    if (!is_deaf) event.events = EPOLLIN;
    event.data.u64 = kListener;
    epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, listener_.get(), &event);
    deaf_until_.reset();
    if (is_deaf) deaf_until_ = Clock::now() + kDeaf;
}

void StoreHost::Server::end_a_stranger() {
    while (const uint64_t id = strangers_.choose()) {
        Client& client = *clients_.at(static_cast<int>(id));
        char byte = 0;
        // A byte may have arrived since this client's socket was read last.
        const bool speaks = recv(client.channel->fd(), &byte, 1, MSG_PEEK | MSG_DONTWAIT) > 0;
        if (speaks && strangers_.hear(id)) continue;
        end(client);
        return;
    }
}

void StoreHost::Server::end(Client& client) {
    if (client.stage == Stage::kEnded) return;
    if (client.stage == Stage::kWriting) {
        // Close at once: the kernel would keep the rest of the answer for a client that does not
        // read.
        const linger at_once{1, 0};
        setsockopt(client.channel->fd(), SOL_SOCKET, SO_LINGER, &at_once, sizeof(at_once));
    }
    if (client.stage == Stage::kWaiting) records.forget(client.id);
    client.stage = Stage::kEnded;
    stop_waiting(client);
    set_deadline(client, Clock::time_point::max());
    strangers_.remove(static_cast<uint64_t>(client.id));
    if (!client.is_stranger) --num_clients_;
    const auto named = by_name_.find(client.name);
    if (named != by_name_.end() && named->second == client.id) by_name_.erase(named);
    held_ -= std::exchange(client.held, 0);
    // The Client object stays until remove_ended(), because callers may still hold references.
    client.in.clear();
    client.out.clear();
    ready_.erase(client.id);
    ended_.push_back(client.id);
}

void StoreHost::Server::remove_ended() {
    for (const int id : std::exchange(ended_, {})) clients_.erase(id);
}

void StoreHost::Server::set_deadline(Client& client, Clock::time_point deadline) {
    constexpr auto kNone = Clock::time_point::max();
    if (client.deadline != kNone) deadlines_.erase({client.deadline, client.id});
    client.deadline = deadline;
    if (deadline != kNone) deadlines_.insert({deadline, client.id});
}

void StoreHost::Server::end_late() {
    const auto now = Clock::now();
    while (!deadlines_.empty() && deadlines_.begin()->first <= now) {
        Client& client = *clients_.at(deadlines_.begin()->second);
        if (client.stage != Stage::kWaiting) {
            end(client);
            continue;
        }
        set_deadline(client, Clock::time_point::max());
        with_waiting(client.id, [&](Client& late) {
            if (!late.run.empty()) return reply_record(late);
            reply(late, {static_cast<uint8_t>(Answer::kLate), 0, {}});
            pump(late);
        });
    }
}

void StoreHost::Server::charge(Client& client) {
    held_ -= client.held;
    client.held = client.in.capacity() + client.out.num_bytes() + bytes_in(client.keys);
    held_ += client.held;
    while (held_ > kMostHeld) {
        const auto most = std::max_element(
            clients_.begin(), clients_.end(),
            [](const auto& a, const auto& b) { return a.second->held < b.second->held; });
        end(*most->second);
    }
}

void StoreHost::Server::look_for(Client& client, uint32_t events) {
    if (client.events == events) return;
    epoll_event event{};
    event.events = client.events = events;
    event.data.u64 = static_cast<uint64_t>(client.id);
    epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, client.channel->fd(), &event);
}

// ------------------------------------------------------------------------------------ requests

void StoreHost::Server::pump(Client& client) {
    try {
        for (int i = 0; i < kMostTurns; ++i) {
            if (!turn(client)) break;
            if (i + 1 == kMostTurns) ready_.insert(client.id);
        }
        if (client.stage != Stage::kEnded) charge(client);
    } catch (const std::exception&) {
        // The connection has failed, or the client has broken the protocol. Its own process reports
        // the error.
        end(client);
    }
}

bool StoreHost::Server::turn(Client& client) {
    Channel::Outcome outcome = Channel::Outcome::kDone;
    switch (client.stage) {
        case Stage::kShaking:
            if (!speaks_alike(client)) {
                end(client);
                return false;
            }
            outcome = client.channel->handshake();
            if (outcome == Channel::Outcome::kDone) client.stage = Stage::kReading;
            break;
        case Stage::kReading:
            outcome = client.in.read(*client.channel,
                                     client.is_stranger ? kMostGreeting : Packet::kMostBytes);
            if (outcome == Channel::Outcome::kDone) heard(client);
            break;
        case Stage::kWriting:
            outcome = client.out.write(*client.channel);
            if (outcome != Channel::Outcome::kDone) break;
            client.out.clear();
            client.stage = Stage::kReading;
            if (!client.is_stranger) set_deadline(client, Clock::time_point::max());
            break;
        case Stage::kWaiting:
            break;  // checked below: the client may have closed, or sent bytes out of turn
        case Stage::kEnded:
            return false;
    }
    if (client.stage == Stage::kWaiting) {
        if (client.channel->is_over()) end(client);
        look_for(client, EPOLLIN | EPOLLRDHUP);
        return false;
    }
    switch (outcome) {
        case Channel::Outcome::kDone:
            return client.stage != Stage::kEnded;
        case Channel::Outcome::kWantsRead:
            look_for(client, EPOLLIN);
            return false;
        case Channel::Outcome::kWantsWrite:
            look_for(client, EPOLLOUT);
            return false;
        case Channel::Outcome::kClosed:
        case Channel::Outcome::kFailed:
            end(client);
            return false;
    }
    return false;
}

// Whether client and host both use TLS, or both do not. If not, sends an error that the client
// understands: a plain packet or a TLS alert.
bool StoreHost::Server::speaks_alike(Client& client) {
    constexpr std::array<char, 7> kAlert{link::kTlsAlert, 3, 3, 0, 2, 2, 40};  // handshake_failure
    const int fd = client.channel->fd();
    const bool has_keys = client.channel->has_keys();
    uint8_t first = 0;
    if (client.has_spoken) return true;
    if (recv(fd, &first, 1, MSG_PEEK | MSG_DONTWAIT) != 1) return true;
    client.has_spoken = true;
    if ((first == link::kTlsHandshake) == has_keys) return true;
    if (has_keys) {
        store::Channel plain(Descriptor([fd] { return fcntl(fd, F_DUPFD_CLOEXEC, 0); }), nullptr,
                             false, {});
        store::Outgoing(failed("has keys: give Link(keys=...), or --keys")).write(plain);
    } else {
        ::send(fd, kAlert.data(), kAlert.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    }
    return false;
}

void StoreHost::Server::heard(Client& client) {
    received_bytes_ += static_cast<int64_t>(client.in.num_bytes());
    ++num_requests_;
    Packet request = client.in.take(Packet::kMostParts + 1);
    const Request kind = kind_of(request);
    if (client.is_stranger && kind != Request::kHello) {
        throw std::runtime_error("a client of a store begins with its hello");
    }
    // The key may have been removed since the last end_disallowed().
    if (client.channel->has_keys() && !is_allowed(client.channel->peer())) {
        throw std::runtime_error("the key of this client was removed");
    }
    try {
        const bool changes = changes_values(kind) || kind == Request::kSwap ||
                             kind == Request::kPost ||
                             (kind == Request::kBeat && !request.parts.at(1).empty());
        if (changes && may_only_read(client)) {
            throw std::invalid_argument("the key of this client may only read here");
        }
        if (kind == Request::kGet || kind == Request::kWait) {
            start_wait(client, request);
        } else if (kind == Request::kWatch) {
            start_watch(client, request);
        } else if (kind == Request::kSwap) {
            swap(client, request);
        } else if (kind == Request::kPost) {
            posts.put(request.parts.at(0), request.parts.at(1), request.parts.at(2));
        } else {
            reply(client, answer(client, request));
        }
    } catch (const std::logic_error& error) {
        // kPost has no answer, not even an error.
        kind == Request::kPost ? void(++num_refused_posts_) : reply(client, failed(error.what()));
    }
}

store::Packet StoreHost::Server::answer(Client& client, Packet& request) {
    const Request kind = kind_of(request);
    if (changes_values(kind)) return change(client, request);
    switch (kind) {
        case Request::kHello:
            return welcome(client, request);
        case Request::kRead:
            return done(records.read(request.parts.at(0)));
        case Request::kBeat:
            return look(request);
        default:
            return table.answer(request);
    }
}

// Answers kBeat. The parts of the answer: the record, or "" if the client knows it; its revision;
// the counts of beats; "1" if all beats follow; then member, text and age of each beat.
store::Packet StoreHost::Server::look(const Packet& request) {
    const Keys& parts = request.parts;
    const uint64_t known = std::stoull(parts.at(3)), revision = std::stoull(parts.at(4));
    store::Beats::Seen seen = beats.beat(parts[0], parts[1], parts[2], known);
    store::Records::Record record = records.read(parts[0]);
    if (record.revision == revision) record.bytes.clear();
    Keys found{std::move(record.bytes), std::to_string(record.revision), std::move(seen.counts),
               seen.is_whole ? "1" : ""};
    found.insert(found.end(), std::make_move_iterator(seen.changed.begin()),
                 std::make_move_iterator(seen.changed.end()));
    return done(static_cast<int64_t>(seen.version), std::move(found));
}

store::Packet StoreHost::Server::welcome(Client& client, const Packet& request) {
    // A client of another version will close the connection itself.
    if (request.parts.at(0) != store::kProtocol) return done(0, {store::kProtocol});
    const std::string& name = request.parts.at(1);
    if (name.empty() || name.size() > kMostClientName) {
        throw std::invalid_argument("a client gives itself a name of 1 to 64 bytes");
    }
    if (std::exchange(client.is_stranger, false)) {
        strangers_.remove(static_cast<uint64_t>(client.id));
        ++num_clients_;
        // If the client has dialled anew, requests over its old connection must not count any more.
        const auto former = by_name_.find(name);
        if (former != by_name_.end()) end(*clients_.at(former->second));
        by_name_[client.name = name] = client.id;
    }
    return done(records.is_journalled() ? 1 : 0,
                {store::kProtocol, table_id, process_, store::kPosts});
}

// Carries out a request that changes values, or repeats the last answer if the client repeats its
// last request.
store::Packet StoreHost::Server::change(Client& client, Packet& request) {
    const int64_t number = std::stoll(request.parts.at(request.parts.size() - 1));
    request.parts.pop_back();
    const auto placed = remembered_.try_emplace(client.name);
    Remembered& last = placed.first->second;
    if (placed.second) {
        last.turn = turns_.insert(turns_.end(), client.name);
    } else {
        turns_.splice(turns_.end(), turns_, last.turn);
        if (number == last.number) return last.answer;
        if (number < last.number) throw std::invalid_argument("this request is an old one");
    }
    Packet answer;
    try {
        answer = table.answer(request);
    } catch (const std::logic_error& error) {
        answer = failed(error.what());
    }
    last.number = number;
    last.answer = bytes_in(answer.parts) <= kMostRememberedBytes
                      ? answer
                      : failed("the answer was lost, and is too long to be given again");
    if (remembered_.size() > kMostRemembered) {
        remembered_.erase(turns_.front());
        turns_.pop_front();
    }
    return answer;
}

void StoreHost::Server::reply(Client& client, const Packet& packet) {
    stop_waiting(client);
    try {
        client.out = store::Outgoing(packet);
    } catch (const std::invalid_argument& error) {
        client.out = store::Outgoing(failed(error.what()));
    }
    client.stage = Stage::kWriting;
    sent_bytes_ += static_cast<int64_t>(client.out.num_bytes());
    if (!client.is_stranger) set_deadline(client, Clock::now() + kTaken);
}

// --------------------------------------------------------------------------------------- waits

void StoreHost::Server::start_wait(Client& client, Packet& request) {
    client.keys = std::move(request.parts);
    client.wants_values = kind_of(request) == Request::kGet;
    set_deadline(client, store::after(milliseconds(request.number)));
    reply_values(client);
}

// Answers kGet or kWait if all keys are set; else waits for a missing key.
void StoreHost::Server::reply_values(Client& client) {
    std::string missing;
    auto values = table.find(client.keys, missing);
    if (values) {
        reply(client, done(0, client.wants_values ? std::move(*values) : Keys{}));
        return;
    }
    client.stage = Stage::kWaiting;
    client.watched = missing;
    waiting_for_key_[missing].insert(client.id);
}

void StoreHost::Server::go_on(const Keys& fresh) {
    for (const std::string& key : fresh) {
        const auto waiting = waiting_for_key_.extract(key);
        if (waiting.empty()) continue;
        for (const int id : waiting.mapped()) {
            with_waiting(id, [&](Client& client) {
                client.watched.reset();
                reply_values(client);
                if (client.stage == Stage::kWriting) pump(client);
            });
        }
    }
}

// Calls `body` for a waiting client. An exception fails this client's request only.
template <typename Body>
void StoreHost::Server::with_waiting(int id, Body body) {
    const auto found = clients_.find(id);
    if (found == clients_.end() || found->second->stage != Stage::kWaiting) return;
    Client& client = *found->second;
    try {
        body(client);
    } catch (const std::logic_error& error) {
        reply(client, failed(error.what()));
        pump(client);
    } catch (const std::exception&) {  // no memory is left
        end(client);
    }
}

void StoreHost::Server::start_watch(Client& client, const Packet& request) {
    store::check_name("run", request.parts.at(0));
    client.revision = std::stoull(request.parts.at(1));
    client.run = request.parts.at(0);
    if (records.read(client.run).revision != client.revision) {
        reply_record(client);
        return;
    }
    set_deadline(client, store::after(milliseconds(request.number)));
    client.stage = Stage::kWaiting;
    waiting_for_record_[client.run].insert(client.id);
}

void StoreHost::Server::reply_record(Client& client) {
    const bool was_waiting = client.stage == Stage::kWaiting;
    reply(client, done(records.read(client.run)));
    if (was_waiting) pump(client);
}

void StoreHost::Server::swap(Client& client, const Packet& request) {
    records.swap(client.id, request.parts);
    client.stage = Stage::kWaiting;
    poke();  // run the loop again, because finish_swaps() may be running already
}

void StoreHost::Server::finish_swaps() {
    Keys runs;
    for (const store::Records::Done& done : records.advance(runs)) {
        with_waiting(done.client, [&](Client& client) {
            reply(client, done.answer);
            pump(client);
        });
    }
    for (const std::string& run : runs) {
        const auto waiting = waiting_for_record_.extract(run);
        if (waiting.empty()) continue;
        for (const int id : waiting.mapped()) {
            with_waiting(id, [&](Client& client) { reply_record(client); });
        }
    }
}

void StoreHost::Server::stop_waiting(Client& client) {
    const auto leave = [&](Waiting& waiting, const std::string& what) {
        const auto found = waiting.find(what);
        if (found == waiting.end()) return;
        found->second.erase(client.id);
        if (found->second.empty()) waiting.erase(found);
    };
    if (client.watched) {
        leave(waiting_for_key_, *client.watched);
        if (waiting_for_key_.count(*client.watched) == 0) table.unwatch(*client.watched);
    }
    if (!client.run.empty()) leave(waiting_for_record_, client.run);
    client.watched.reset();
    client.run.clear();
    client.keys = {};
}

// ----------------------------------------------------------------------------------- the host

StoreHost::StoreHost(Options options)
    : Values(options.timeout),
      server_(std::make_shared<Server>(std::move(options))),
      thread_([server = server_] { server->run(); }) {}

StoreHost::~StoreHost() { close(); }

void StoreHost::close() {
    const std::lock_guard<std::mutex> turn(closing_);
    if (!thread_.joinable()) return;
    if (getpid() != process_) {
        // The thread is the parent's; a child of fork() has none to wait for.
        thread_.detach();
        return;
    }
    server_->stop();
    thread_.join();
}

void StoreHost::allow(PublicKeys keys, PublicKeys readers) {
    server_->allow(std::move(keys), std::move(readers));
}

int64_t StoreHost::num_clients() const { return server_->num_clients(); }

const std::string& StoreHost::table_id() const { return server_->table_id; }

std::vector<store::Beats::Last> StoreHost::beats() const { return server_->beats.all(); }

std::vector<store::Beats::Last> StoreHost::posted() const { return server_->posts.all(); }

std::map<std::string, std::string> StoreHost::all_records() const { return server_->records.all(); }

StoreHost::Facts StoreHost::facts() const { return server_->facts(); }

void StoreHost::post(const std::string& run, const std::string& member, const std::string& text) {
    check_process();
    server_->posts.put(run, member, text);
}

std::vector<store::Change> StoreHost::take_changes(milliseconds time) {
    return server_->records.take(time);
}

void StoreHost::settle(const std::string& sentence, bool is_doubtful) {
    server_->records.settle(sentence, is_doubtful);
}

// ------------------------------------------------------------------- the store of this process

c10::intrusive_ptr<c10d::Store> StoreHost::clone() {
    return c10::intrusive_ptr<c10d::Store>::unsafe_reclaim_from_nonowning(this);
}

void StoreHost::check_process() const {
    if (getpid() == process_) return;
    C10_THROW_ERROR(DistStoreError,
                    "the parent of this process hosts this store: a forked child connects to it");
}

store::Packet StoreHost::ask(store::Request request, store::Keys parts, int64_t number) {
    check_process();
    return server_->table.answer({static_cast<uint8_t>(request), number, std::move(parts)});
}

store::Packet StoreHost::wait_for(store::Request request, const store::Keys& keys,
                                  milliseconds time) {
    check_process();
    auto values = server_->table.wait(keys, store::after(time));
    if (!values) C10_THROW_ERROR(DistStoreError, store::words_of_late(keys, time.count()));
    return {static_cast<uint8_t>(store::Answer::kDone), 0, std::move(*values)};
}

}  // namespace diloco
