#include "exchange/store/keyed_store.h"

#include <c10/util/Exception.h>
#include <netdb.h>

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <thread>
#include <utility>

#include "exchange/link/connection.h"

namespace diloco {
namespace {

using store::Answer;
using store::bytes_of;
using store::Clock;
using store::KeyedSocket;
using store::kForever;
using store::Packet;
using store::Request;
using store::text_of;

// Between two attempts to connect.
constexpr std::chrono::milliseconds kPause{100};
// A host that has accepted a connection shakes hands so soon; a store without keys never does. It
// may stand still, be full or be started again: so long is it tried again.
constexpr std::chrono::seconds kMostHandshake{10}, kPatience{30};
constexpr char kNoTls[] = "does not speak TLS as a store with keys does: ";
constexpr char kNoStore[] = "does not answer as a store with keys does: ";
// An answer to a wait may come so much later than the wait ends.
constexpr std::chrono::milliseconds kSlack{10000};

}  // namespace

KeyedStore::KeyedStore(Place place, milliseconds timeout)
    : Store(timeout), place_(std::move(place)) {
    connect();
}

void KeyedStore::connect() {
    const auto end = Clock::now() + std::min<milliseconds>(timeout_, kForever);
    std::string trouble = "the host has no address";
    std::optional<Clock::time_point> patience;  // since somebody has accepted a connection
    while (!socket_) {
        Descriptor fd = dial_host(end, trouble);
        if (fd) {
            if (!patience) patience = std::min<Clock::time_point>(end, Clock::now() + kPatience);
            trouble = greet(std::move(fd), *patience);
        }
        if (socket_) return;
        if (Clock::now() + kPause > patience.value_or(end)) {
            give_up(patience ? trouble
                             : "did not answer within " + std::to_string(timeout_.count()) +
                                   " ms: " + trouble);
        }
        std::this_thread::sleep_for(kPause);
    }
}

// One attempt; returns no descriptor, and the reason, where it has failed.
Descriptor KeyedStore::dial_host(Clock::time_point end, std::string& trouble) const {
    const std::string port = std::to_string(place_.port);
    Descriptor fd;
    if (place_.proxy) {
        // A proxy may wait for a host that is not there yet.
        end = std::min<Clock::time_point>(end, Clock::now() + kPatience);
        link::Dialled dialled = link::dial_through(*place_.proxy, place_.host, port, end);
        if (dialled.is_final) give_up("cannot be reached: " + dialled.trouble);
        trouble = dialled.trouble;
        return std::move(dialled.fd);
    }
    for (const Address& address : look_up(place_.host, port, AI_NUMERICSERV)) {
        fd = dial(address, end, trouble);
        if (fd) break;
    }
    return fd;
}

// Returns why the connection is of no use, where another attempt may be.
std::string KeyedStore::greet(Descriptor fd, Clock::time_point end) {
    link::set_options(fd.get());
    end = std::min<Clock::time_point>(end, Clock::now() + kMostHandshake);
    link::PublicKey shown{};
    bool is_strange = false, has_shaken = false;
    const auto is_allowed = [&](const link::PublicKey& key) {
        shown = key;
        is_strange = key != place_.identity->public_key() && place_.allowed.count(key) == 0;
        return !is_strange;
    };
    try {
        auto socket =
            std::make_unique<KeyedSocket>(std::move(fd), place_.identity, true, is_allowed);
        socket->shake_hands(end);
        has_shaken = true;
        socket->send({static_cast<uint8_t>(Request::kHello), 0, {store::kProtocol}}, end);
        const Packet hello = socket->receive(end);
        if (hello.kind == static_cast<uint8_t>(Answer::kDone) &&
            hello.parts == std::vector<std::string>{store::kProtocol}) {
            socket_ = std::move(socket);
            return "";
        }
    } catch (const store::Refused& error) {
        if (is_strange) {
            give_up("has the key " + link::to_hex(shown) +
                    ", which is not among the allowed keys of this process");
        }
        if (has_shaken) {
            give_up("does not let in the key of this process, " +
                    link::to_hex(place_.identity->public_key()) + ": " + error.what());
        }
        give_up(kNoTls + std::string(error.what()));
    } catch (const std::exception& error) {
        return (has_shaken ? kNoStore : kNoTls) + std::string(error.what());
    }
    give_up("is one of another version");
}

void KeyedStore::give_up(const std::string& why) const {
    C10_THROW_ERROR(DistStoreError,
                    "the store at " + place_.host + ":" + std::to_string(place_.port) + " " + why);
}

c10::intrusive_ptr<c10d::Store> KeyedStore::clone() {
    return c10::make_intrusive<KeyedStore>(place_, timeout_);
}

Packet KeyedStore::ask(Request request, std::vector<std::string> parts, int64_t number,
                       milliseconds limit) {
    Packet answer;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (!socket_) {
            C10_THROW_ERROR(DistNetworkError, "the connection to the store has broken");
        }
        const auto end = Clock::now() + std::min<milliseconds>(limit, kForever);
        try {
            socket_->send({static_cast<uint8_t>(request), number, parts}, end);
            answer = socket_->receive(end);
        } catch (const std::invalid_argument& error) {
            C10_THROW_ERROR(DistStoreError, error.what());
        } catch (const std::exception& error) {
            socket_.reset();
            C10_THROW_ERROR(DistNetworkError, "the connection to the store at " + place_.host +
                                                  ":" + std::to_string(place_.port) +
                                                  " has broken: " + error.what());
        }
    }
    if (answer.kind == static_cast<uint8_t>(Answer::kDone)) return answer;
    if (answer.kind == static_cast<uint8_t>(Answer::kLate)) {
        C10_THROW_ERROR(DistStoreError, store::words_of_late(parts, number));
    }
    C10_THROW_ERROR(DistStoreError,
                    answer.parts.empty() ? "the store gives no reason" : answer.parts.front());
}

void KeyedStore::set(const std::string& key, const Bytes& value) {
    ask(Request::kSet, {key, text_of(value)});
}

KeyedStore::Bytes KeyedStore::compareSet(const std::string& key, const Bytes& expected,
                                         const Bytes& desired) {
    const Packet answer = ask(Request::kCompareSet, {key, text_of(expected), text_of(desired)});
    return bytes_of(answer.parts.at(0));
}

std::vector<std::string> KeyedStore::get_all(const std::vector<std::string>& keys) {
    const Packet answer = ask(Request::kGet, keys, timeout_.count(), timeout_ + kSlack);
    TORCH_CHECK_WITH(DistStoreError, answer.parts.size() == keys.size(),
                     "the store has answered for other keys");
    return answer.parts;
}

KeyedStore::Bytes KeyedStore::get(const std::string& key) {
    return bytes_of(get_all({key}).front());
}

int64_t KeyedStore::add(const std::string& key, int64_t value) {
    return ask(Request::kAdd, {key}, value).number;
}

bool KeyedStore::deleteKey(const std::string& key) {
    return ask(Request::kDelete, {key}).number != 0;
}

bool KeyedStore::check(const std::vector<std::string>& keys) {
    return ask(Request::kCheck, keys).number != 0;
}

int64_t KeyedStore::getNumKeys() { return ask(Request::kCount, {}).number; }

void KeyedStore::wait(const std::vector<std::string>& keys) { wait(keys, timeout_); }

void KeyedStore::wait(const std::vector<std::string>& keys, const milliseconds& timeout) {
    ask(Request::kWait, keys, timeout.count(), timeout + kSlack);
}

void KeyedStore::append(const std::string& key, const Bytes& value) {
    ask(Request::kAppend, {key, text_of(value)});
}

std::vector<KeyedStore::Bytes> KeyedStore::multiGet(const std::vector<std::string>& keys) {
    std::vector<Bytes> values;
    for (const std::string& text : get_all(keys)) values.push_back(bytes_of(text));
    return values;
}

void KeyedStore::multiSet(const std::vector<std::string>& keys, const std::vector<Bytes>& values) {
    ask(Request::kMultiSet, store::pairs_of(keys, values));
}

std::vector<std::string> KeyedStore::listKeys() { return ask(Request::kListKeys, {}).parts; }

}  // namespace diloco
