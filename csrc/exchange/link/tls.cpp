#include "exchange/link/tls.h"

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>

#include "exchange/link/sockets.h"

#if defined(__aarch64__)
#include <sys/auxv.h>
#endif

namespace diloco::link {

using openssl::Functions;

namespace {

using Outcome = TlsSession::Outcome;

// Values of macros in <openssl/ssl.h>, <openssl/bio.h> and <openssl/x509_vfy.h>, under own names.
constexpr long kTls13 = 0x0304;
constexpr int kSetMode = 33, kSetReadAhead = 41, kSetSessionCache = 44, kSetMostCertificate = 51;
constexpr int kSetGroups = 92, kSetSignatures = 98, kSetClientSignatures = 102;
constexpr int kSetOldest = 123, kSetNewest = 124;
constexpr long kModePartialWrite = 1, kModeMovingBuffer = 2, kModeAutoRetry = 4;
constexpr uint64_t kNoTicket = 1U << 14, kNoCompression = 1U << 17, kNoRenegotiation = 1U << 30;
constexpr uint64_t kChaChaFirst = 1U << 21, kAcceptorChooses = 1U << 22;
constexpr int kVerifyPeer = 1, kNoneFails = 2;
constexpr int kSslError = 1, kWantRead = 2, kWantWrite = 3, kSyscallError = 5, kZeroReturn = 6;
constexpr int kAlpnOk = 0, kAlpnFatal = 2;
constexpr int kCertificateRejected = 28;
constexpr int kKeyUpdateNotRequested = 0;
constexpr int kBioSource = 0x0400, kBioEof = 2, kBioFlush = 11;
constexpr int kBioRead = 1, kBioWrite = 2, kBioRetry = 8, kBioAll = 15;

// A certificate with one key has about 250 bytes.
constexpr long kMostCertificate = 4096;
constexpr size_t kReadBytes = 64 * 1024;
// The ALPN name of the protocol. The handshake signs it, so that a signature made for another TLS
// service cannot be used to open a link.
constexpr const char* kProtocol = "diloco-link/1";
constexpr const char* kIsOver = "the process ends, and OpenSSL with it";

bool has_fast_aes() {
#if defined(__x86_64__)
    return __builtin_cpu_supports("aes") && __builtin_cpu_supports("pclmul");
#elif defined(__aarch64__)
    return (getauxval(AT_HWCAP) & HWCAP_AES) != 0;
#else
    return false;
#endif
}

// The name with its length in front, as the ALPN extension has it.
std::string alpn() { return static_cast<char>(std::strlen(kProtocol)) + std::string(kProtocol); }

// An OpenSSL object that is freed at the end of a scope.
template <typename T>
using Owned = std::unique_ptr<T, void (*)(T*)>;

std::string words_of(int error) {
    if (is_reset(error)) return kPeerHasClosed;
    return std::string("the connection broke: ") + std::strerror(error);
}

}  // namespace

std::pair<Seed, PublicKey> make_key() {
    const Seed seed = random_bytes<std::tuple_size_v<Seed>>();
    return {seed, Identity::open(seed)->public_key()};
}

// -------------------------------------------------------------------------------- callbacks

// The functions that OpenSSL calls. They throw nothing, because OpenSSL is written in C.
struct Callbacks {
    static TlsSession& session_of(const openssl::BIO* bio) {
        const Functions& ssl = openssl::functions();
        return *static_cast<TlsSession*>(ssl.BIO_get_data(const_cast<openssl::BIO*>(bio)));
    }

    // Takes a complete record or nothing; TlsSession::write() has made room for one.
    static int write(openssl::BIO* bio, const char* data, int size) {
        TlsSession& it = session_of(bio);
        it.ssl_.BIO_clear_flags(bio, kBioAll);
        const size_t room = TlsSession::kOutBytes - it.end_of_out_;
        if (static_cast<size_t>(size) > room) {
            it.ssl_.BIO_set_flags(bio, kBioWrite | kBioRetry);
            return -1;
        }
        std::memcpy(it.out_.get() + it.end_of_out_, data, static_cast<size_t>(size));
        it.end_of_out_ += static_cast<size_t>(size);
        return size;
    }

    static int read(openssl::BIO* bio, char* data, int size) {
        TlsSession& it = session_of(bio);
        it.ssl_.BIO_clear_flags(bio, kBioAll);
        ssize_t num_bytes = -1;
        do {
            num_bytes = recv(it.fd_, data, static_cast<size_t>(size), MSG_DONTWAIT);
        } while (num_bytes < 0 && errno == EINTR);
        if (num_bytes == 0) it.is_at_end_ = true;
        if (num_bytes < 0) {
            if (errno == EAGAIN || errno == EWOULDBLOCK) {
                it.ssl_.BIO_set_flags(bio, kBioRead | kBioRetry);
            } else {
                it.error_ = errno;
            }
        }
        return static_cast<int>(num_bytes);
    }

    static long control(openssl::BIO* bio, int command, long, void*) {
        if (command == kBioFlush) return 1;
        return command == kBioEof && session_of(bio).is_at_end_ ? 1 : 0;
    }

    static const openssl::BIO_METHOD* method() {
        static const openssl::BIO_METHOD* const one = [] {
            const Functions& ssl = openssl::functions();
            openssl::BIO_METHOD* const made =
                ssl.BIO_meth_new(ssl.BIO_get_new_index() | kBioSource, "diloco link");
            if (made == nullptr) throw TlsError("OpenSSL makes no way to a socket");
            ssl.BIO_meth_set_write(made, &Callbacks::write);
            ssl.BIO_meth_set_read(made, &Callbacks::read);
            ssl.BIO_meth_set_ctrl(made, &Callbacks::control);
            return made;
        }();
        return one;
    }

    static int verify(openssl::X509_STORE_CTX* store, void*) {
        const Functions& ssl = openssl::functions();
        const void* const session =
            ssl.X509_STORE_CTX_get_ex_data(store, ssl.SSL_get_ex_data_X509_STORE_CTX_idx());
        auto* const it = static_cast<TlsSession*>(
            ssl.SSL_get_ex_data(static_cast<const openssl::SSL*>(session), 0));
        if (it->is_peer_welcome(store)) return 1;
        ssl.X509_STORE_CTX_set_error(store, kCertificateRejected);
        return 0;
    }

    // Accepts the connection only if the dialler's list of protocols contains kProtocol.
    static int choose_protocol(openssl::SSL*, const unsigned char** out, unsigned char* out_length,
                               const unsigned char* in, unsigned in_length, void*) {
        const size_t length = std::strlen(kProtocol);
        for (unsigned at = 0; at < in_length; at += 1U + in[at]) {
            if (in[at] != length || at + 1 + length > in_length) continue;
            if (std::memcmp(in + at + 1, kProtocol, length) != 0) continue;
            *out = in + at + 1;
            *out_length = static_cast<unsigned char>(length);
            return kAlpnOk;
        }
        return kAlpnFatal;
    }
};

// --------------------------------------------------------------------------------- identity

Identity::Identity(const Seed& seed, uint64_t rekey_bytes)
    : ssl_(openssl::functions()), rekey_bytes_(rekey_bytes), num_forks_(openssl::num_forks()) {
    const openssl::Use use;
    if (openssl::is_over()) throw TlsError(kIsOver);
    ssl_.ERR_clear_error();
    openssl::OSSL_LIB_CTX* const library = openssl::own_context();
    const auto check = [&](bool is_done) {
        if (!is_done)
            throw TlsError("OpenSSL refuses to set up TLS: " + openssl::take_trouble(ssl_));
    };
    check(library != nullptr);

    const Owned<openssl::EVP_PKEY> key(
        ssl_.EVP_PKEY_new_raw_private_key_ex(library, "ED25519", nullptr, seed.data(), seed.size()),
        ssl_.EVP_PKEY_free);
    check(key != nullptr);
    size_t size = public_key_.size();
    check(ssl_.EVP_PKEY_get_raw_public_key(key.get(), public_key_.data(), &size) == 1);

    // Names are empty and dates are endless, because nobody reads them.
    const Owned<openssl::X509> certificate(ssl_.X509_new_ex(library, nullptr), ssl_.X509_free);
    openssl::X509* const it = certificate.get();
    check(it != nullptr && ssl_.X509_set_version(it, 2) == 1);
    check(ssl_.ASN1_INTEGER_set(ssl_.X509_get_serialNumber(it), 1) == 1);
    check(ssl_.ASN1_TIME_set_string_X509(ssl_.X509_getm_notBefore(it), "19700101000000Z") == 1);
    check(ssl_.ASN1_TIME_set_string_X509(ssl_.X509_getm_notAfter(it), "99991231235959Z") == 1);
    check(ssl_.X509_set_pubkey(it, key.get()) == 1);
    check(ssl_.X509_sign(it, key.get(), nullptr) > 0);

    Owned<openssl::SSL_CTX> owned(ssl_.SSL_CTX_new_ex(library, nullptr, ssl_.TLS_method()),
                                  ssl_.SSL_CTX_free);
    openssl::SSL_CTX* const context = owned.get();
    check(context != nullptr);
    const auto set = [&](int command, long value, const char* text = nullptr) {
        return ssl_.SSL_CTX_ctrl(context, command, value, const_cast<char*>(text));
    };
    // Make all settings that a configuration of OpenSSL could make, so that none is left to a
    // default.
    check(set(kSetOldest, kTls13) == 1 && set(kSetNewest, kTls13) == 1);
    ssl_.SSL_CTX_set_security_level(context, 2);
    const char* const aes_first = "TLS_AES_256_GCM_SHA384:TLS_CHACHA20_POLY1305_SHA256";
    const char* const chacha_first = "TLS_CHACHA20_POLY1305_SHA256:TLS_AES_256_GCM_SHA384";
    check(ssl_.SSL_CTX_set_ciphersuites(context, has_fast_aes() ? aes_first : chacha_first) == 1);
    check(set(kSetGroups, 0, "X25519") == 1);
    check(set(kSetSignatures, 0, "ed25519") == 1 && set(kSetClientSignatures, 0, "ed25519") == 1);
    ssl_.SSL_CTX_set_options(
        context, kNoTicket | kNoCompression | kNoRenegotiation | kChaChaFirst | kAcceptorChooses);
    set(kSetSessionCache, 0);
    check(ssl_.SSL_CTX_set_num_tickets(context, 0) == 1);
    set(kSetMode, kModePartialWrite | kModeMovingBuffer | kModeAutoRetry);
    set(kSetReadAhead, 1);
    ssl_.SSL_CTX_set_default_read_buffer_len(context, kReadBytes);
    set(kSetMostCertificate, kMostCertificate);

    check(ssl_.SSL_CTX_use_certificate(context, it) == 1);
    check(ssl_.SSL_CTX_use_PrivateKey(context, key.get()) == 1);
    ssl_.SSL_CTX_set_verify(context, kVerifyPeer | kNoneFails, nullptr);
    ssl_.SSL_CTX_set_cert_verify_callback(context, &Callbacks::verify, nullptr);
    const std::string name = alpn();
    check(ssl_.SSL_CTX_set_alpn_protos(context, reinterpret_cast<const unsigned char*>(name.data()),
                                       static_cast<unsigned>(name.size())) == 0);
    ssl_.SSL_CTX_set_alpn_select_cb(context, &Callbacks::choose_protocol, nullptr);
    context_ = owned.release();
}

Identity::~Identity() {
    // Do not free in a forked child, where OpenSSL's locks may stay held for ever.
    const openssl::Use use;
    if (openssl::is_over() || openssl::num_forks() != num_forks_) return;
    ssl_.SSL_CTX_free(context_);
}

std::shared_ptr<Identity> Identity::open(const Seed& seed, uint64_t rekey_bytes) {
    static const bool is_tested = (test_sessions(), true);
    (void)is_tested;
    return std::shared_ptr<Identity>(new Identity(seed, rekey_bytes));
}

void Identity::test_sessions() {
    struct Pair {
        int fds[2] = {-1, -1};
        Pair() {
            if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, fds) != 0) {
                throw TlsError(std::string("the test of OpenSSL got no sockets: ") +
                               std::strerror(errno));
            }
        }
        ~Pair() {
            for (const int fd : fds) ::close(fd);
        }
    } pair;
    const std::shared_ptr<Identity> ends[2] = {
        std::shared_ptr<Identity>(new Identity(Seed{1}, kRekeyBytes)),
        std::shared_ptr<Identity>(new Identity(Seed{2}, kRekeyBytes))};
    const auto only = [&](int end) {
        return [&, end](const PublicKey& key) { return key == ends[end]->public_key(); };
    };
    TlsSession dialler(ends[0], pair.fds[0], true, only(1));
    TlsSession acceptor(ends[1], pair.fds[1], false, only(0));
    const auto check = [&](bool is_right) {
        if (is_right) return;
        const std::string trouble =
            dialler.trouble().empty() ? acceptor.trouble() : dialler.trouble();
        throw TlsError("two ends of OpenSSL in this process do not understand each other" +
                       (trouble.empty() ? "" : ": " + trouble));
    };
    bool is_open = false;
    for (int turn = 0; turn < 16 && !is_open; ++turn) {
        const Outcome first = dialler.handshake();
        const Outcome second = acceptor.handshake();
        check(first <= Outcome::kWantsWrite && second <= Outcome::kWantsWrite);
        is_open = first == Outcome::kDone && second == Outcome::kDone;
    }
    check(is_open);
    const std::string said = "a sentence over TLS";
    std::string heard(said.size(), ' ');
    size_t done = 0;
    check(dialler.write(said.data(), said.size(), done) == Outcome::kDone && done == said.size());
    check(acceptor.read(heard.data(), heard.size(), done) == Outcome::kDone && heard == said);
}

// ---------------------------------------------------------------------------------- session

TlsSession::TlsSession(std::shared_ptr<Identity> identity, int fd, bool is_dialler,
                       IsAllowed is_allowed)
    : identity_(std::move(identity)),
      ssl_(identity_->ssl_),
      fd_(fd),
      is_allowed_(std::move(is_allowed)),
      out_(new uint8_t[kOutBytes]) {
    const openssl::Use use;
    if (openssl::is_over()) throw TlsError(kIsOver);
    if (openssl::num_forks() != identity_->num_forks_) {
        throw TlsError("a child of fork() must open an identity of its own");
    }
    ssl_.ERR_clear_error();
    const openssl::BIO_METHOD* const method = Callbacks::method();
    session_ = ssl_.SSL_new(identity_->context_);
    openssl::BIO* const bio = session_ ? ssl_.BIO_new(method) : nullptr;
    if (bio == nullptr) {
        if (session_ != nullptr) ssl_.SSL_free(session_);
        throw TlsError("OpenSSL begins no connection: " + openssl::take_trouble(ssl_));
    }
    ssl_.BIO_set_data(bio, this);
    ssl_.BIO_set_init(bio, 1);
    ssl_.SSL_set_bio(session_, bio, bio);
    ssl_.SSL_set_ex_data(session_, 0, this);
    if (is_dialler) {
        ssl_.SSL_set_connect_state(session_);
    } else {
        ssl_.SSL_set_accept_state(session_);
    }
}

TlsSession::~TlsSession() {
    const openssl::Use use;
    if (is_alive()) ssl_.SSL_free(session_);
}

bool TlsSession::is_peer_welcome(openssl::X509_STORE_CTX* store) {
    const openssl::OPENSSL_STACK* const chain = ssl_.X509_STORE_CTX_get0_untrusted(store);
    if (chain == nullptr || ssl_.OPENSSL_sk_num(chain) != 1) {
        refusal_ = "the peer showed another number of certificates than one";
        return false;
    }
    const openssl::EVP_PKEY* const key =
        ssl_.X509_get0_pubkey(ssl_.X509_STORE_CTX_get0_cert(store));
    size_t size = peer_.size();
    if (key == nullptr || ssl_.EVP_PKEY_is_a(key, "ED25519") != 1 ||
        ssl_.EVP_PKEY_get_raw_public_key(key, peer_.data(), &size) != 1 || size != peer_.size()) {
        refusal_ = "the peer showed a certificate without an ed25519 key";
        return false;
    }
    try {
        if (is_allowed_(peer_)) return true;
        refusal_ = "the key of the peer is not allowed: " + to_hex(peer_);
    } catch (const std::exception& error) {
        refusal_ = std::string("the key of the peer could not be judged: ") + error.what();
    } catch (...) {
        refusal_ = "the key of the peer could not be judged";
    }
    return false;
}

bool TlsSession::is_alive() const {
    return !openssl::is_over() && openssl::num_forks() == identity_->num_forks_;
}

bool TlsSession::may_go_on(State state) {
    if (state_ == State::kGreeting && state == State::kOpen) {
        end(Outcome::kFailed, "the connection was used before its handshake");
    }
    return state_ != State::kEnded;
}

Outcome TlsSession::end(Outcome outcome, const std::string& sentence) {
    state_ = State::kEnded;
    end_ = outcome;
    trouble_ = sentence;
    return outcome;
}

Outcome TlsSession::judge(int result) {
    const int error = ssl_.SSL_get_error(session_, result);
    if (error == kWantRead) return Outcome::kWantsRead;
    if (error == kWantWrite) return Outcome::kWantsWrite;
    const bool is_greeting = state_ == State::kGreeting;
    const std::string trouble = openssl::take_trouble(ssl_);
    // Try to send a pending alert, which tells the peer why; whether that works does not matter.
    if (begin_ != end_of_out_) {
        send(fd_, out_.get() + begin_, end_of_out_ - begin_, MSG_NOSIGNAL | MSG_DONTWAIT);
        begin_ = end_of_out_;
    }
    if (error == kZeroReturn) return end(Outcome::kClosed, kPeerHasClosed);
    if (!refusal_.empty()) return end(Outcome::kFailed, refusal_);
    if (is_at_end_ && is_greeting) {
        return end(Outcome::kClosed, "connection closed by the peer during the handshake");
    }
    if (is_at_end_) return end(Outcome::kClosed, kPeerHasVanished);
    if (error_ != 0) {
        return end(is_reset(error_) ? Outcome::kClosed : Outcome::kFailed, words_of(error_));
    }
    if (error != kSslError && error != kSyscallError) {
        return end(Outcome::kFailed, "TLS asks for what a link does not do");
    }
    return end(Outcome::kFailed, trouble);
}

Outcome TlsSession::cut(int error) {
    is_cut_ = true;
    begin_ = end_of_out_ = 0;
    const bool is_closed = is_reset(error);
    if (state_ == State::kOpen) {
        // The peer may have sent an alert that says why, or data before it closed. If there is
        // data, the session stays open for read().
        uint8_t byte = 0;
        size_t num_bytes = 0;
        ssl_.ERR_clear_error();
        const int result = ssl_.SSL_peek_ex(session_, &byte, 1, &num_bytes);
        if (result != 1) judge(result);
        if (state_ == State::kEnded) return end_;
        trouble_ = words_of(error);
        return is_closed ? Outcome::kClosed : Outcome::kFailed;
    }
    return end(is_closed ? Outcome::kClosed : Outcome::kFailed, words_of(error));
}

Outcome TlsSession::flush() {
    while (begin_ != end_of_out_) {
        const ssize_t num_bytes =
            send(fd_, out_.get() + begin_, end_of_out_ - begin_, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (num_bytes >= 0) {
            begin_ += static_cast<size_t>(num_bytes);
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
            return Outcome::kWantsWrite;
        } else if (errno != EINTR) {
            return cut(errno);
        }
    }
    begin_ = end_of_out_ = 0;
    return Outcome::kDone;
}

Outcome TlsSession::handshake() {
    const openssl::Use use;
    if (!is_alive()) return Outcome::kFailed;
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!may_go_on(State::kGreeting)) return end_;
    if (state_ == State::kGreeting) {
        ssl_.ERR_clear_error();
        const int result = ssl_.SSL_do_handshake(session_);
        if (result != 1) {
            const Outcome outcome = judge(result);
            if (state_ == State::kEnded) return outcome;
            const Outcome flushed = flush();
            return flushed == Outcome::kDone ? outcome : flushed;
        }
        const unsigned char* name = nullptr;
        unsigned length = 0;
        ssl_.SSL_get0_alpn_selected(session_, &name, &length);
        if (name == nullptr ||
            std::string(reinterpret_cast<const char*>(name), length) != kProtocol) {
            return end(Outcome::kFailed, "the peer speaks TLS, but no link");
        }
        state_ = State::kOpen;
        has_nothing_ = false;
    }
    return flush();
}

Outcome TlsSession::read(const iovec* parts, int num_parts, size_t& done) {
    done = 0;
    const openssl::Use use;
    if (!is_alive()) return Outcome::kFailed;
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!may_go_on(State::kOpen)) return end_;
    ssl_.ERR_clear_error();
    has_nothing_ = false;
    for (int part = 0; part < num_parts; ++part) {
        auto* const data = static_cast<uint8_t*>(parts[part].iov_base);
        for (size_t filled = 0; filled < parts[part].iov_len;) {
            size_t step = 0;
            const int result =
                ssl_.SSL_read_ex(session_, data + filled, parts[part].iov_len - filled, &step);
            if (result != 1) {
                const Outcome outcome = judge(result);
                has_nothing_ = outcome == Outcome::kWantsRead;
                return outcome;
            }
            filled += step;
            done += step;
        }
    }
    return Outcome::kDone;
}

// A position in a list of parts.
struct TlsSession::Parts {
    const iovec* parts;
    int num_parts;
    size_t at = 0;  // offset in the first part: the bytes before it are taken

    void skip(size_t num_bytes) {
        at += num_bytes;
        while (num_parts > 0 && at >= parts->iov_len) {
            at -= parts->iov_len;
            ++parts;
            --num_parts;
        }
    }
};

iovec TlsSession::next_record(const Parts& parts) {
    const size_t rest = parts.parts->iov_len - parts.at;
    uint8_t* const data = static_cast<uint8_t*>(parts.parts->iov_base) + parts.at;
    if (rest >= kRecordBytes || parts.num_parts == 1) return {data, std::min(rest, kRecordBytes)};
    size_t num_gathered = 0;
    for (Parts next = parts; next.num_parts > 0 && num_gathered < kRecordBytes;) {
        const size_t step = std::min(next.parts->iov_len - next.at, kRecordBytes - num_gathered);
        std::memcpy(gathered_.data() + num_gathered,
                    static_cast<const uint8_t*>(next.parts->iov_base) + next.at, step);
        num_gathered += step;
        next.skip(step);
    }
    return {gathered_.data(), num_gathered};
}

Outcome TlsSession::write(const iovec* parts, int num_parts, size_t& done) {
    done = 0;
    const openssl::Use use;
    if (!is_alive()) return Outcome::kFailed;
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!may_go_on(State::kOpen)) return end_;
    ssl_.ERR_clear_error();
    if (is_cut_) return Outcome::kClosed;
    Parts left{parts, num_parts};
    left.skip(0);
    for (;;) {
        while (left.num_parts > 0 && kOutBytes - end_of_out_ >= kRoomOfRecord) {
            const iovec record = next_record(left);
            size_t step = 0;
            const int result = ssl_.SSL_write_ex(session_, record.iov_base, record.iov_len, &step);
            if (result != 1) return judge(result);
            left.skip(step);
            done += step;
            since_rekey_ += step;
            if (since_rekey_ >= identity_->rekey_bytes_) {
                // The message about the new key is sent with the next record.
                if (ssl_.SSL_key_update(session_, kKeyUpdateNotRequested) != 1) return judge(0);
                since_rekey_ = 0;
            }
        }
        const Outcome outcome = flush();
        if (outcome != Outcome::kDone || left.num_parts == 0) return outcome;
    }
}

Outcome TlsSession::read(void* data, size_t size, size_t& done) {
    const iovec part{data, size};
    return read(&part, 1, done);
}

Outcome TlsSession::write(const void* data, size_t size, size_t& done) {
    const iovec part{const_cast<void*>(data), size};
    return write(&part, 1, done);
}

Outcome TlsSession::close() {
    const openssl::Use use;
    if (!is_alive()) return Outcome::kFailed;
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!may_go_on(State::kOpen)) return end_;
    if (is_cut_) return Outcome::kClosed;
    ssl_.ERR_clear_error();
    const int result = ssl_.SSL_shutdown(session_);
    // A result of 0 is no error: this side's closing alert is ready, and the peer's has not come.
    if (result < 0) {
        const Outcome outcome = judge(result);
        if (state_ == State::kEnded) return outcome;
    }
    return flush();
}

bool TlsSession::has_pending() const {
    const openssl::Use use;
    if (!is_alive()) return false;
    const std::lock_guard<std::mutex> lock(mutex_);
    return state_ == State::kOpen && !has_nothing_ && ssl_.SSL_has_pending(session_) == 1;
}

bool TlsSession::has_unsent() const {
    if (!is_alive()) return false;
    const std::lock_guard<std::mutex> lock(mutex_);
    return begin_ != end_of_out_;
}

std::string TlsSession::cipher() const {
    const openssl::Use use;
    if (!is_alive()) return "";
    const std::lock_guard<std::mutex> lock(mutex_);
    const openssl::SSL_CIPHER* const cipher = ssl_.SSL_get_current_cipher(session_);
    return cipher == nullptr ? "" : ssl_.SSL_CIPHER_get_name(cipher);
}

std::string TlsSession::trouble() const {
    if (openssl::is_over()) return kIsOver;
    if (!is_alive()) return "a child of fork() must not use a connection of its parent";
    const std::lock_guard<std::mutex> lock(mutex_);
    return trouble_;
}

}  // namespace diloco::link
