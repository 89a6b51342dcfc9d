// TLS 1.3 on a connection of a link. Each side shows a certificate that holds only its ed25519 key,
// and the other side decides by that key. There is no authority, no name and no date to check.
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

// Sentences of trouble(): after the peer's goodbye, and without it.
constexpr char kPeerHasClosed[] = "connection closed by the peer";
constexpr char kPeerHasVanished[] = "connection closed by the peer without a goodbye";

// The private key of this process, and the settings of all its connections.
class Identity {
  public:
    // After so many bytes each side changes the key that it writes with: AES-GCM is good for 2^24
    // full records, which are 2^38 bytes (RFC 8446, 5.5).
    static constexpr uint64_t kRekeyBytes = uint64_t{1} << 35;

    // Loads OpenSSL at the first call and tests that two sessions understand each other; throws
    // TlsError.
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

// One connection over a non-blocking socket that the caller owns, and closes after the session.
// Threads may call at the same time; calls take turns.
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

    // Call until kDone. Then the peer has proven that it holds an allowed key. The acceptor judges
    // last: a dialler learns of a refusal by the first read().
    Outcome handshake();

    // Fills the parts in turn. `done`: the bytes that came, with every outcome. kDone: the parts
    // are full, and more may wait here, which the kernel does not tell: call again, or look at
    // has_pending().
    Outcome read(const iovec* parts, int num_parts, size_t& done);

    // Takes the first `done` bytes of the parts, with every outcome: these need not be passed
    // again, and their memory is free. kDone: all is taken and given to the kernel. kWantsWrite:
    // encrypted bytes wait in the session (and `done` may be the whole). With no parts it only
    // gives the kernel what waits.
    Outcome write(const iovec* parts, int num_parts, size_t& done);

    // One part.
    Outcome read(void* data, size_t size, size_t& done);
    Outcome write(const void* data, size_t size, size_t& done);

    // Says goodbye, so that the peer knows that nothing was cut off. kWantsWrite: see write().
    Outcome close();

    // Whether read() has more without the kernel: false after it has returned kWantsRead.
    bool has_pending() const;
    // Whether encrypted bytes wait for write().
    bool has_unsent() const;

    // After handshake(): the peer's key, and such as "TLS_AES_256_GCM_SHA384".
    const PublicKey& peer() const { return peer_; }
    std::string cipher() const;
    // One plain sentence, after kClosed and kFailed.
    std::string trouble() const;

  private:
    friend struct Callbacks;
    enum class State { kGreeting, kOpen, kEnded };

    // Whether this process may touch OpenSSL and the mutex: not in a child of fork(), where both
    // are as another thread left them, and not after OpenSSL has cleaned up.
    bool is_alive() const;
    // Whether the session may be used so; else end_ says what came of it.
    bool may_go_on(State state);
    Outcome end(Outcome outcome, const std::string& sentence);
    // Says how a call of OpenSSL failed.
    Outcome judge(int result);
    // Gives the kernel what was encrypted; kDone, kWantsWrite, kClosed or kFailed.
    Outcome flush();
    // The kernel takes no more.
    Outcome cut(int error);
    bool is_peer_welcome(openssl::X509_STORE_CTX* store);
    // The next bytes for one record, from the parts' memory or gathered.
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
    std::string refusal_;      // why this side refused the peer
    bool is_at_end_ = false;   // the kernel has no more bytes of the peer
    bool is_cut_ = false;      // the kernel takes no more bytes
    int error_ = 0;            // errno of the socket
    bool has_nothing_ = true;  // since the last read, the kernel may have bytes
    uint64_t since_rekey_ = 0;

    // Records on their way to the kernel, several with one call.
    static constexpr size_t kRecordBytes = 16384;
    static constexpr size_t kRoomOfRecord = kRecordBytes + 512;  // and for a change of keys
    static constexpr size_t kOutBytes = 4 * kRoomOfRecord;
    std::unique_ptr<uint8_t[]> out_;
    size_t begin_ = 0, end_of_out_ = 0;
    std::array<uint8_t, kRecordBytes> gathered_;
};

}  // namespace diloco::link
