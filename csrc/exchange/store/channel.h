// The requests and answers of a store, and the connection that carries them, with TLS or without.
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
// The longest wait, ten years: far below the 292 years at which a signed 64-bit count of
// nanoseconds overflows.
constexpr std::chrono::hours kForever{87600};
inline Clock::time_point after(std::chrono::milliseconds time) {
    return Clock::now() + std::clamp<std::chrono::milliseconds>(time, {}, kForever);
}

// A request or an answer. The meaning of `number` and `parts` depends on `kind`.
struct Packet {
    static constexpr uint64_t kMostBytes = uint64_t{64} << 20;
    // The most parts of a request; a host closes the connection of a client that sends more.
    static constexpr size_t kMostParts = 1 << 16;

    uint8_t kind = 0;
    int64_t number = 0;
    std::vector<std::string> parts{};
};

// A request that changes values has one more part at the end: a number, as text, that the client
// counts up. If a request comes again with the number of the last one, the host does nothing and
// gives the same answer.
enum class Request : uint8_t {
    kHello,       // the first request; parts: kProtocol, random name of the client
    kSet,         // parts: key, value
    kCompareSet,  // parts: key, expected, desired
    kGet,         // parts: keys; number: milliseconds to wait until all keys are set
    kAdd,         // parts: key; number: the amount that is added
    kDelete,      // parts: key
    kCheck,       // parts: keys
    kWait,        // as kGet, but the answer has no values
    kCount,       // no parts
    kAppend,      // parts: key, value
    kMultiSet,    // parts: key, value, key, value, ...
    kListKeys,    // no parts
    kRead,        // parts: run
    kSwap,        // parts: run, expected record, new record
    kBeat,        // parts: run, member or "", text, known version of beats, known revision
    kWatch,       // parts: run, known revision as text; number: milliseconds to wait for another
                  // revision
    kPost,        // parts: run, member, text; has no answer; only for hosts that say kPosts
};

bool changes_values(Request request);

enum class Answer : uint8_t {
    kDone,    // number and parts have the result
    kLate,    // a key was not set in time
    kFailed,  // parts: a sentence that says why
};

// The parts of the answer to kHello: kProtocol, the table's id, the name of the host's process, and
// kPosts if the host knows kPost. Its number is 1 if swaps are written to a journal. A host of
// another version answers with its own protocol only.
constexpr char kProtocol[] = "diloco store 3", kPosts[] = "posts";

// Conversions of values: vectors of bytes in c10d, and strings here.
inline std::string text_of(const std::vector<uint8_t>& bytes) {
    return {bytes.begin(), bytes.end()};
}
inline std::vector<uint8_t> bytes_of(const std::string& text) { return {text.begin(), text.end()}; }

// 32 random hexadecimal digits.
std::string random_name();

// Returns key, value, key, value, ...; throws std::invalid_argument if there are more keys than
// values or the reverse.
std::vector<std::string> pairs_of(const std::vector<std::string>& keys,
                                  const std::vector<std::vector<uint8_t>>& values);

// The sentence of an error: these keys were not set within this time.
std::string words_of_late(const std::vector<std::string>& keys, int64_t milliseconds);

// One connection over a non-blocking socket; used by one thread at a time.
class Channel {
  public:
    using Outcome = link::TlsSession::Outcome;

    // Without an identity the connection has no TLS, and every peer is allowed.
    Channel(Descriptor fd, std::shared_ptr<link::Identity> identity, bool is_dialler,
            link::TlsSession::IsAllowed is_allowed);
    ~Channel();
    Channel(const Channel&) = delete;
    Channel& operator=(const Channel&) = delete;

    // As the functions of TlsSession. Without TLS, handshake() returns kDone at once.
    Outcome handshake();
    Outcome read(char* data, size_t size, size_t& done);
    Outcome write(const char* data, size_t size, size_t& done);
    // Whether the peer has closed the connection, or has sent bytes while no answer is expected.
    bool is_over() const;

    bool has_keys() const { return session_ != nullptr; }
    // The peer's key. Call only if has_keys(), and after handshake().
    const link::PublicKey& peer() const { return session_->peer(); }
    std::string trouble() const { return session_ ? session_->trouble() : trouble_; }
    int fd() const { return fd_.get(); }

  private:
    Outcome end(const std::string& trouble);

    const Descriptor fd_;
    std::unique_ptr<link::TlsSession> session_;  // null: no TLS
    std::string trouble_;
};

// The packet that is being received. Its memory grows with the bytes that arrive, not with the size
// that the other side announces.
class Incoming {
  public:
    // Reads what has arrived. After kDone, take() returns the packet. Throws std::runtime_error for
    // bytes that are no packet, and for a packet of more than `most` bytes.
    Channel::Outcome read(Channel& channel, uint64_t most = Packet::kMostBytes);
    // Returns the packet. Throws std::runtime_error for bytes that are no packet, and for a packet
    // of more than `most_parts` parts.
    Packet take(size_t most_parts);
    // The number of bytes of this packet that have arrived so far.
    size_t num_bytes() const { return at_; }
    size_t capacity() const { return bytes_.capacity(); }
    // Empties the packet and frees its memory, which an assignment to the string would not do.
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
    // Empties the packet and frees its memory.
    void clear() {
        std::string().swap(bytes_);
        at_ = 0;
    }

  private:
    std::string bytes_;
    size_t at_ = 0;
};

}  // namespace diloco::store
