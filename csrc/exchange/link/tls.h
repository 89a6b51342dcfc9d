// TLS 1.3 on a connection of a link. Each side shows a certificate that holds only its ed25519 key,
// and the other side decides by that key. No authority, name or date is checked.
#pragma once

#include <sys/random.h>
#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

#include "exchange/link/openssl.h"

namespace diloco::link {

using PublicKey = std::array<uint8_t, 32>;  // ed25519
using Seed = std::array<uint8_t, 32>;       // the private key

// A new key; throws TlsError.
std::pair<Seed, PublicKey> make_key();

template <size_t kSize>
std::array<uint8_t, kSize> random_bytes() {
    static_assert(kSize <= 256, "the kernel gives more bytes in parts");
    std::array<uint8_t, kSize> bytes{};
    if (getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size())) {
        throw std::runtime_error("the kernel gives no random bytes");
    }
    return bytes;
}

template <size_t kSize>
std::string to_hex(const std::array<uint8_t, kSize>& bytes) {
    std::string text;
    for (const uint8_t byte : bytes) {
        for (const int half : {byte >> 4, byte & 15}) text += "0123456789abcdef"[half];
    }
    return text;
}

// Texts of TlsSession::trouble() for a connection that the peer has closed, with TLS's closing
// alert ("goodbye") and without.
constexpr char kPeerHasClosed[] = "connection closed by the peer";
constexpr char kPeerHasVanished[] = "connection closed by the peer without a goodbye";

// The private key of this process, and the settings of all its connections.
class Identity {
  public:
    // The bytes after which each side changes its key for writing. AES-GCM allows 2^24 full
    // records, which are 2^38 bytes (RFC 8446, 5.5).
    static constexpr uint64_t kRekeyBytes = uint64_t{1} << 35;

    // Makes the identity of a private key. The first call loads OpenSSL, and tests that two
    // sessions understand each other. Throws TlsError.
    static std::shared_ptr<Identity> open(const Seed& seed, uint64_t rekey_bytes = kRekeyBytes);

    // A child of fork() must open an identity of its own, and may destroy the parent's.
    ~Identity();
    Identity(const Identity&) = delete;
    Identity& operator=(const Identity&) = delete;

    const PublicKey& public_key() const { return public_key_; }

  private:
    friend class TlsSession;
    Identity(const Seed& seed, uint64_t rekey_bytes);
    static void test_sessions();

    const openssl::Functions& ssl_;
    const uint64_t rekey_bytes_;
    const uint64_t num_forks_;
    openssl::SSL_CTX* context_ = nullptr;
    PublicKey public_key_{};
};

// TLS over a non-blocking socket, which the caller owns and closes after the session. Threads may
// call at the same time; a mutex lets one call run after the other.
class TlsSession {
  public:
    enum class Outcome {
        kDone,
        kWantsRead,   // call again when the socket can be read
        kWantsWrite,  // call again when the socket can be written
        kClosed,      // the connection has ended; trouble() says how
        kFailed,      // trouble() says why
    };
    // Called with the key of the peer during handshake().
    using IsAllowed = std::function<bool(const PublicKey&)>;

    TlsSession(std::shared_ptr<Identity> identity, int fd, bool is_dialler, IsAllowed is_allowed);
    ~TlsSession();
    TlsSession(const TlsSession&) = delete;
    TlsSession& operator=(const TlsSession&) = delete;

    // Call again until it returns kDone: then the peer has proven that it holds an allowed key. The
    // acceptor decides last, so a dialler learns from its first read() that it was refused.
    Outcome handshake();

    // Reads into the parts in turn, and sets `done` to the bytes read, whatever the outcome. kDone:
    // the parts are full. The session may hold more bytes, which poll() does not report: call
    // again, or ask has_pending().
    Outcome read(const iovec* parts, int num_parts, size_t& done);

    // Writes the parts, and sets `done` to the bytes taken, whatever the outcome: do not pass these
    // again; their memory is free. kDone: the kernel has all bytes. kWantsWrite: encrypted bytes
    // wait in the session, even if `done` covers all parts. A call without parts only gives the
    // kernel the waiting bytes.
    Outcome write(const iovec* parts, int num_parts, size_t& done);

    // The same for a single part.
    Outcome read(void* data, size_t size, size_t& done);
    Outcome write(const void* data, size_t size, size_t& done);

    // Sends TLS's closing alert, so that the peer knows that nothing was cut off. kWantsWrite: see
    // write().
    Outcome close();

    // Whether the session may hold bytes for read(): false after read() has returned kWantsRead.
    bool has_pending() const;
    // Whether encrypted bytes wait for write().
    bool has_unsent() const;

    // After handshake(): the peer's key, and the cipher, such as "TLS_AES_256_GCM_SHA384".
    const PublicKey& peer() const { return peer_; }
    std::string cipher() const;
    // The error in one plain sentence, after kClosed and kFailed.
    std::string trouble() const;

  private:
    friend struct Callbacks;
    enum class State { kGreeting, kOpen, kEnded };

    // Whether this process may use OpenSSL and the mutex: not in a child of fork(), where another
    // thread may have left both locked, and not after OpenSSL has cleaned up.
    bool is_alive() const;
    // Whether the session allows a call that needs `state`; if not, the call returns end_.
    bool may_go_on(State state);
    // Ends the session with this outcome and this text of trouble().
    Outcome end(Outcome outcome, const std::string& sentence);
    // Turns the result of a failed call of OpenSSL into an outcome.
    Outcome judge(int result);
    // Gives the kernel the encrypted bytes; kDone, kWantsWrite, kClosed or kFailed.
    Outcome flush();
    // Called when sending has failed with this errno.
    Outcome cut(int error);
    bool is_peer_welcome(openssl::X509_STORE_CTX* store);
    // The next bytes for one TLS record: in a part's memory, or gathered from several parts.
    struct Parts;
    iovec next_record(const Parts& parts);

    const std::shared_ptr<Identity> identity_;
    const openssl::Functions& ssl_;
    const int fd_;
    const IsAllowed is_allowed_;
    openssl::SSL* session_ = nullptr;

    mutable std::mutex mutex_;
    State state_ = State::kGreeting;
    Outcome end_ = Outcome::kDone;
    PublicKey peer_{};
    std::string trouble_;
    std::string refusal_;       // why this side refused the peer
    bool is_at_end_ = false;    // the peer has closed, and all its bytes are read
    bool is_cut_ = false;       // sending has failed
    int error_ = 0;             // errno of the failed receive
    bool has_nothing_ = true;   // the session holds no bytes: the last read() returned kWantsRead
    uint64_t since_rekey_ = 0;  // bytes written with the present key

    // The buffer of encrypted records. One system call sends several records.
    static constexpr size_t kRecordBytes = 16384;
    static constexpr size_t kRoomOfRecord = kRecordBytes + 512;  // with a possible change of keys
    static constexpr size_t kOutBytes = 4 * kRoomOfRecord;
    std::unique_ptr<uint8_t[]> out_;
    size_t begin_ = 0, end_of_out_ = 0;
    std::array<uint8_t, kRecordBytes> gathered_;
};

}  // namespace diloco::link
