// One TCP connection of a link: the bytes on the wire, and what waits to be written to it.
//
// Everything here is used under the link's mutex; only the system calls run without the mutex.
// While a call is under way, is_in_io of each message is set whose memory the call may touch, and
// `is_writing` if any thread may make the call: only the link's own thread reads.
#pragma once

#include <sys/uio.h>

#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "exchange/link/proxy.h"
#include "exchange/link/sockets.h"
#include "exchange/link/tls.h"

namespace diloco::link {

using Clock = std::chrono::steady_clock;
using Nonce = std::array<uint8_t, 16>;

// ------------------------------------------------------------------ the wire (little endian)

constexpr std::array<uint8_t, 8> kGreeting{'D', 'I', 'L', 'O', 'L', 'I', 'N', 'K'};
constexpr uint32_t kLinkVersion = 3;
constexpr uint8_t kTlsAlert = 21, kTlsHandshake = 22;  // the first byte, where TLS is spoken

struct Hello {
    std::array<uint8_t, 8> magic = kGreeting;
    uint32_t version = kLinkVersion;
    uint32_t lane = 0;
    Nonce own{};
    Nonce wanted{};
};
static_assert(sizeof(Hello) == 48, "the greeting is a wire format");

enum class Status : uint32_t {
    kWelcome = 1,
    kOtherProcess,
    kOtherVersion,
    kHasKeys,  // the acceptor speaks TLS only
    kNoKeys,   // the dialler has begun with TLS, and the acceptor has no keys
    kOtherKey  // the acceptor knows the process of this nonce by another key
};

struct Answer {
    std::array<uint8_t, 8> magic = kGreeting;
    uint32_t version = kLinkVersion;
    uint32_t status = 0;
    Nonce own{};
};
static_assert(sizeof(Answer) == 32, "the greeting is a wire format");

enum class FrameKind : uint8_t {
    kJoin = 1,  // the sender has called groups(). tag: lane; total: lanes; offset 1: answer, please
    kGrant,     // a receive of `total` bytes is posted, and has this ticket
    kEager,     // a whole message of at most kEagerBytes
    kData,      // a part of the message for a ticket
    kCredit,    // `total` eager messages have left the store for early ones
    kOffer,     // a message of `total` bytes has been waiting for its grant
    kRefuse,    // sizes differ: `total` is the sender's. With a ticket: that receive fails, else
                // the send of this tag
    kEnd,       // the sender has closed this group
    kPing,      // asks for a sign of life
    kPong,      // the answer, on the same connection
    kRequest,   // asks the service with this token for an answer with this ticket
    kAnswer,    // the head of the answer, whose body has `total` bytes
    kCopy,      // a part of the body
    kBeat,      // tag: phase; ticket: number; offset: inner step; total: bytes of rounds heard
    kTell,      // a message to the service with this token
};

// Whether the payload of a frame is short, and comes with its header.
constexpr bool is_short(uint8_t kind) {
    return kind == static_cast<uint8_t>(FrameKind::kEager) ||
           kind == static_cast<uint8_t>(FrameKind::kRequest) ||
           kind == static_cast<uint8_t>(FrameKind::kAnswer);
}

struct Frame {
    uint8_t magic = kFrameMagic;
    uint8_t kind = 0;
    uint16_t number = 0;  // of the group, among the groups of the token
    uint32_t length = 0;  // bytes that follow
    uint64_t token = 0;
    uint32_t tag = 0;
    uint32_t ticket = 0;
    uint64_t offset = 0;
    uint64_t total = 0;

    static constexpr uint8_t kFrameMagic = 0xd7;
};
static_assert(sizeof(Frame) == 40, "the frame's header is a wire format");

constexpr uint64_t kEagerBytes = 1024;
constexpr uint64_t kFragmentBytes = 256 * 1024;
constexpr uint64_t kCopyBytes = 64 * 1024;  // a fragment of a copy: rounds wait for so much of it
constexpr uint64_t kMostHeadBytes = 64;     // of a request, and of the head of an answer
constexpr int kMostLanes = 256;
constexpr char kHasClosed[] = "it has closed the connection";

// Whether the peer has closed, plain or with TLS, and nothing says why.
bool is_just_closed(const std::string& trouble);

// The peer broke the rules; the text says how.
class ProtocolError : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

// The first bytes of a process that dials another one through a relay. The other records are in
// diloco_comm/base/service/relay.py.
struct RelayRequest {
    std::array<uint8_t, 8> magic{'D', 'I', 'L', 'O', 'R', 'E', 'L', 'Y'};
    uint32_t version = 1;
    uint32_t kind = 2;
    Nonce wanted{};
};
static_assert(sizeof(RelayRequest) == 32, "the request is a wire format");

// -------------------------------------------------------------------------------- messages

class Channel;

// One posted send or receive. The memory belongs to the poster, who takes it back by
// Link::cancel() or after is_done. The message of a copy owns its memory.
struct Message {
    bool is_send = false;
    uint8_t* data = nullptr;
    uint64_t num_bytes = 0;
    uint64_t token = 0;
    uint16_t number = 0;
    uint32_t tag = 0;
    Channel* channel = nullptr;  // null once it is done, and for a copy
    std::shared_ptr<const void> owner{};

    uint64_t moved = 0;  // bytes given to the connection, or received
    uint32_t ticket = 0;
    bool is_told = false;  // of kTell
    bool is_in_io = false;
    bool is_arriving = false;  // a connection reads a fragment of it
    bool is_cancelled = false;
    bool is_done = false;
    bool is_aborted = false;
    std::string error{};
    std::condition_variable changed{};

    uint64_t key() const { return uint64_t{number} << 32 | tag; }
};
using MessagePtr = std::shared_ptr<Message>;

// ------------------------------------------------------------------------------ connections

// A frame on its way out.
struct OutFrame {
    Frame frame{};
    std::vector<uint8_t> copy{};       // the payload, unless it lies in a message's memory
    const uint8_t* payload = nullptr;  // there
    MessagePtr message{};
    size_t done = 0;  // bytes of header and payload that are written
    bool ends_request = false;

    size_t size() const { return sizeof(Frame) + frame.length; }
    const uint8_t* bytes() const { return copy.empty() ? payload : copy.data(); }
};

struct Peer;
struct Dial;

// The result of a call to the kernel. With a TLS session in between, the bytes are plain text.
struct Moved {
    size_t num_bytes = 0;
    bool is_blocked = false;  // the kernel has no more room, or no more bytes
    bool is_over = false;     // nothing will follow
    std::string trouble{};    // why it is over; empty: the peer has closed
};

struct Connection {
    enum class State { kConnecting, kProxied, kSecuring, kAsking, kAsked, kOpen, kClosed };

    static constexpr size_t kStagingBytes = 4096;

    uint64_t id = 0;
    Descriptor fd{};
    std::shared_ptr<TlsSession> session{};  // of a keyed link, once the handshake has begun
    State state = State::kClosed;
    bool is_ready = false;  // it stands in the list of connections to be served
    std::shared_ptr<Peer> peer{};
    std::shared_ptr<Dial> dial{};
    std::unique_ptr<ProxyRequest> request{};  // in State::kProxied
    int lane = 0;
    Clock::time_point deadline{};  // of the greeting
    bool has_carried = false;      // frames: with it, messages would be lost
    // A router may forget a connection, and neither end hears of that. The last byte from the
    // peer, or of bulk that the kernel took; and whether a ping has left since.
    Clock::time_point heard_at{};
    bool is_pinged = false;
    Clock::time_point pinged_at{};
    bool is_cut = false;    // a writer has failed; the link's thread closes the connection
    std::string trouble{};  // why; empty: the peer has closed

    // Output.
    bool can_write = false;
    bool is_writing = false;
    uint64_t num_writable = 0;  // how often the kernel has said that there is room
    std::deque<OutFrame> control{};
    std::deque<OutFrame> messages{};  // of kTell: after control frames
    uint64_t told_bytes = 0;          // of messages that have not left
    std::deque<MessagePtr> bulk{};    // in the order of their grants
    // Bodies of answers; bodies of one fragment overtake the others.
    std::deque<MessagePtr> short_copies{}, copies{};
    size_t num_requests = 0;       // whose answers have not left
    Clock::time_point round_at{};  // the last byte of bulk that the kernel took
    std::vector<OutFrame>
        batch{};  // between plan_write() and wrote(); else at most one begun frame

    bool has_unsent = false;  // encrypted bytes wait in the session

    bool has_output(bool with_bulk = true) const {
        return has_unsent || !batch.empty() || !control.empty() || !messages.empty() ||
               (with_bulk && !bulk.empty());
    }
    std::deque<MessagePtr>& copies_like(const Message& message) {
        return message.num_bytes <= kCopyBytes ? short_copies : copies;
    }
    bool has_copies() const { return !short_copies.empty() || !copies.empty(); }
    // Chooses what to write next: control frames, messages, a fragment of a copy if `with_copies`,
    // then bulk; returns the number of parts.
    int plan_write(iovec* parts, int most_parts, size_t most_bytes, bool with_bulk,
                   bool with_copies = false);
    // A frame of the connection itself; none where the peer does not read.
    void put(FrameKind kind);
    // The messages and the bytes that a call to the kernel has written.
    struct Written {
        std::vector<MessagePtr> complete{};
        uint64_t round_bytes = 0, copy_bytes = 0;
        size_t num_answered = 0;  // requests
    };
    Written wrote(size_t num_bytes);
    // The message's memory will be gone: a begun fragment goes on from a copy. Not while it is
    // written.
    void withdraw(const MessagePtr& message);

    // Input.
    bool can_read = false;
    bool is_hung_up = false;  // the kernel has said so: read up to the end
    std::array<uint8_t, kStagingBytes> staging;
    size_t begin = 0, end = 0;  // bytes in the staging buffer that are not parsed yet
    uint64_t left = 0;          // of the payload that is being received
    MessagePtr target{};        // its receiver; null: nobody

    int plan_read(iovec* parts, uint8_t* scratch, size_t scratch_bytes);
    // Takes bytes of the current payload: those read to its place, then those in the staging
    // buffer. Returns whether the payload is complete.
    bool took(size_t num_bytes);
    bool take_staged();
    size_t num_staged() const { return end - begin; }

    // The handshake, on the thread for handshakes.
    bool is_shaking = false;  // it waits for that thread, or is there
    bool has_heard = false;   // the peer's first byte was looked at
    bool has_shaken = false;  // both have proven their keys
    bool has_left = false;    // the peer has closed before that
    bool has_said_bye = false;

    // Calls to the kernel, without the link's mutex.
    Moved transmit(const iovec* parts, int num_parts) const;
    Moved receive(const iovec* parts, int num_parts) const;
    // A short greeting, which the kernel has room for; an empty text, or why it could not leave.
    std::string say(const void* data, size_t num_bytes);
    // Nothing was cut off: a session says so once.
    void say_bye();
};
using ConnectionPtr = std::shared_ptr<Connection>;

// A lane to a peer. Frames leave on the chosen connection, and are read from both.
struct Lane {
    ConnectionPtr own{};     // that this process dialled
    ConnectionPtr theirs{};  // that the peer dialled
    ConnectionPtr chosen{};
    std::shared_ptr<Dial> dial{};
    std::string trouble{};  // why the last dial of this process was given up
    Clock::time_point theirs_since{};
};

// Keepalive, no delay, an end of connections whose peer's host is gone.
void set_options(int fd);

}  // namespace diloco::link
