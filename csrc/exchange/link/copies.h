// Requests of a process to another one outside of groups, and answers below the messages of rounds.
//
// A request and the head of its answer are short, and the link does not look into them. The body of
// an answer follows in fragments, over the connection on which the request came. A process that
// answers names itself by a text, since several services may share a link.
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

// Requests of one connection whose answers have not left to their last byte.
constexpr size_t kMostRequests = 8;

// The number that stands for a name on the wire.
uint64_t hash_of(const std::string& name);
// The bytes of 32 hexadecimal digits; std::invalid_argument for another text.
Nonce nonce_of(const std::string& text);

// The bytes of a body, and what keeps them.
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

    // Does nothing where the connection has ended.
    void answer(std::vector<uint8_t> head, Body body) const;
};

class Responder {
  public:
    virtual ~Responder() = default;
    // On the link's thread, under its mutex: must neither wait nor answer there, and its end must
    // not either. False: nothing will answer.
    virtual bool take(Request request) = 0;
};

// The answer to a request of this process; without a head if the connection has ended first.
struct Reply {
    uint32_t ticket = 0;
    std::vector<uint8_t> head{};
    Body body{};
};

// A request of this process that is open.
struct Inquiry {
    uint64_t service = 0;  // the hash of its name
    uint64_t connection_id = 0;
    uint64_t most_bytes = 0;
    Reply reply{};
    MessagePtr target{};  // of the body
};

// How much of the link copies may take. Beside no round copies take all. While bytes of rounds are
// on their way, copies go on only where they had less than their share of all bytes lately, so that
// rounds never starve them.
class CopyShare {
  public:
    // `earns`: copies wait for their share.
    void count_round(uint64_t num_bytes, bool earns, Clock::time_point now);
    void count_copies(uint64_t num_bytes);
    // `has_rounds`: a message of a round is to be sent, or its bytes are not acknowledged.
    bool is_open(bool has_rounds, Clock::time_point now);

  private:
    bool is_busy(Clock::time_point now) const;

    bool has_rounds_ = false;
    Clock::time_point sent_at_{};  // the last byte of a round
    double credit_ = 0;            // bytes
};

}  // namespace link
}  // namespace diloco
