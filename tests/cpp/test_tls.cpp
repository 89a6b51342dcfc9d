// TLS over real sockets: what arrives, what is refused with which sentence, and what a stranger
// sees.
#include <dlfcn.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <future>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "exchange/link/tls.h"

namespace {

using diloco::link::Identity;
using diloco::link::make_key;
using diloco::link::PublicKey;
using diloco::link::Seed;
using diloco::link::TlsError;
using diloco::link::TlsSession;
using Outcome = TlsSession::Outcome;
using IdentityPtr = std::shared_ptr<Identity>;
using Bytes = std::vector<uint8_t>;

constexpr size_t kMiB = 1024 * 1024;

bool allow_all(const PublicKey&) { return true; }
bool allow_none(const PublicKey&) { return false; }

TlsSession::IsAllowed only(const IdentityPtr& one) {
    return [key = one->public_key()](const PublicKey& shown) { return shown == key; };
}

IdentityPtr identity(uint64_t rekey_bytes = Identity::kRekeyBytes) {
    return Identity::open(make_key().first, rekey_bytes);
}

// Two connected non-blocking sockets.
struct Sockets {
    int fds[2] = {-1, -1};

    explicit Sockets(bool over_tcp = false) {
        if (!over_tcp) {
            EXPECT(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds) == 0);
            return;
        }
        sockaddr_in address{};
        const int listener = listen_on_loopback(address);
        fds[0] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        EXPECT(connect(fds[0], reinterpret_cast<sockaddr*>(&address), sizeof(address)) == 0);
        fds[1] = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
        EXPECT(fds[1] >= 0 && fcntl(fds[0], F_SETFL, O_NONBLOCK) == 0);
        close(listener);
    }
    ~Sockets() {
        for (const int end : {0, 1}) hang_up(end);
    }
    Sockets(const Sockets&) = delete;
    Sockets& operator=(const Sockets&) = delete;

    void hang_up(int end) {
        if (fds[end] >= 0) close(fds[end]);
        fds[end] = -1;
    }

    static int listen_on_loopback(sockaddr_in& address) {
        const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        address.sin_family = AF_INET;
        address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        socklen_t length = sizeof(address);
        EXPECT(bind(fd, reinterpret_cast<sockaddr*>(&address), length) == 0 && listen(fd, 8) == 0);
        EXPECT(getsockname(fd, reinterpret_cast<sockaddr*>(&address), &length) == 0);
        return fd;
    }
};

bool is_end(Outcome outcome) { return outcome == Outcome::kClosed || outcome == Outcome::kFailed; }

void wait_for(int fd, Outcome outcome) {
    pollfd one{fd, static_cast<short>(outcome == Outcome::kWantsWrite ? POLLOUT : POLLIN), 0};
    EXPECT(poll(&one, 1, 60'000) == 1);
}

// Handshakes in turns until nothing changes any more.
std::pair<Outcome, Outcome> greet(TlsSession& first, TlsSession& second) {
    std::pair<Outcome, Outcome> outcomes;
    for (int turn = 0; turn < 8; ++turn) {
        outcomes.first = first.handshake();
        outcomes.second = second.handshake();
    }
    return outcomes;
}

// Two sessions that have greeted each other.
struct Pair {
    Sockets sockets;
    IdentityPtr dialling, accepting;
    TlsSession dialler, acceptor;

    explicit Pair(bool over_tcp = false, uint64_t rekey_bytes = Identity::kRekeyBytes)
        : sockets(over_tcp),
          dialling(identity(rekey_bytes)),
          accepting(identity(rekey_bytes)),
          dialler(dialling, sockets.fds[0], true, only(accepting)),
          acceptor(accepting, sockets.fds[1], false, only(dialling)) {
        // TCP may take a moment.
        for (bool is_open = false; !is_open;) {
            const auto [first, second] = greet(dialler, acceptor);
            EXPECT(!is_end(first) && !is_end(second));
            is_open = first == Outcome::kDone && second == Outcome::kDone;
        }
    }
};

uint8_t byte_at(uint64_t place, uint8_t salt) {
    return static_cast<uint8_t>((place * 0x9e3779b97f4a7c15ULL) >> 56) ^ salt;
}

Bytes pattern(size_t size, uint8_t salt = 0, uint64_t begin = 0) {
    Bytes bytes(size);
    for (size_t i = 0; i < size; ++i) bytes[i] = byte_at(begin + i, salt);
    return bytes;
}

// Reads what there is, at most `size` bytes.
Bytes read_some(TlsSession& session, size_t size, Outcome* outcome = nullptr) {
    Bytes bytes(size);
    size_t done = 0;
    const Outcome is = session.read(bytes.data(), size, done);
    if (outcome != nullptr) *outcome = is;
    bytes.resize(done);
    return bytes;
}

Outcome say(TlsSession& session, const std::string& text) {
    size_t done = 0;
    return session.write(text.data(), text.size(), done);
}

bool has(const std::string& text, const char* part) {
    if (text.find(part) != std::string::npos) return true;
    std::fprintf(stderr, "expected \"%s\" in \"%s\"\n", part, text.c_str());
    return false;
}

int num_descriptors() {
    int count = 0;
    for (const auto& one : std::filesystem::directory_iterator("/proc/self/fd")) {
        (void)one;
        ++count;
    }
    return count;
}

// ------------------------------------------------------------------------------ the library

void test_library() {
    void* const library = dlopen("libssl.so.3", RTLD_NOW);
    EXPECT(library != nullptr);
    const auto trouble_of = [&](const char* missing, void* version) -> std::string {
        try {
            diloco::link::openssl::find_functions("libssl.so.3", [&](const char* name) -> void* {
                if (std::strcmp(name, missing) == 0) return nullptr;
                if (version != nullptr && std::strcmp(name, "OpenSSL_version_num") == 0) {
                    return version;
                }
                return dlsym(library, name);
            });
        } catch (const TlsError& error) {
            return error.what();
        }
        return "";
    };
    EXPECT(trouble_of("", nullptr).empty());
    EXPECT(trouble_of("SSL_key_update", nullptr) ==
           "an encrypted link needs OpenSSL 3.0 or newer, and libssl.so.3 has no function "
           "SSL_key_update");
    unsigned long (*const old)() = [] { return 0x1010117fUL; };
    EXPECT(trouble_of("", reinterpret_cast<void*>(old)) ==
           "an encrypted link needs OpenSSL 3.0 or newer, and libssl.so.3 is of version 1.1");
}

void test_keys() {
    // The first example of RFC 8032, 7.1.
    const Seed seed{0x9d, 0x61, 0xb1, 0x9d, 0xef, 0xfd, 0x5a, 0x60, 0xba, 0x84, 0x4a,
                    0xf4, 0x92, 0xec, 0x2c, 0xc4, 0x44, 0x49, 0xc5, 0x69, 0x7b, 0x32,
                    0x69, 0x19, 0x70, 0x3b, 0xac, 0x03, 0x1c, 0xae, 0x7f, 0x60};
    EXPECT(diloco::link::to_hex(Identity::open(seed)->public_key()) ==
           "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a");
    const auto [own, key] = make_key();
    EXPECT(Identity::open(own)->public_key() == key && make_key().second != key);
}

// ------------------------------------------------------------------------------------- bytes

void test_sizes() {
    for (const bool over_tcp : {false, true}) {
        Pair pair(over_tcp);
        EXPECT(pair.dialler.peer() == pair.accepting->public_key());
        EXPECT(pair.acceptor.peer() == pair.dialling->public_key());
        EXPECT(has(pair.dialler.cipher(), "TLS_"));
        for (const size_t size :
             std::vector<size_t>{0, 1, 1023, 16383, 16384, 16385, 65535, 65537, 5 * kMiB + 3}) {
            // A header, an empty part and the rest, as the link has them.
            const Bytes sent = pattern(size + 40, static_cast<uint8_t>(size));
            Bytes got(sent.size());
            size_t num_sent = 0, num_got = 0;
            while (num_got < sent.size()) {
                Bytes from = sent;  // other memory at each call
                const size_t head = num_sent < 40 ? 40 - num_sent : 0;
                const iovec parts[3] = {
                    {from.data() + num_sent, head},
                    {nullptr, 0},
                    {from.data() + num_sent + head, sent.size() - num_sent - head}};
                size_t done = 0;
                const Outcome wrote = pair.dialler.write(parts, 3, done);
                EXPECT(!is_end(wrote));
                num_sent += done;
                EXPECT((wrote == Outcome::kDone) == !pair.dialler.has_unsent());
                EXPECT(wrote != Outcome::kDone || num_sent == sent.size());
                const size_t half = (got.size() - num_got) / 2;
                const iovec into[2] = {{got.data() + num_got, half},
                                       {got.data() + num_got + half, got.size() - num_got - half}};
                EXPECT(!is_end(pair.acceptor.read(into, 2, done)));
                num_got += done;
            }
            EXPECT(got == sent && num_sent == sent.size());
        }
    }
}

// Sends and receives at once, in parts of random sizes.
void talk(TlsSession& session, int fd, uint64_t num_bytes, uint8_t own, uint8_t others) {
    std::mt19937 random(own);
    const auto below = [&](size_t limit) { return 1 + random() % limit; };
    uint64_t num_sent = 0, num_got = 0;
    Bytes memory(512 * 1024);
    while (num_sent < num_bytes || num_got < num_bytes || session.has_unsent()) {
        size_t done = 0;
        const size_t first = std::min(below(random() % 2 ? 64 : memory.size()), memory.size() / 2);
        const size_t size = static_cast<size_t>(
            std::min<uint64_t>(first + below(memory.size() / 2), num_bytes - num_sent));
        for (size_t i = 0; i < size; ++i) memory[i] = byte_at(num_sent + i, own);
        const iovec parts[2] = {{memory.data(), std::min(first, size)},
                                {memory.data() + first, size - std::min(first, size)}};
        const Outcome wrote = session.write(parts, 2, done);
        EXPECT(!is_end(wrote));
        num_sent += done;
        const size_t wanted = below(random() % 2 ? 100 : memory.size());
        const Outcome got = session.read(memory.data(), wanted, done);
        EXPECT(!is_end(got) && done <= wanted);
        for (size_t i = 0; i < done; ++i) EXPECT(memory[i] == byte_at(num_got + i, others));
        num_got += done;
        EXPECT(got == Outcome::kWantsRead ? !session.has_pending() : done == wanted);
        if (wrote == Outcome::kWantsWrite && got == Outcome::kWantsRead) {
            pollfd one{fd, POLLIN | POLLOUT, 0};
            EXPECT(poll(&one, 1, 60'000) == 1);
        } else if (num_sent == num_bytes && got == Outcome::kWantsRead && num_got < num_bytes) {
            wait_for(fd, got);
        }
    }
    EXPECT(num_sent == num_bytes && num_got == num_bytes);
}

void test_both_ways(uint64_t num_bytes) {
    Pair pair(true, 3 * kMiB);
    std::thread other([&] { talk(pair.acceptor, pair.sockets.fds[1], num_bytes, 2, 1); });
    talk(pair.dialler, pair.sockets.fds[0], num_bytes, 1, 2);
    other.join();
}

// One thread reads while another writes, at both ends.
void test_threads() {
    Pair pair(true, kMiB);
    const uint64_t num_bytes = 8 * kMiB;
    const auto send_all = [&](TlsSession& session, int fd, uint8_t salt) {
        const Bytes bytes = pattern(num_bytes, salt);
        for (size_t sent = 0, done = 0; sent < bytes.size() || session.has_unsent(); sent += done) {
            const size_t size = std::min<size_t>(256 * 1024 + 40, bytes.size() - sent);
            const Outcome outcome = session.write(bytes.data() + sent, size, done);
            EXPECT(!is_end(outcome));
            if (outcome == Outcome::kWantsWrite) wait_for(fd, outcome);
        }
    };
    const auto receive_all = [&](TlsSession& session, int fd, uint8_t salt) {
        Bytes bytes(num_bytes);
        for (size_t got = 0, done = 0; got < bytes.size(); got += done) {
            const Outcome outcome = session.read(bytes.data() + got, bytes.size() - got, done);
            EXPECT(!is_end(outcome));
            if (outcome == Outcome::kWantsRead) wait_for(fd, outcome);
        }
        EXPECT(bytes == pattern(num_bytes, salt));
    };
    const int* const fds = pair.sockets.fds;
    std::thread threads[4] = {std::thread([&] { send_all(pair.dialler, fds[0], 1); }),
                              std::thread([&] { receive_all(pair.dialler, fds[0], 2); }),
                              std::thread([&] { send_all(pair.acceptor, fds[1], 2); }),
                              std::thread([&] { receive_all(pair.acceptor, fds[1], 1); })};
    for (std::thread& one : threads) one.join();
}

// The caller's memory is free as soon as `done` says so, however little the kernel has taken.
void test_memory_of_writes() {
    Pair pair;
    const size_t num_bytes = 4 * kMiB;
    Bytes got;
    int num_cuts = 0;
    for (size_t sent = 0; got.size() < num_bytes;) {
        void* const memory =
            mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        EXPECT(memory != MAP_FAILED);
        const Bytes rest = pattern(num_bytes - sent, 7, sent);
        std::copy(rest.begin(), rest.end(), static_cast<uint8_t*>(memory));
        size_t done = 0;
        const Outcome outcome = pair.dialler.write(memory, rest.size(), done);
        munmap(memory, num_bytes);
        EXPECT(!is_end(outcome) && done <= rest.size());
        if (outcome == Outcome::kWantsWrite) ++num_cuts;
        sent += done;
        const Bytes some = read_some(pair.acceptor, 100'001);
        got.insert(got.end(), some.begin(), some.end());
    }
    EXPECT(num_cuts > 3 && got == pattern(num_bytes, 7));
}

void test_pending() {
    Pair pair;
    EXPECT(!pair.acceptor.has_pending());
    EXPECT(say(pair.dialler, std::string(40'000, 'x')) == Outcome::kDone);
    EXPECT(read_some(pair.acceptor, 10).size() == 10);
    // The kernel has nothing more, and the session has.
    pollfd one{pair.sockets.fds[1], POLLIN, 0};
    EXPECT(poll(&one, 1, 0) == 0 && pair.acceptor.has_pending());
    EXPECT(read_some(pair.acceptor, 39'990).size() == 39'990 && !pair.acceptor.has_pending());
    Outcome outcome = Outcome::kDone;
    EXPECT(read_some(pair.acceptor, 10, &outcome).empty() && outcome == Outcome::kWantsRead);
}

// ---------------------------------------------------------------------------------- refusals

void test_refused_keys() {
    const IdentityPtr dialling = identity(), accepting = identity();
    const std::string key = diloco::link::to_hex(dialling->public_key());
    {
        Sockets sockets;
        TlsSession dialler(dialling, sockets.fds[0], true, only(accepting));
        TlsSession acceptor(accepting, sockets.fds[1], false, allow_none);
        const auto [first, second] = greet(dialler, acceptor);
        EXPECT(first == Outcome::kDone && second == Outcome::kFailed);
        EXPECT(acceptor.trouble() == "the key of the peer is not allowed: " + key);
        // It stays so.
        EXPECT(say(acceptor, "hello") == Outcome::kFailed);
        sockets.hang_up(1);
        // A write meets the refusal, too, with the reason, and no signal ends the process.
        EXPECT(say(dialler, "hello") == Outcome::kFailed);
        EXPECT(dialler.trouble() == "the peer does not allow this process's key");
        Outcome outcome = Outcome::kDone;
        EXPECT(read_some(dialler, 10, &outcome).empty() && outcome == Outcome::kFailed);
    }
    {
        Sockets sockets;
        TlsSession dialler(dialling, sockets.fds[0], true, only(dialling));
        TlsSession acceptor(accepting, sockets.fds[1], false, allow_all);
        const auto [first, second] = greet(dialler, acceptor);
        EXPECT(first == Outcome::kFailed && second == Outcome::kFailed);
        EXPECT(has(dialler.trouble(), "the key of the peer is not allowed: "));
        EXPECT(acceptor.trouble() == "the peer does not allow this process's key");
    }
    Sockets sockets;
    TlsSession dialler(dialling, sockets.fds[0], true, allow_all);
    TlsSession acceptor(accepting, sockets.fds[1], false, [](const PublicKey&) -> bool {
        throw std::runtime_error("the folder of keys is gone");
    });
    EXPECT(greet(dialler, acceptor).second == Outcome::kFailed);
    EXPECT(has(acceptor.trouble(), "could not be judged: the folder of keys is gone"));
}

// Two diallers, two acceptors, and a use before the handshake.
void test_roles() {
    const IdentityPtr own = identity();
    for (const bool are_diallers : {true, false}) {
        Sockets sockets;
        TlsSession first(own, sockets.fds[0], are_diallers, allow_all);
        TlsSession second(own, sockets.fds[1], are_diallers, allow_all);
        const auto [one, other] = greet(first, second);
        if (are_diallers) {
            EXPECT(one == Outcome::kFailed && other == Outcome::kFailed);
            EXPECT(!first.trouble().empty() && !second.trouble().empty());
        } else {
            EXPECT(one == Outcome::kWantsRead && other == Outcome::kWantsRead);
        }
    }
    Sockets sockets;
    TlsSession early(own, sockets.fds[0], true, allow_all);
    EXPECT(say(early, "hello") == Outcome::kFailed && has(early.trouble(), "before its handshake"));
}

void test_plain_bytes() {
    std::mt19937 random(1);
    std::vector<std::string> openings{"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
                                      "SSH-2.0-OpenSSH_9.2\r\n", "DILOLINK" + std::string(40, '\0'),
                                      std::string(64, '\0'), std::string(20'000, '\x16')};
    for (int i = 0; i < 50; ++i) {
        std::string noise(64, ' ');
        for (char& one : noise) one = static_cast<char>(random());
        openings.push_back(noise);
    }
    const IdentityPtr own = identity();
    for (const std::string& opening : openings) {
        for (const bool is_dialler : {false, true}) {
            Sockets sockets;
            TlsSession session(own, sockets.fds[0], is_dialler, allow_all);
            EXPECT(write(sockets.fds[1], opening.data(), opening.size()) ==
                   static_cast<ssize_t>(opening.size()));
            Outcome outcome = session.handshake();
            if (outcome == Outcome::kWantsRead) {
                // Noise may announce a long record.
                sockets.hang_up(1);
                outcome = session.handshake();
            }
            const std::string http = opening.rfind("GET", 0) == 0 ? ", but HTTP" : "";
            EXPECT(is_end(outcome) && session.trouble() == "the peer does not speak TLS" + http);
        }
    }
}

void test_ends() {
    {
        Pair pair;
        EXPECT(say(pair.dialler, "last words") == Outcome::kDone);
        EXPECT(pair.dialler.close() == Outcome::kDone);
        EXPECT(say(pair.dialler, "more") == Outcome::kFailed);
        EXPECT(has(pair.dialler.trouble(), "said goodbye already"));
        Outcome outcome = Outcome::kDone;
        EXPECT(read_some(pair.acceptor, 100, &outcome).size() == 10);
        EXPECT(outcome == Outcome::kClosed);
        EXPECT(pair.acceptor.trouble() == "connection closed by the peer");
    }
    {
        Pair pair;
        EXPECT(say(pair.dialler, "last words") == Outcome::kDone);
        pair.sockets.hang_up(0);
        Outcome outcome = Outcome::kDone;
        // A write that meets the end leaves what has come to be read. No signal ends the process.
        EXPECT(say(pair.acceptor, "hello") == Outcome::kClosed);
        EXPECT(pair.acceptor.trouble() == "connection closed by the peer");
        EXPECT(say(pair.acceptor, "hello") == Outcome::kClosed);
        EXPECT(read_some(pair.acceptor, 100, &outcome).size() == 10);
        EXPECT(outcome == Outcome::kClosed);
        EXPECT(pair.acceptor.trouble() == "connection closed by the peer without a goodbye");
    }
    {
        Sockets sockets;
        TlsSession dialler(identity(), sockets.fds[0], true, allow_all);
        EXPECT(dialler.handshake() == Outcome::kWantsRead);
        sockets.hang_up(1);
        EXPECT(is_end(dialler.handshake()));
        EXPECT(has(dialler.trouble(), "connection closed by the peer"));
    }
    // A reset.
    Pair pair(true);
    const linger at_once{1, 0};
    setsockopt(pair.sockets.fds[0], SOL_SOCKET, SO_LINGER, &at_once, sizeof(at_once));
    pair.sockets.hang_up(0);
    wait_for(pair.sockets.fds[1], Outcome::kWantsRead);
    Outcome outcome = Outcome::kDone;
    EXPECT(read_some(pair.acceptor, 100, &outcome).empty() && outcome == Outcome::kClosed);
    EXPECT(pair.acceptor.trouble() == "connection closed by the peer");
}

// -------------------------------------------------------------------------------- in between

// Two sessions with this test in the middle, which sees and changes what passes.
struct Tapped {
    Sockets left, right;
    IdentityPtr dialling, accepting;
    TlsSession dialler, acceptor;
    Bytes seen[2];  // from the dialler, from the acceptor

    explicit Tapped(uint64_t rekey_bytes = Identity::kRekeyBytes)
        : dialling(identity(rekey_bytes)),
          accepting(identity(rekey_bytes)),
          dialler(dialling, left.fds[0], true, only(accepting)),
          acceptor(accepting, right.fds[1], false, only(dialling)) {
        for (int turn = 0; turn < 8; ++turn) {
            EXPECT(!is_end(dialler.handshake()));
            pass(0);
            EXPECT(!is_end(acceptor.handshake()));
            pass(1);
        }
        EXPECT(dialler.handshake() == Outcome::kDone && acceptor.handshake() == Outcome::kDone);
        for (Bytes& one : seen) one.clear();
    }

    Bytes take(int from) {
        Bytes bytes(kMiB);
        const ssize_t size =
            recv(from == 0 ? left.fds[1] : right.fds[0], bytes.data(), bytes.size(), MSG_DONTWAIT);
        bytes.resize(size > 0 ? static_cast<size_t>(size) : 0);
        seen[from].insert(seen[from].end(), bytes.begin(), bytes.end());
        return bytes;
    }
    void give(int from, const Bytes& bytes) {
        EXPECT(send(from == 0 ? right.fds[0] : left.fds[1], bytes.data(), bytes.size(),
                    MSG_DONTWAIT | MSG_NOSIGNAL) == static_cast<ssize_t>(bytes.size()));
    }
    void pass(int from) { give(from, take(from)); }

    // The lengths of the records that have passed.
    std::vector<size_t> records(int from) const {
        std::vector<size_t> lengths;
        const Bytes& all = seen[from];
        for (size_t at = 0; at + 5 <= all.size(); at += 5 + lengths.back()) {
            lengths.push_back(size_t{all[at + 3]} * 256 + all[at + 4]);
        }
        return lengths;
    }
};

void test_a_listener_learns_nothing() {
    Tapped tapped;
    const std::string secret(5000, 's');
    EXPECT(say(tapped.dialler, secret) == Outcome::kDone);
    tapped.pass(0);
    EXPECT(read_some(tapped.acceptor, secret.size()).size() == secret.size());
    const std::string seen(tapped.seen[0].begin(), tapped.seen[0].end());
    EXPECT(seen.size() > secret.size() && seen.find("ssss") == std::string::npos);
    // No ticket for a later connection came after the handshake.
    tapped.pass(1);
    EXPECT(tapped.seen[1].empty());
}

void test_changed_bytes() {
    for (const size_t place : {0U, 3U, 100U, 5000U}) {
        Tapped tapped;
        EXPECT(say(tapped.dialler, std::string(5000, 's')) == Outcome::kDone);
        Bytes bytes = tapped.take(0);
        bytes[place] ^= 1;
        tapped.give(0, bytes);
        Outcome outcome = Outcome::kDone;
        EXPECT(read_some(tapped.acceptor, 5000, &outcome).empty() && outcome == Outcome::kFailed);
        EXPECT(!tapped.acceptor.trouble().empty());
        if (place >= 5) EXPECT(has(tapped.acceptor.trouble(), "bytes of the connection were"));
    }
    // The same record a second time.
    Tapped tapped;
    EXPECT(say(tapped.dialler, "once") == Outcome::kDone);
    const Bytes bytes = tapped.take(0);
    tapped.give(0, bytes);
    tapped.give(0, bytes);
    Outcome outcome = Outcome::kDone;
    EXPECT(read_some(tapped.acceptor, 100, &outcome).size() == 4 && outcome == Outcome::kFailed);
}

void test_records_in_pieces() {
    Tapped tapped;
    const Bytes sent = pattern(40'000);
    size_t done = 0;
    EXPECT(tapped.dialler.write(sent.data(), sent.size(), done) == Outcome::kDone);
    const Bytes bytes = tapped.take(0);
    Bytes got;
    for (size_t at = 0; at < bytes.size(); at += 97) {
        const size_t size = std::min<size_t>(97, bytes.size() - at);
        tapped.give(0, Bytes(bytes.begin() + at, bytes.begin() + at + size));
        Outcome outcome = Outcome::kDone;
        const Bytes some = read_some(tapped.acceptor, sent.size() + 1, &outcome);
        EXPECT(outcome == Outcome::kWantsRead && !tapped.acceptor.has_pending());
        got.insert(got.end(), some.begin(), some.end());
    }
    EXPECT(got == sent);
    // Cut off inside a record.
    EXPECT(tapped.dialler.write(sent.data(), 1000, done) == Outcome::kDone);
    Bytes half = tapped.take(0);
    half.resize(half.size() / 2);
    tapped.give(0, half);
    tapped.right.hang_up(0);
    Outcome outcome = Outcome::kDone;
    EXPECT(read_some(tapped.acceptor, 1000, &outcome).empty() && outcome == Outcome::kClosed);
    EXPECT(tapped.acceptor.trouble() == "connection closed by the peer without a goodbye");
}

// Small parts share records, and the writing key changes after so many bytes.
void test_records_and_keys() {
    Tapped tapped(100'000);
    std::vector<uint8_t> memory = pattern(300'000);
    std::vector<iovec> parts;
    for (size_t i = 0; i < 100; ++i) parts.push_back({memory.data() + 40 * i, 40});
    parts.push_back({memory.data() + 4000, 30'000});
    size_t done = 0;
    EXPECT(tapped.dialler.write(parts.data(), static_cast<int>(parts.size()), done) ==
           Outcome::kDone);
    EXPECT(done == 34'000);
    tapped.pass(0);
    EXPECT(tapped.records(0).size() == 3);
    EXPECT(read_some(tapped.acceptor, done) == Bytes(memory.begin(), memory.begin() + 34'000));
    for (size_t sent = 34'000; sent < memory.size(); sent += done) {
        const size_t size = std::min<size_t>(20'000, memory.size() - sent);
        EXPECT(tapped.dialler.write(memory.data() + sent, size, done) == Outcome::kDone);
        tapped.pass(0);
        EXPECT(read_some(tapped.acceptor, size) ==
               Bytes(memory.begin() + sent, memory.begin() + sent + size));
    }
    // A change of keys is a record of 5 bytes, its type and its tag. The third waits for a record.
    const std::vector<size_t> lengths = tapped.records(0);
    EXPECT(std::count(lengths.begin(), lengths.end(), 22) == 2);
}

// ----------------------------------------------------------------------------------- strangers

// The tool `openssl` connects with `arguments`. Returns the acceptor's outcome, and its sentence.
std::pair<Outcome, std::string> meet_tool(const std::string& arguments, const IdentityPtr& own,
                                          const TlsSession::IsAllowed& is_allowed) {
    sockaddr_in address{};
    const int listener = Sockets::listen_on_loopback(address);
    const std::string command = "sleep 60 | timeout 20 openssl s_client -connect 127.0.0.1:" +
                                std::to_string(ntohs(address.sin_port)) + " " + arguments +
                                " >/dev/null 2>&1";
    const pid_t tool = fork();
    if (tool == 0) {
        setpgid(0, 0);
        execl("/bin/sh", "sh", "-c", command.c_str(), nullptr);
        _exit(127);
    }
    wait_for(listener, Outcome::kWantsRead);
    const int fd = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
    close(listener);
    std::pair<Outcome, std::string> met;
    {
        TlsSession acceptor(own, fd, false, is_allowed);
        for (;;) {
            met.first = acceptor.handshake();
            if (met.first == Outcome::kDone || is_end(met.first)) break;
            wait_for(fd, met.first);
        }
        met.second = met.first == Outcome::kDone ? acceptor.cipher() : acceptor.trouble();
    }
    close(fd);
    kill(-tool, SIGKILL);
    waitpid(tool, nullptr, 0);
    return met;
}

void test_tool() {
    if (std::system("openssl version >/dev/null 2>&1") != 0) {
        std::printf("test_tls: the tool openssl is missing, which plays the stranger\n");
        return;
    }
    std::string folder = (std::filesystem::temp_directory_path() / "tls-XXXXXX").string();
    EXPECT(mkdtemp(folder.data()) != nullptr);
    const auto make = [&](const char* name, const char* algorithm) {
        const std::string path = folder + "/" + name;
        const std::string command = std::string("openssl req -x509 -newkey ") + algorithm +
                                    " -nodes -days 1 -subj /CN=x -keyout " + path + ".key -out " +
                                    path + ".crt >/dev/null 2>&1";
        EXPECT(std::system(command.c_str()) == 0);
        return " -key " + path + ".key -cert " + path + ".crt ";
    };
    const std::string key = make("one", "ed25519"), rsa = make("two", "rsa:2048");
    const std::string alpn = " -alpn diloco-link/1 ";
    const IdentityPtr own = identity();

    EXPECT(meet_tool(alpn, own, allow_all) ==
           std::make_pair(Outcome::kFailed, std::string("the peer showed no certificate")));
    const auto refused = meet_tool(alpn + key, own, allow_none);
    EXPECT(refused.first == Outcome::kFailed && has(refused.second, "the key of the peer is not"));
    EXPECT(meet_tool(alpn + rsa, own, allow_all).first == Outcome::kFailed);
    EXPECT(meet_tool("-tls1_2 " + alpn + key, own, allow_all) ==
           std::make_pair(Outcome::kFailed, std::string("the peer does not speak TLS 1.3")));
    for (const std::string other : {"", "-alpn h2"}) {
        EXPECT(meet_tool(other + key, own, allow_all) ==
               std::make_pair(Outcome::kFailed, std::string("the peer speaks TLS, but no link")));
    }
    EXPECT(meet_tool("-cert_chain " + folder + "/two.crt " + alpn + key, own, allow_all).second ==
           "the peer showed another number of certificates than one");
    // That these were refused for their reasons: with all that is needed, the tool gets in.
    EXPECT(meet_tool(alpn + key, own, allow_all).first == Outcome::kDone);
    EXPECT(meet_tool("-ciphersuites TLS_CHACHA20_POLY1305_SHA256" + alpn + key, own, allow_all)
               .second == "TLS_CHACHA20_POLY1305_SHA256");
    EXPECT(meet_tool("-ciphersuites TLS_AES_128_GCM_SHA256" + alpn + key, own, allow_all) ==
           std::make_pair(Outcome::kFailed,
                          std::string("the peer offers no cipher that is known here")));
    std::filesystem::remove_all(folder);
}

// --------------------------------------------------------------------------------------- forks

// A thread ends, and with it its state in OpenSSL, after another thread has freed the identity.
void test_thread_outlives_identity() {
    for (int i = 0; i < 20; ++i) {
        std::unique_ptr<Pair> pair;
        std::promise<void> used, freed;
        std::thread user([&] {
            pair = std::make_unique<Pair>();
            used.set_value();
            freed.get_future().wait();
        });
        used.get_future().wait();
        pair.reset();
        std::vector<Bytes> blocks;
        for (size_t size = 16; size < 4096; size += 16) blocks.emplace_back(size, 0x5a);
        freed.set_value();
        user.join();
    }
}

void test_forks() {
    Pair pair;
    const pid_t child = fork();
    EXPECT(child >= 0);
    if (child == 0) {
        Outcome outcome = Outcome::kDone;
        EXPECT(say(pair.dialler, "from a child") == Outcome::kFailed);
        EXPECT(read_some(pair.acceptor, 10, &outcome).empty() && outcome == Outcome::kFailed);
        EXPECT(pair.dialler.handshake() == Outcome::kFailed);
        EXPECT(has(pair.dialler.trouble(), "a child of fork()"));
        bool is_refused = false;
        try {
            TlsSession session(pair.dialling, pair.sockets.fds[0], true, allow_all);
        } catch (const TlsError&) {
            is_refused = true;
        }
        EXPECT(is_refused);
        // It may have connections of its own.
        Pair own;
        EXPECT(say(own.dialler, "hello") == Outcome::kDone);
        EXPECT(read_some(own.acceptor, 5).size() == 5);
        _exit(0);
    }
    int status = -1;
    EXPECT(waitpid(child, &status, 0) == child && status == 0);
    EXPECT(say(pair.dialler, "hello") == Outcome::kDone);
    EXPECT(read_some(pair.acceptor, 5).size() == 5);
}

}  // namespace

int main() {
    test_library();
    test_keys();
    test_thread_outlives_identity();
    const int num_before = num_descriptors();
    test_tool();
    test_forks();
    test_sizes();
    test_pending();
    test_memory_of_writes();
    test_refused_keys();
    test_roles();
    test_plain_bytes();
    test_ends();
    test_a_listener_learns_nothing();
    test_changed_bytes();
    test_records_in_pieces();
    test_records_and_keys();
    test_threads();
    test_both_ways(100 * kMiB);
    EXPECT(num_descriptors() == num_before);
    return passed("test_tls");
}
