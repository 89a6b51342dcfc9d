#include "exchange/store/store_host.h"

#include <c10/util/Exception.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <map>
#include <stdexcept>
#include <utility>

#include "exchange/link/connection.h"

namespace diloco {

using store::Answer;
using store::bytes_of;
using store::Clock;
using store::KeyedSocket;
using store::kForever;
using store::Packet;
using store::Request;
using store::Table;
using store::text_of;
using Keys = Table::Keys;

namespace store {

void Table::set(const Keys& pairs) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (size_t i = 0; i + 1 < pairs.size(); i += 2) values_[pairs[i]] = pairs[i + 1];
    changed_.notify_all();
}

std::string Table::compare_set(const std::string& key, const std::string& expected,
                               const std::string& desired) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = values_.find(key);
    if (found == values_.end() && !expected.empty()) return expected;
    if (found != values_.end() && found->second != expected) return found->second;
    values_[key] = desired;
    changed_.notify_all();
    return desired;
}

int64_t Table::add(const std::string& key, int64_t amount) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::string& value = values_[key];
    int64_t sum = 0;
    const char* const end = value.data() + value.size();
    const auto [stop, error] = std::from_chars(value.data(), end, sum);
    if (!value.empty() && (error != std::errc() || stop != end)) {
        throw std::invalid_argument("add() needs a number, and the store holds text at " + key);
    }
    if (__builtin_add_overflow(sum, amount, &sum)) {
        throw std::invalid_argument("the number of the store at " + key + " would be too large");
    }
    value = std::to_string(sum);
    changed_.notify_all();
    return sum;
}

void Table::append(const std::string& key, const std::string& value) {
    const std::lock_guard<std::mutex> lock(mutex_);
    values_[key] += value;
    changed_.notify_all();
}

bool Table::remove(const std::string& key) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return values_.erase(key) > 0;
}

bool Table::has_all(const Keys& keys) const {
    return std::all_of(keys.begin(), keys.end(),
                       [this](const std::string& key) { return values_.count(key) > 0; });
}

bool Table::has(const Keys& keys) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return has_all(keys);
}

Keys Table::list() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    Keys keys;
    for (const auto& [key, value] : values_) keys.push_back(key);
    return keys;
}

std::optional<Keys> Table::wait(const Keys& keys, Clock::time_point end,
                                const std::function<bool()>& is_over) {
    constexpr std::chrono::seconds kAsk{1};
    std::unique_lock<std::mutex> lock(mutex_);
    while (!has_all(keys)) {
        const auto now = Clock::now();
        if (now >= end || is_over()) return std::nullopt;
        changed_.wait_until(lock, std::min(end, now + kAsk));
    }
    Keys values;
    for (const std::string& key : keys) values.push_back(values_.at(key));
    return values;
}

}  // namespace store

namespace {

// At most so many clients whose key is not known yet, and so many in all.
constexpr int kMostStrangers = 64;
constexpr size_t kMostClients = 4096;
constexpr std::chrono::seconds kHandshake{5};
// A client that takes no answer for so long is gone.
constexpr std::chrono::seconds kAnswer{60};

Clock::time_point after(std::chrono::milliseconds time) {
    return Clock::now() + std::clamp<std::chrono::milliseconds>(time, {}, kForever);
}

}  // namespace

// ---------------------------------------------------------------------------------- clients

struct StoreHost::Client {
    KeyedSocket* socket = nullptr;  // null before and after the connection
    std::string origin{};           // the address of its host
    std::optional<link::PublicKey> key{};
    bool has_been_ended = false;
};

struct StoreHost::Shared {
    Shared(Descriptor socket, std::shared_ptr<link::Identity> identity,
           std::set<link::PublicKey> keys)
        : listener(std::move(socket)), identity(std::move(identity)) {
        allowed.replace(std::move(keys));
        // A caller may hang up between poll() and accept4(), which must not wait for the next one.
        fcntl(listener.get(), F_SETFL, fcntl(listener.get(), F_GETFL) | O_NONBLOCK);
    }

    bool is_allowed(const link::PublicKey& key) const {
        return key == identity->public_key() || allowed.has(key);
    }

    // The oldest stranger of the host that has the most of them: one host cannot keep others out.
    void end_a_stranger() {
        std::map<std::string, int> counts;
        const auto may_end = [](const Client& client) {
            return !client.key && !client.has_been_ended && client.socket != nullptr;
        };
        for (const auto& [id, client] : clients) counts[client.origin] += may_end(client) ? 1 : 0;
        Client* chosen = nullptr;
        for (auto& [id, client] : clients) {
            if (!may_end(client)) continue;
            if (!chosen || counts[client.origin] > counts[chosen->origin]) chosen = &client;
        }
        if (!chosen) return;
        chosen->socket->shut_down();
        chosen->has_been_ended = true;
    }

    const Descriptor listener;
    const std::shared_ptr<link::Identity> identity;
    link::Keyring allowed;
    Table table;

    std::mutex mutex;
    std::condition_variable client_changed;
    std::map<int, Client> clients;  // by age
    int num_strangers = 0;
    bool is_closing = false;
};

StoreHost::StoreHost(Descriptor listener, std::shared_ptr<link::Identity> identity,
                     std::set<link::PublicKey> allowed, milliseconds timeout)
    : Store(timeout),
      shared_(
          std::make_shared<Shared>(std::move(listener), std::move(identity), std::move(allowed))),
      thread_([shared = shared_] { accept_all(shared); }) {}

StoreHost::~StoreHost() { close(); }

void StoreHost::close() {
    const std::lock_guard<std::mutex> turn(closing_);
    if (!thread_.joinable()) return;
    if (getpid() != process_) {
        // The threads are the parent's; a child of fork() has none to wait for.
        thread_.detach();
        return;
    }
    {
        std::unique_lock<std::mutex> lock(shared_->mutex);
        shared_->is_closing = true;
        ::shutdown(shared_->listener.get(), SHUT_RDWR);
        for (auto& [id, client] : shared_->clients) {
            if (client.socket) client.socket->shut_down();
        }
        shared_->table.wake();
        shared_->client_changed.wait(lock, [&] { return shared_->clients.empty(); });
    }
    thread_.join();
}

void StoreHost::allow(std::set<link::PublicKey> keys) {
    shared_->allowed.replace(std::move(keys));
    const std::lock_guard<std::mutex> lock(shared_->mutex);
    for (auto& [id, client] : shared_->clients) {
        if (client.socket && client.key && !shared_->is_allowed(*client.key)) {
            client.socket->shut_down();
        }
    }
}

int64_t StoreHost::num_clients() const {
    const std::lock_guard<std::mutex> lock(shared_->mutex);
    return std::count_if(shared_->clients.begin(), shared_->clients.end(),
                         [](const auto& entry) { return entry.second.key.has_value(); });
}

void StoreHost::accept_all(const std::shared_ptr<Shared>& shared) {
    pthread_setname_np(pthread_self(), "diloco-host");
    // Signals are for the program's threads. The threads of the clients inherit this.
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, nullptr);
    for (int id = 0;; ++id) {
        pollfd one{shared->listener.get(), POLLIN, 0};
        poll(&one, 1, -1);
        Descriptor fd([&] {
            return accept4(shared->listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
        });
        const int error = fd ? 0 : errno;
        if (error == EMFILE || error == ENFILE || error == ENOMEM || error == ENOBUFS) {
            // The caller waits in the kernel's queue until this process has room.
            std::this_thread::sleep_for(std::chrono::milliseconds(100));
        }
        std::unique_lock<std::mutex> lock(shared->mutex);
        // One of too many strangers goes: an allowed client shows its key at once.
        while (!shared->is_closing && fd && shared->num_strangers >= kMostStrangers) {
            shared->end_a_stranger();
            shared->client_changed.wait_for(lock, std::chrono::milliseconds(100));
        }
        if (shared->is_closing) return;
        if (!fd || shared->clients.size() >= kMostClients) continue;
        const std::string name = name_of_peer(fd.get());
        shared->clients[id].origin = name.substr(0, name.rfind(':'));
        ++shared->num_strangers;
        try {
            std::thread(serve, shared, id, std::move(fd)).detach();
        } catch (const std::system_error&) {
            shared->clients.erase(id);
            --shared->num_strangers;
        }
    }
}

// The life of one connection.
void StoreHost::serve(const std::shared_ptr<Shared>& shared, int id, Descriptor fd) {
    pthread_setname_np(pthread_self(), "diloco-client");
    bool is_strange = true;
    const auto note = [&](KeyedSocket* socket, std::optional<link::PublicKey> key) {
        const std::lock_guard<std::mutex> lock(shared->mutex);
        shared->clients[id].socket = socket;
        shared->clients[id].key = key;
        if (is_strange && key) {
            --shared->num_strangers;
            is_strange = false;
            shared->client_changed.notify_all();
        }
        // A key may have been removed, and the host may have closed, before this client was noted.
        if (socket && (shared->is_closing || (key && !shared->is_allowed(*key)))) {
            socket->shut_down();
        }
    };
    try {
        link::set_options(fd.get());
        KeyedSocket socket(std::move(fd), shared->identity, false,
                           [&](const link::PublicKey& key) { return shared->is_allowed(key); });
        note(&socket, std::nullopt);
        try {
            const auto end = Clock::now() + kHandshake;
            socket.shake_hands(end);
            Packet request = socket.receive(end);
            if (request.kind != static_cast<uint8_t>(Request::kHello)) {
                throw std::runtime_error("a client of a store begins with its hello");
            }
            note(&socket, socket.peer());
            while (true) {
                const auto limit = Clock::now() + kAnswer;
                try {
                    socket.send(answer(*shared, socket, request), limit);
                } catch (const std::invalid_argument& error) {  // nothing was sent
                    socket.send({static_cast<uint8_t>(Answer::kFailed), 0, {error.what()}}, limit);
                }
                request = socket.receive(after(kForever));
            }
        } catch (const std::exception&) {
            // The client has ended, or is a stranger. Its own side says why.
        }
        note(nullptr, std::nullopt);
    } catch (const std::exception&) {
        // There is no memory, or OpenSSL is over: the connection ends.
    }
    const std::lock_guard<std::mutex> lock(shared->mutex);
    if (is_strange) --shared->num_strangers;
    shared->clients.erase(id);
    shared->client_changed.notify_all();
}

Packet StoreHost::answer(Shared& shared, KeyedSocket& socket, const Packet& request) {
    const auto done = [](int64_t number, Keys parts = {}) {
        return Packet{static_cast<uint8_t>(Answer::kDone), number, std::move(parts)};
    };
    const Keys& parts = request.parts;
    Table& table = shared.table;
    const auto is_over = [&] { return socket.is_over(); };
    try {
        switch (static_cast<Request>(request.kind)) {
            case Request::kHello:
                return done(0, {store::kProtocol});
            case Request::kSet:
            case Request::kMultiSet:
                return table.set(parts), done(0);
            case Request::kCompareSet:
                return done(0, {table.compare_set(parts.at(0), parts.at(1), parts.at(2))});
            case Request::kGet:
            case Request::kWait: {
                auto values = table.wait(parts, after(milliseconds(request.number)), is_over);
                if (!values) return {static_cast<uint8_t>(Answer::kLate), 0, {}};
                const bool is_get = request.kind == static_cast<uint8_t>(Request::kGet);
                return done(0, is_get ? std::move(*values) : Keys{});
            }
            case Request::kAdd:
                return done(table.add(parts.at(0), request.number));
            case Request::kDelete:
                return done(table.remove(parts.at(0)));
            case Request::kCheck:
                return done(table.has(parts));
            case Request::kCount:
                return done(static_cast<int64_t>(table.list().size()));
            case Request::kAppend:
                return table.append(parts.at(0), parts.at(1)), done(0);
            case Request::kListKeys:
                return done(0, table.list());
        }
        throw std::invalid_argument("the store knows no request of kind " +
                                    std::to_string(request.kind));
    } catch (const std::logic_error& error) {
        return {static_cast<uint8_t>(Answer::kFailed), 0, {error.what()}};
    }
}

// ------------------------------------------------------------------- the store of this process

c10::intrusive_ptr<c10d::Store> StoreHost::clone() {
    return c10::intrusive_ptr<c10d::Store>::unsafe_reclaim_from_nonowning(this);
}

void StoreHost::set(const std::string& key, const Bytes& value) {
    shared_->table.set({key, text_of(value)});
}

StoreHost::Bytes StoreHost::compareSet(const std::string& key, const Bytes& expected,
                                       const Bytes& desired) {
    return bytes_of(shared_->table.compare_set(key, text_of(expected), text_of(desired)));
}

Keys StoreHost::wait_for(const Keys& keys, milliseconds timeout) {
    auto values = shared_->table.wait(keys, after(timeout));
    if (!values) {
        C10_THROW_ERROR(DistStoreError, store::words_of_late(keys, timeout.count()));
    }
    return std::move(*values);
}

StoreHost::Bytes StoreHost::get(const std::string& key) {
    return bytes_of(wait_for({key}, timeout_).front());
}

int64_t StoreHost::add(const std::string& key, int64_t value) {
    return shared_->table.add(key, value);
}

bool StoreHost::deleteKey(const std::string& key) { return shared_->table.remove(key); }

bool StoreHost::check(const std::vector<std::string>& keys) { return shared_->table.has(keys); }

int64_t StoreHost::getNumKeys() { return static_cast<int64_t>(listKeys().size()); }

void StoreHost::wait(const std::vector<std::string>& keys) { wait(keys, timeout_); }

void StoreHost::wait(const std::vector<std::string>& keys, const milliseconds& timeout) {
    wait_for(keys, timeout);
}

void StoreHost::append(const std::string& key, const Bytes& value) {
    shared_->table.append(key, text_of(value));
}

std::vector<StoreHost::Bytes> StoreHost::multiGet(const std::vector<std::string>& keys) {
    std::vector<Bytes> values;
    for (const std::string& text : wait_for(keys, timeout_)) values.push_back(bytes_of(text));
    return values;
}

void StoreHost::multiSet(const std::vector<std::string>& keys, const std::vector<Bytes>& values) {
    shared_->table.set(store::pairs_of(keys, values));
}

std::vector<std::string> StoreHost::listKeys() { return shared_->table.list(); }

}  // namespace diloco
