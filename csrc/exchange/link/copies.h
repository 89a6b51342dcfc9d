// Requests between processes outside of groups, and their answers. The bodies of answers, called
// copies, yield to the messages of rounds.
//
// A request and the head of its answer are short, and the link does not look into them. The body of
// an answer follows in fragments, over the connection on which the request came. A request names
// the service that is to answer, since several services may share a link.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "exchange/link/connection.h"

namespace diloco {

class Link;

namespace link {

// The most requests of one connection whose answers have not been sent completely.
constexpr size_t kMostRequests = 8;

// The hash of a service's name, which stands for the name on the wire.
uint64_t hash_of(const std::string& name);
// The bytes of 32 hexadecimal digits; std::invalid_argument for another text.
Nonce nonce_of(const std::string& text);

// The bytes of an answer's body, which live as long as `owner`.
struct Body {
    std::shared_ptr<const void> owner{};
    const uint8_t* data = nullptr;
    uint64_t num_bytes = 0;
};

// A request that waits for its answer.
struct Request {
    std::weak_ptr<Link> link{};
    std::weak_ptr<Connection> connection{};
    uint64_t connection_id = 0;
    uint32_t ticket = 0;
    std::vector<uint8_t> bytes{};

    // Sends the answer. Does nothing if the connection has ended.
    void answer(std::vector<uint8_t> head, Body body) const;
};

class Responder {
  public:
    virtual ~Responder() = default;
    // Takes a request, to answer it later on another thread. Called on the link's thread under its
    // mutex, so neither take() nor the destructor may wait or call answer(). Returns false if the
    // request will not be answered.
    virtual bool take(Request request) = 0;
};

// The answer to a request of this process. The head is empty if the peer does not serve the
// request, if the connection ended before the whole answer had arrived, or if the body is longer
// than accepted.
struct Reply {
    uint32_t ticket = 0;
    std::vector<uint8_t> head{};
    Body body{};
};

// A request of this process whose answer has not arrived completely.
struct Inquiry {
    uint64_t service = 0;  // the hash of the service's name
    uint64_t connection_id = 0;
    uint64_t most_bytes = 0;  // the longest body that is accepted
    Reply reply{};
    MessagePtr target{};  // receives the body; null before the head has arrived
};

// Limits the share of the link that copies take. Without rounds, copies may take all of it. While
// bytes of rounds are being sent, copies get a small share, so that rounds never starve them.
class CopyShare {
  public:
    // Counts bytes of rounds that were sent. If `earns`, copies wait, and earn a credit of bytes.
    void count_round(uint64_t num_bytes, bool earns, Clock::time_point now);
    void count_copies(uint64_t num_bytes);
    // Whether copies may be sent now. `has_rounds`: a message of a round is to be sent, or its
    // bytes are not acknowledged.
    bool is_open(bool has_rounds, Clock::time_point now);

  private:
    bool is_busy(Clock::time_point now) const;

    bool has_rounds_ = false;
    Clock::time_point sent_at_{};  // when the last byte of a round was sent
    double credit_ = 0;            // bytes of copies that may be sent beside rounds
};

}  // namespace link
}  // namespace diloco
