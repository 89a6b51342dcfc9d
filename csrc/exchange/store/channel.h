// Requests and answers of a store, and the connection that carries them: plain, or with TLS.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "exchange/link/sockets.h"
#include "exchange/link/tls.h"

namespace diloco::store {

using Clock = std::chrono::steady_clock;
// The longest wait: a limit of more years would overflow the clock.
constexpr std::chrono::hours kForever{87600};
inline Clock::time_point after(std::chrono::milliseconds time) {
    return Clock::now() + std::clamp<std::chrono::milliseconds>(time, {}, kForever);
}

// A request or an answer.
struct Packet {
    static constexpr uint64_t kMostBytes = uint64_t{64} << 20;
    // A host ends the connection of a client whose request has more.
    static constexpr size_t kMostParts = 1 << 16;

    uint8_t kind = 0;
    int64_t number = 0;
    std::vector<std::string> parts{};
};

// A request that changes values has a last part more: the number that its client has given it, as
// text. The host answers a number that it knows as before, and does nothing.
enum class Request : uint8_t {
    kHello,       // both sides begin with it; parts: kProtocol, random name of the client
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
    kRead,        // parts: run
    kSwap,        // parts: run, expected record, new record
    kBeat,        // parts: run, member or "", text, known version of beats, known revision
    kWatch,       // parts: run, known revision as text; number: milliseconds for another one
    kPost,        // parts: run, member, text; has no answer, and needs a host that says kPosts
};

bool changes_values(Request request);

enum class Answer : uint8_t {
    kDone,    // number or parts
    kLate,    // a key did not come in time
    kFailed,  // parts: a sentence
};

// The answer to a hello: kProtocol, the table's id, the name of the host's process, and kPosts
// where the host knows that request; number: 1 where swaps are in a journal. A host of another
// version answers with its own protocol.
constexpr char kProtocol[] = "diloco store 3", kPosts[] = "posts";

// Values are bytes to c10d and text here.
inline std::string text_of(const std::vector<uint8_t>& bytes) {
    return {bytes.begin(), bytes.end()};
}
inline std::vector<uint8_t> bytes_of(const std::string& text) { return {text.begin(), text.end()}; }

// 32 random hexadecimal digits.
std::string random_name();

// Key, value, key, value, ...; throws std::invalid_argument where the numbers differ.
std::vector<std::string> pairs_of(const std::vector<std::string>& keys,
                                  const std::vector<std::vector<uint8_t>>& values);

// Says that keys did not come within a time.
std::string words_of_late(const std::vector<std::string>& keys, int64_t milliseconds);

// One connection over a non-blocking socket; used by one thread at a time.
class Channel {
  public:
    using Outcome = link::TlsSession::Outcome;

    // Without an identity the connection is plain, and everybody is allowed.
    Channel(Descriptor fd, std::shared_ptr<link::Identity> identity, bool is_dialler,
            link::TlsSession::IsAllowed is_allowed);
    ~Channel();
    Channel(const Channel&) = delete;
    Channel& operator=(const Channel&) = delete;

    // As the functions of TlsSession; a plain connection shakes no hands.
    Outcome handshake();
    Outcome read(char* data, size_t size, size_t& done);
    Outcome write(const char* data, size_t size, size_t& done);
    // Whether the peer has ended the connection, or speaks although nothing was asked.
    bool is_over() const;

    bool has_keys() const { return session_ != nullptr; }
    // With keys, after handshake().
    const link::PublicKey& peer() const { return session_->peer(); }
    std::string trouble() const { return session_ ? session_->trouble() : trouble_; }
    int fd() const { return fd_.get(); }

  private:
    Outcome end(const std::string& trouble);

    const Descriptor fd_;
    std::unique_ptr<link::TlsSession> session_;  // null: plain
    std::string trouble_;
};

// The packet that is being received. Memory grows with the bytes that come, not with the bytes that
// the other side announces.
class Incoming {
  public:
    // kDone: take() returns the packet. Throws std::runtime_error for bytes that are no packet, and
    // for a packet of more than `most` bytes.
    Channel::Outcome read(Channel& channel, uint64_t most = Packet::kMostBytes);
    // Throws std::runtime_error for what is no packet, or has more parts.
    Packet take(size_t most_parts);
    // The bytes of this packet that have come so far.
    size_t num_bytes() const { return at_; }
    size_t capacity() const { return bytes_.capacity(); }
    // Frees the memory, too: a string keeps its own when another one is assigned to it.
    void clear() {
        std::string().swap(bytes_);
        at_ = 0;
    }

  private:
    uint64_t announced() const;

    std::string bytes_;
    size_t at_ = 0;
};

// The packet that is being sent.
class Outgoing {
  public:
    Outgoing() = default;
    // Throws std::invalid_argument for a packet that is too large.
    explicit Outgoing(const Packet& packet);
    Channel::Outcome write(Channel& channel);
    size_t num_bytes() const { return bytes_.size(); }
    // Frees the memory, too.
    void clear() {
        std::string().swap(bytes_);
        at_ = 0;
    }

  private:
    std::string bytes_;
    size_t at_ = 0;
};

}  // namespace diloco::store
