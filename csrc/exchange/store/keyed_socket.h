// Requests and answers over one TLS connection, for the threads of a store's client and host. The
// functions wait; each wait has an end.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "exchange/link/sockets.h"
#include "exchange/link/tls.h"

namespace diloco::store {

using Clock = std::chrono::steady_clock;
// The longest wait: a limit of more years would overflow the clock.
constexpr std::chrono::hours kForever{87600};

// A request or an answer.
struct Packet {
    // A packet with more bytes ends the connection.
    static constexpr uint64_t kMostBytes = uint64_t{64} << 20;

    uint8_t kind = 0;
    int64_t number = 0;
    std::vector<std::string> parts{};
};

enum class Request : uint8_t {
    kHello,       // both sides begin with it; parts: kProtocol
    kSet,         // parts: key, value
    kCompareSet,  // parts: key, expected, desired
    kGet,         // parts: keys; number: milliseconds for them to come
    kAdd,         // parts: key; number: what is added
    kDelete,      // parts: key
    kCheck,       // parts: keys
    kWait,        // parts: keys; number: milliseconds
    kCount,       // no parts
    kAppend,      // parts: key, value
    kMultiSet,    // parts: key, value, key, value, ...
    kListKeys,    // no parts
};

enum class Answer : uint8_t {
    kDone,    // number or parts
    kLate,    // a key did not come in time
    kFailed,  // parts: a sentence
};

constexpr char kProtocol[] = "diloco store 1";

// Values are bytes to c10d and text here.
inline std::string text_of(const std::vector<uint8_t>& bytes) {
    return {bytes.begin(), bytes.end()};
}
inline std::vector<uint8_t> bytes_of(const std::string& text) { return {text.begin(), text.end()}; }

// Key, value, key, value, ...; throws std::invalid_argument where the numbers differ.
std::vector<std::string> pairs_of(const std::vector<std::string>& keys,
                                  const std::vector<std::vector<uint8_t>>& values);

// The other side has refused this one, or speaks something else: another attempt is of no use.
class Refused : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

// Says that keys did not come within a time.
std::string words_of_late(const std::vector<std::string>& keys, int64_t milliseconds);

// One connection. Two threads may not use a socket at the same time, but for shut_down().
class KeyedSocket {
  public:
    // A non-blocking socket that is connected.
    KeyedSocket(Descriptor fd, std::shared_ptr<link::Identity> identity, bool is_dialler,
                link::TlsSession::IsAllowed is_allowed);
    ~KeyedSocket();
    KeyedSocket(const KeyedSocket&) = delete;
    KeyedSocket& operator=(const KeyedSocket&) = delete;

    // These functions throw std::runtime_error, with one sentence, when the connection has ended or
    // `end` has passed. Then the connection is of no more use. The class is Refused where the
    // session has failed rather than ended.
    void shake_hands(Clock::time_point end);
    void send(const Packet& packet, Clock::time_point end);
    Packet receive(Clock::time_point end);

    // Whether the peer has ended the connection, or speaks although it has asked for an answer.
    bool is_over() const;
    // Ends the calls of the other thread.
    void shut_down();

    // After shake_hands().
    const link::PublicKey& peer() const { return session_.peer(); }

  private:
    // Waits for what the session wants; throws where that is nothing any more.
    void wait_for(link::TlsSession::Outcome outcome, Clock::time_point end);
    void write(const std::string& bytes, Clock::time_point end);
    void read(std::string& bytes, Clock::time_point end);

    const Descriptor fd_;
    link::TlsSession session_;
};

}  // namespace diloco::store
