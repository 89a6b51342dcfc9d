// Links of one process that talk over loopback, and strangers that talk to them.
#pragma once

#include <arpa/inet.h>
#include <dirent.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cstring>
#include <memory>
#include <numeric>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "exchange/link/link.h"

namespace diloco_test {

using diloco::Link;
using std::chrono::milliseconds;
using LinkPtr = std::shared_ptr<Link>;
using Bytes = std::vector<uint8_t>;

constexpr milliseconds kEnough{60000};
constexpr char kAnyPort[] = "127.0.0.1:0";

using diloco::link::Identity;
using diloco::link::Place;
using diloco::link::PublicKey;
using diloco::link::TlsSession;
using Places = std::vector<Place>;

// Whether links and strangers have keys; all of these keys are allowed, unless a test says
// otherwise.
inline bool is_keyed = false;
inline std::set<PublicKey> all_keys;

inline LinkPtr open_link(const std::string& listen, const std::string& advertise,
                         Link::Limits limits = {}) {
    if (!is_keyed) return Link::open(listen, advertise, limits);
    const auto [seed, key] = diloco::link::make_key();
    all_keys.insert(key);
    const LinkPtr link = Link::open(listen, advertise, limits, seed);
    link->allow(all_keys);
    return link;
}
inline LinkPtr open_link() { return open_link(kAnyPort, kAnyPort); }

// The key of all strangers.
inline const std::shared_ptr<Identity>& strange_identity() {
    static const std::shared_ptr<Identity> identity = Identity::open({});
    all_keys.insert(identity->public_key());
    return identity;
}

inline Bytes pattern(size_t num_bytes, int seed) {
    Bytes bytes(num_bytes);
    uint32_t state = static_cast<uint32_t>(seed) * 2654435761u + 1;
    for (uint8_t& byte : bytes) {
        state = state * 1664525u + 1013904223u;
        byte = static_cast<uint8_t>(state >> 24);
    }
    return bytes;
}

// A posted message, and its link.
struct Work {
    LinkPtr link{};
    std::shared_ptr<diloco::link::Message> message{};

    bool is_done() const { return link->is_done(*message); }
    void cancel() const { link->cancel(message); }
};

// The groups of one rank.
class Member {
  public:
    Member(LinkPtr link, int lanes) : link(std::move(link)), lanes(lanes) {}
    ~Member() { close(); }
    Member(Member&& other) = default;

    void connect(const std::string& token, int rank, const Places& peers,
                 milliseconds limit = kEnough) {
        channels = link->connect(token, rank, peers, lanes, limit);
    }

    void close() {
        if (channels.empty()) return;
        for (int number = 0; number < 2 * lanes; ++number) link->close_group(number, channels);
        channels.clear();
    }

    Work send(int peer, int tag, const void* data, size_t num_bytes, int number = 0) const {
        return post(peer, tag, const_cast<void*>(data), num_bytes, number, true);
    }
    Work recv(int peer, int tag, void* data, size_t num_bytes, int number = 0) const {
        return post(peer, tag, data, num_bytes, number, false);
    }
    Work send(int peer, int tag, const Bytes& bytes, int number = 0) const {
        return send(peer, tag, bytes.data(), bytes.size(), number);
    }
    Work recv(int peer, int tag, Bytes& bytes, int number = 0) const {
        return recv(peer, tag, bytes.data(), bytes.size(), number);
    }

    bool wait(const Work& work, milliseconds timeout = kEnough) const {
        return work.link->wait(work.message, timeout);
    }

    // The sentence with which a message fails.
    std::string error_of(const Work& work, milliseconds timeout = kEnough) const {
        try {
            wait(work, timeout);
        } catch (const std::exception& error) {
            return error.what();
        }
        return "";
    }

    int64_t count(const char* name) const { return link->counters().at(name); }

    LinkPtr link;
    int lanes;
    std::vector<std::shared_ptr<diloco::link::Channel>> channels{};

  private:
    Work post(int peer, int tag, void* data, size_t num_bytes, int number, bool is_send) const {
        auto message = std::make_shared<diloco::link::Message>();
        message->is_send = is_send;
        message->data = static_cast<uint8_t*>(data);
        message->num_bytes = num_bytes;
        message->number = static_cast<uint16_t>(number);
        message->tag = static_cast<uint32_t>(tag);
        link->post(*channels[static_cast<size_t>(peer)], message);
        return {link, message};
    }
};

using Members = std::vector<Member>;

inline Places places(const std::vector<LinkPtr>& links) {
    Places found;
    for (const LinkPtr& link : links) {
        const std::string key = link->has_key() ? diloco::link::to_hex(link->public_key()) : "";
        found.push_back({link->nonce(), link->address(), key});
    }
    return found;
}

inline void allow_all(const std::vector<LinkPtr>& links) {
    for (const LinkPtr& link : links) {
        if (link->has_key()) link->allow(all_keys);
    }
}

// All of them connect at once.
inline Members connect_all(const std::vector<LinkPtr>& links, const std::string& token,
                           int lanes = 1) {
    allow_all(links);
    Members members;
    for (const LinkPtr& link : links) members.emplace_back(link, lanes);
    std::vector<std::thread> threads;
    for (size_t rank = 0; rank < links.size(); ++rank) {
        threads.emplace_back(
            [&, rank] { members[rank].connect(token, static_cast<int>(rank), places(links)); });
    }
    for (std::thread& thread : threads) thread.join();
    return members;
}

inline Members connect_new(int size, const std::string& token = "group", int lanes = 1) {
    std::vector<LinkPtr> links;
    for (int i = 0; i < size; ++i) links.push_back(open_link());
    return connect_all(links, token, lanes);
}

// The sentence with which a call of connect() fails.
inline std::string error_of_connect(const LinkPtr& link, int rank, const Places& peers,
                                    milliseconds limit, int lanes = 1,
                                    const std::string& token = "failing") {
    try {
        link->connect(token, rank, peers, lanes, limit);
    } catch (const std::exception& error) {
        return error.what();
    }
    return "";
}

// Calls a connect() that fails with a limit, until the call has said enough. A connect() tries
// until its limit; the second one has more time, which a slow machine may need to hear the reason.
template <class Call>
void call_twice(milliseconds limit, Call has_said) {
    if (!has_said(limit)) has_said(milliseconds{5000});
}

inline bool says(const std::string& text, const std::string& part) {
    if (text.find(part) != std::string::npos) return true;
    std::fprintf(stderr, "\"%s\" does not say \"%s\"\n", text.c_str(), part.c_str());
    return false;
}

// A page-aligned buffer that can vanish at once.
class Mapping {
  public:
    explicit Mapping(size_t num_bytes) : num_bytes_(num_bytes) {
        data_ =
            mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        EXPECT(data_ != MAP_FAILED);
        std::memset(data_, 7, num_bytes);
    }
    ~Mapping() { unmap(); }
    void unmap() {
        if (data_ != nullptr) munmap(data_, num_bytes_);
        data_ = nullptr;
    }
    void* data() const { return data_; }
    size_t size() const { return num_bytes_; }

  private:
    void* data_;
    size_t num_bytes_;
};

inline int num_descriptors() {
    DIR* folder = opendir("/proc/self/fd");
    EXPECT(folder != nullptr);
    int count = 0;
    while (readdir(folder) != nullptr) ++count;
    closedir(folder);
    return count;
}

// A socket that listens on loopback, and the place where it can be dialled.
inline std::pair<int, std::string> listen_on_loopback() {
    sockaddr_in at{};
    at.sin_family = AF_INET;
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    EXPECT(bind(fd, reinterpret_cast<sockaddr*>(&at), sizeof(at)) == 0 && listen(fd, 8) == 0);
    return {fd, diloco::name_of_socket(fd)};
}

// Closes a socket as the kernel does for a process that is killed before it has read all.
inline void reset_socket(int fd) {
    const linger at_once{1, 0};
    setsockopt(fd, SOL_SOCKET, SO_LINGER, &at_once, sizeof(at_once));
    ::close(fd);
}

// A socket that has connected to a link. Where links have keys, greet() begins with TLS.
class Stranger {
  public:
    Stranger() : fd_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) { EXPECT(fd_ >= 0); }
    explicit Stranger(const std::string& address, const char* from = "127.0.0.1") : Stranger() {
        connect(address, from);
    }

    // From an address of loopback.
    void connect(const std::string& address, const char* from = "127.0.0.1") {
        sockaddr_in own{};
        own.sin_family = AF_INET;
        inet_pton(AF_INET, from, &own.sin_addr);
        EXPECT(bind(fd_, reinterpret_cast<sockaddr*>(&own), sizeof(own)) == 0);
        sockaddr_in to{};
        to.sin_family = AF_INET;
        to.sin_port =
            htons(static_cast<uint16_t>(std::stoi(address.substr(address.rfind(':') + 1))));
        inet_pton(AF_INET, "127.0.0.1", &to.sin_addr);
        EXPECT(::connect(fd_, reinterpret_cast<sockaddr*>(&to), sizeof(to)) == 0);
        const timeval limit{60, 0};
        setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
        const int yes = 1;
        setsockopt(fd_, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof(yes));
    }
    ~Stranger() { close(); }

    void close() {
        session_.reset();
        if (fd_ >= 0) ::close(fd_);
        fd_ = -1;
    }

    void reset() {
        session_.reset();
        reset_socket(std::exchange(fd_, -1));
    }

    // Proves the key of an identity; whether the link's key was right, too.
    bool begin_tls(const std::shared_ptr<Identity>& identity = strange_identity()) {
        const auto allow = [](const PublicKey&) { return true; };
        session_ = std::make_unique<TlsSession>(identity, fd_, true, allow);
        return repeat([&] { return session_->handshake(); });
    }

    // Whether all could be written.
    bool write(const void* data, size_t num_bytes) const {
        if (session_) {
            iovec part{const_cast<void*>(data), num_bytes};
            return repeat([&] {
                size_t done = 0;
                const auto outcome = session_->write(&part, 1, done);
                part = {static_cast<uint8_t*>(part.iov_base) + done, part.iov_len - done};
                return outcome;
            });
        }
        return ::send(fd_, data, num_bytes, MSG_NOSIGNAL) == static_cast<ssize_t>(num_bytes);
    }

    template <class T>
    bool write(const T& item) const {
        return write(&item, sizeof(item));
    }

    bool read(void* data, size_t num_bytes) const {
        if (session_) {
            iovec part{data, num_bytes};
            return repeat([&] {
                size_t done = 0;
                const auto outcome = session_->read(&part, 1, done);
                part = {static_cast<uint8_t*>(part.iov_base) + done, part.iov_len - done};
                return outcome;
            });
        }
        return ::recv(fd_, data, num_bytes, MSG_WAITALL) == static_cast<ssize_t>(num_bytes);
    }

    // Whether the link has written, or has closed the connection, within a time. Not with TLS.
    bool has_bytes(milliseconds limit) const {
        pollfd wanted{fd_, POLLIN, 0};
        return poll(&wanted, 1, static_cast<int>(limit.count())) > 0;
    }

    // Reads on; whether the link has closed the connection.
    bool is_closed() const {
        char bytes[4096];
        if (session_) {
            while (read(bytes, 1)) continue;
            return true;
        }
        ssize_t got;
        do {
            got = ::recv(fd_, bytes, sizeof(bytes), 0);
        } while (got > 0);
        return got == 0 || errno == ECONNRESET;
    }

    // Greets as a process with a nonce of its own, or as the one of `own`.
    diloco::link::Answer greet(const std::string& nonce,
                               uint32_t version = diloco::link::kLinkVersion,
                               const std::string& own = std::string(32, '5')) {
        if (is_keyed && !session_) EXPECT(begin_tls());
        EXPECT(write(hello(nonce, version, own)));
        return answer();
    }

    static diloco::link::Hello hello(const std::string& nonce,
                                     uint32_t version = diloco::link::kLinkVersion,
                                     const std::string& own = std::string(32, '5')) {
        diloco::link::Hello hello;
        hello.version = version;
        hello.own = nonce_of(own);
        hello.wanted = nonce_of(nonce);
        return hello;
    }

    diloco::link::Answer answer() const {
        diloco::link::Answer answer;
        EXPECT(read(&answer, sizeof(answer)));
        return answer;
    }

  private:
    static diloco::link::Nonce nonce_of(const std::string& text) {
        diloco::link::Nonce nonce;
        for (size_t i = 0; i < nonce.size(); ++i) {
            nonce[i] = static_cast<uint8_t>(std::stoi(text.substr(2 * i, 2), nullptr, 16));
        }
        return nonce;
    }

    // Until it is done; whether it went well.
    template <class Step>
    bool repeat(Step step) const {
        while (true) {
            const TlsSession::Outcome outcome = step();
            if (outcome == TlsSession::Outcome::kDone) return true;
            if (outcome > TlsSession::Outcome::kWantsWrite) return false;
            const bool reads = outcome == TlsSession::Outcome::kWantsRead;
            pollfd wanted{fd_, static_cast<short>(reads ? POLLIN : POLLOUT), 0};
            if (poll(&wanted, 1, 60000) <= 0) return false;
        }
    }

    int fd_ = -1;
    std::unique_ptr<TlsSession> session_{};
};

// Reads frames of a link until a join, which names the group that the link has begun; returns the
// group's token. Pings and signs of life may come before.
template <typename Read>
uint64_t token_of_join(const Read& read) {
    while (true) {
        diloco::link::Frame frame;
        EXPECT(read(&frame, sizeof(frame)));
        Bytes payload(frame.length);
        EXPECT(payload.empty() || read(payload.data(), payload.size()));
        if (frame.kind == static_cast<uint8_t>(diloco::link::FrameKind::kJoin)) return frame.token;
    }
}

}  // namespace diloco_test
