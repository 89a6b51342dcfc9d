// One TCP connection of a link: the bytes on the wire, and what waits to be written to it.
//
// Everything here is used under the link's mutex, except that the system calls run without it.
// During a system call, is_in_io is set in each message whose memory the call may touch. Any thread
// may write, and sets is_writing meanwhile; only the link's own thread reads.
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
constexpr uint8_t kTlsAlert = 21, kTlsHandshake = 22;  // possible first bytes of a TLS connection

// The greeting of the process that dials: its own nonce, and the nonce of the process it wants.
struct Hello {
    std::array<uint8_t, 8> magic = kGreeting;
    uint32_t version = kLinkVersion;
    uint32_t lane = 0;
    Nonce own{};
    Nonce wanted{};
};
static_assert(sizeof(Hello) == 48, "the greeting is a wire format");

// The answer to a Hello.
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
    kJoin = 1,  // the sender has called connect(). tag: lane; total: its number of lanes; offset 1:
                // the receiver is to answer with a kJoin
    kGrant,     // a receive of `total` bytes is posted; its data must name this ticket
    kEager,     // a complete message of at most kEagerBytes
    kData,      // a fragment of the message for the receive with this ticket
    kCredit,    // `total` eager messages have left the store of the frame's sender, or were never
                // stored: the receiver of this frame may send as many more
    kOffer,     // a send of `total` bytes has been waiting for its grant
    kRefuse,    // sizes of send and receive differ; `total` is the size on the frame's sender. With
                // a ticket the receive of that ticket fails, without a ticket the send of this tag
    kEnd,       // the sender has closed this group
    kPing,      // asks for a kPong
    kPong,      // the answer to a kPing, on the same connection
    kRequest,   // a request to the service whose name has the hash `token`
    kAnswer,    // the head of the answer to the request `ticket`; its body has `total` bytes
    kCopy,      // a fragment of the answer's body
    kBeat,      // tag: phase; ticket: the beat's number; offset: inner step; total: bytes of rounds
                // received
    kTell,      // a message to the service whose name has the hash `token`
};

// Whether the payload of a frame is so short that it is read together with its header.
constexpr bool is_short(uint8_t kind) {
    return kind == static_cast<uint8_t>(FrameKind::kEager) ||
           kind == static_cast<uint8_t>(FrameKind::kRequest) ||
           kind == static_cast<uint8_t>(FrameKind::kAnswer);
}

struct Frame {
    uint8_t magic = kFrameMagic;
    uint8_t kind = 0;
    uint16_t number = 0;  // the group's index among the groups of the token
    uint32_t length = 0;  // bytes of payload that follow the header
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
constexpr uint64_t kCopyBytes = 64 * 1024;  // a fragment of a copy, for which a round may wait
constexpr uint64_t kMostHeadBytes = 64;     // the longest request, and head of an answer
constexpr int kMostLanes = 256;
constexpr char kHasClosed[] = "it has closed the connection";

// Whether this error says only that the peer has closed the connection, with TLS or without.
bool is_just_closed(const std::string& trouble);

// The peer has broken the link's protocol; the text says how.
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

// One posted send or receive. Its memory belongs to the caller, who may use it again after is_done
// or after Link::cancel(). A message of a copy or of tell() owns its memory (`owner`).
struct Message {
    bool is_send = false;
    uint8_t* data = nullptr;
    uint64_t num_bytes = 0;
    uint64_t token = 0;
    uint16_t number = 0;
    uint32_t tag = 0;
    Channel* channel = nullptr;  // null when is_done, and for copies and messages of tell()
    std::shared_ptr<const void> owner{};

    uint64_t moved = 0;  // bytes given to the connection, or received
    uint32_t ticket = 0;
    bool is_told = false;      // a message of kTell
    bool is_in_io = false;     // a system call may touch the memory
    bool is_arriving = false;  // a connection is reading a fragment of this message
    bool is_cancelled = false;
    bool is_done = false;
    bool is_aborted = false;
    std::string error{};
    std::condition_variable changed{};

    uint64_t key() const { return uint64_t{number} << 32 | tag; }
};
using MessagePtr = std::shared_ptr<Message>;

// ------------------------------------------------------------------------------ connections

// A frame that waits to be written, or is partly written.
struct OutFrame {
    Frame frame{};
    std::vector<uint8_t> copy{};       // the payload, if the frame owns it
    const uint8_t* payload = nullptr;  // else the payload in the message's memory
    MessagePtr message{};
    size_t done = 0;            // bytes of header and payload that are written
    bool ends_request = false;  // this frame is the complete answer to a request

    size_t size() const { return sizeof(Frame) + frame.length; }
    const uint8_t* bytes() const { return copy.empty() ? payload : copy.data(); }
};

struct Peer;
struct Dial;

// The result of reading from or writing to a connection. With TLS, num_bytes counts plain text.
struct Moved {
    size_t num_bytes = 0;
    bool is_blocked = false;  // the kernel has no more room, or no more bytes
    bool is_over = false;     // the connection has ended
    std::string trouble{};    // why it has ended; empty: the peer has closed it
};

struct Connection {
    enum class State { kConnecting, kProxied, kSecuring, kAsking, kAsked, kOpen, kClosed };

    static constexpr size_t kStagingBytes = 4096;

    uint64_t id = 0;
    Descriptor fd{};
    std::shared_ptr<TlsSession> session{};  // on a link with a key, once the handshake has begun
    State state = State::kClosed;
    bool is_ready = false;  // this connection is in Link::ready_
    std::shared_ptr<Peer> peer{};
    std::shared_ptr<Dial> dial{};
    std::unique_ptr<ProxyRequest> request{};  // in State::kProxied
    int lane = 0;
    Clock::time_point deadline{};  // for the end of the greeting
    bool has_carried = false;      // channels have used it, so its end may lose their messages
    // A router may forget a connection without telling either end. heard_at: the last byte that
    // came from the peer, or that the kernel took while large messages waited. is_pinged: a kPing
    // has been queued since, at pinged_at.
    Clock::time_point heard_at{};
    bool is_pinged = false;
    Clock::time_point pinged_at{};
    bool is_cut = false;    // writing has failed; the link's thread closes the connection
    std::string trouble{};  // why it has failed; empty: the peer has closed

    // Output.
    bool can_write = false;
    bool is_writing = false;
    uint64_t num_writable = 0;  // how often the kernel has said that there is room
    std::deque<OutFrame> control{};
    std::deque<OutFrame> messages{};  // kTell frames, which are sent after control frames
    uint64_t told_bytes = 0;          // bytes of kTell frames that are not sent yet
    std::deque<MessagePtr> bulk{};    // large messages of rounds, in the order of their grants
    // Bodies of answers. Bodies of a single fragment (short_copies) overtake the others.
    std::deque<MessagePtr> short_copies{}, copies{};
    size_t num_requests = 0;       // requests of the peer whose answers are not sent yet
    Clock::time_point round_at{};  // when the kernel last took a byte of `bulk`
    // Frames between plan_write() and wrote(); at other times at most one frame, partly written.
    std::vector<OutFrame> batch{};

    bool has_unsent = false;  // encrypted bytes wait in the TLS session

    bool has_output(bool with_bulk = true) const {
        return has_unsent || !batch.empty() || !control.empty() || !messages.empty() ||
               (with_bulk && !bulk.empty());
    }
    std::deque<MessagePtr>& copies_like(const Message& message) {
        return message.num_bytes <= kCopyBytes ? short_copies : copies;
    }
    bool has_copies() const { return !short_copies.empty() || !copies.empty(); }
    // Chooses what to write next: control frames, then kTell frames, then with `with_copies` one
    // fragment of a copy, then with `with_bulk` large messages. Fills `parts` for the system call,
    // and returns their number.
    int plan_write(iovec* parts, int most_parts, size_t most_bytes, bool with_bulk,
                   bool with_copies = false);
    // Queues a frame that belongs to no group, unless 1024 frames wait because the peer does not
    // read.
    void put(FrameKind kind);
    // Notes that a system call has written `num_bytes` of the planned parts. Returns the messages
    // that are complete now, the bytes of rounds and of copies, and the number of requests whose
    // answer is complete.
    struct Written {
        std::vector<MessagePtr> complete{};
        uint64_t round_bytes = 0, copy_bytes = 0;
        size_t num_answered = 0;
    };
    Written wrote(size_t num_bytes);
    // Removes a message whose memory will be gone. If one of its frames is partly written, the
    // frame goes on from a copy of the bytes. Must not be called while is_in_io is set.
    void withdraw(const MessagePtr& message);

    // Input.
    bool can_read = false;
    bool is_hung_up = false;  // epoll has reported the end: read all bytes that are left
    std::array<uint8_t, kStagingBytes> staging;
    size_t begin = 0, end = 0;  // the range of the staging buffer that is not parsed yet
    uint64_t left = 0;          // bytes that are missing of the payload being received
    MessagePtr target{};        // receives that payload; null: the payload is dropped

    int plan_read(iovec* parts, uint8_t* scratch, size_t scratch_bytes);
    // took() notes that `num_bytes` were read as plan_read() planned; take_staged() copies bytes
    // from the staging buffer to the payload. Both return whether the payload is complete now.
    bool took(size_t num_bytes);
    bool take_staged();
    size_t num_staged() const { return end - begin; }

    // The TLS handshake, which runs on a thread of its own.
    bool is_shaking = false;  // the handshake is queued for that thread, or runs on it
    bool has_heard = false;   // the peer's first byte was looked at
    bool has_shaken = false;  // both processes have proven their keys
    bool has_left = false;    // the peer has closed the connection during the handshake
    bool has_said_bye = false;

    // Write and read by a system call; called without the link's mutex.
    Moved transmit(const iovec* parts, int num_parts) const;
    Moved receive(const iovec* parts, int num_parts) const;
    // Sends a short greeting, for which the kernel has room. Returns an empty text, or the error.
    std::string say(const void* data, size_t num_bytes);
    // With TLS, says once that the connection ends here and that nothing was cut off.
    void say_bye();
};
using ConnectionPtr = std::shared_ptr<Connection>;

// A lane to a peer. Frames are sent on the chosen connection, and read from both.
struct Lane {
    ConnectionPtr own{};     // the connection that this process dialled
    ConnectionPtr theirs{};  // the connection that the peer dialled
    ConnectionPtr chosen{};
    std::shared_ptr<Dial> dial{};
    std::string trouble{};  // why the last dial of this process was given up
    Clock::time_point theirs_since{};
};

// Sets the options of a TCP socket: keepalive, no delay, a limit of what waits in the kernel, and
// an end after 10 minutes if the peer's host is gone.
void set_options(int fd);

}  // namespace diloco::link
