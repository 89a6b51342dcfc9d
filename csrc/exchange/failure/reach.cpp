#include "exchange/failure/reach.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <optional>

namespace diloco {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// The most descriptors at once: a process may not have more.
constexpr size_t kMostAtOnce = 128;
constexpr int kBacklog = 4096;

struct Address {
    sockaddr_storage storage{};
    socklen_t length = 0;

    const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
};

Address copy_of(const sockaddr* address, socklen_t length) {
    Address copy;
    std::memcpy(&copy.storage, address, length);
    copy.length = length;
    return copy;
}

// Null where the interface has no address, or there is no such interface.
std::optional<Address> address_of_interface(const std::string& name) {
    ifaddrs* all = nullptr;
    if (getifaddrs(&all) != 0) return std::nullopt;
    std::optional<Address> found;
    for (const int family : {AF_INET, AF_INET6}) {
        for (const ifaddrs* one = all; one != nullptr && !found; one = one->ifa_next) {
            if (one->ifa_addr == nullptr || one->ifa_addr->sa_family != family) continue;
            if (name != one->ifa_name) continue;
            found = copy_of(one->ifa_addr,
                            family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6));
        }
    }
    freeifaddrs(all);
    return found;
}

std::vector<Address> look_up(const std::string& host, const char* port, int flags) {
    addrinfo hints{};
    hints.ai_family = AF_UNSPEC;
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = flags;
    addrinfo* all = nullptr;
    std::vector<Address> found;
    if (getaddrinfo(host.c_str(), port, &hints, &all) != 0) return found;
    for (const addrinfo* one = all; one != nullptr; one = one->ai_next) {
        found.push_back(copy_of(one->ai_addr, one->ai_addrlen));
    }
    freeaddrinfo(all);
    return found;
}

int listen_at(const Address& address) {
    const int fd = socket(address.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) return -1;
    if (bind(fd, address.get(), address.length) == 0 && listen(fd, kBacklog) == 0) return fd;
    close(fd);
    return -1;
}

// "host:port", and "[host]:port" where the host has colons of its own.
std::string name_of_socket(int fd) {
    Address address;
    address.length = sizeof(address.storage);
    if (getsockname(fd, reinterpret_cast<sockaddr*>(&address.storage), &address.length) != 0) {
        return "";
    }
    char host[NI_MAXHOST];
    char port[NI_MAXSERV];
    if (getnameinfo(address.get(), address.length, host, sizeof(host), port, sizeof(port),
                    NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
        return "";
    }
    const bool is_v6 = address.storage.ss_family == AF_INET6;
    return (is_v6 ? "[" + std::string(host) + "]:" : std::string(host) + ":") + port;
}

// A connection attempt; the descriptor is -1 when the attempt is over.
struct Attempt {
    int fd = -1;
    Answer answer = Answer::kUnknown;

    void end(int error) {
        if (fd < 0) return;
        answer = answer_of(error);
        close(fd);
        fd = -1;
    }

    static Answer answer_of(int error) {
        switch (error) {
            case 0:
                return Answer::kReached;
            case ECONNREFUSED:
                return Answer::kRefused;
            case EADDRNOTAVAIL:
            case EAGAIN:
            case ENOBUFS:
            case ENOMEM:
                return Answer::kUnknown;
            default:
                return Answer::kSilent;
        }
    }
};

Attempt begin(const std::string& text) {
    Attempt attempt;
    const size_t colon = text.rfind(':');
    if (colon == std::string::npos) return attempt;
    std::string host = text.substr(0, colon);
    if (host.size() > 2 && host.front() == '[') host = host.substr(1, host.size() - 2);
    const auto found = look_up(host, text.c_str() + colon + 1, AI_NUMERICHOST | AI_NUMERICSERV);
    if (found.empty()) return attempt;
    const Address& address = found.front();
    attempt.fd = socket(address.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (attempt.fd < 0) return attempt;
    if (connect(attempt.fd, address.get(), address.length) == 0) {
        attempt.end(0);
    } else if (errno != EINPROGRESS) {
        attempt.end(errno);
    }
    return attempt;
}

void wait_for(std::vector<Attempt>& attempts, Clock::time_point deadline) {
    while (true) {
        std::vector<pollfd> open;
        std::vector<Attempt*> owners;
        for (Attempt& attempt : attempts) {
            if (attempt.fd < 0) continue;
            open.push_back({attempt.fd, POLLOUT, 0});
            owners.push_back(&attempt);
        }
        const auto left = std::chrono::ceil<milliseconds>(deadline - Clock::now()).count();
        if (open.empty() || left <= 0) break;
        if (poll(open.data(), open.size(), static_cast<int>(left)) <= 0) continue;
        for (size_t i = 0; i < open.size(); ++i) {
            if (open[i].revents == 0) continue;
            int error = 0;
            socklen_t length = sizeof(error);
            getsockopt(open[i].fd, SOL_SOCKET, SO_ERROR, &error, &length);
            owners[i]->end(error);
        }
    }
    for (Attempt& attempt : attempts) attempt.end(ETIMEDOUT);
}

}  // namespace

Listener::Listener(const std::string& interface) {
    std::vector<Address> candidates;
    if (!interface.empty()) {
        const auto address = address_of_interface(interface.substr(0, interface.find(',')));
        if (address) candidates.push_back(*address);
    } else {
        char name[256] = {};
        if (gethostname(name, sizeof(name) - 1) == 0) candidates = look_up(name, "0", 0);
        const auto loopback = look_up("127.0.0.1", "0", AI_NUMERICHOST | AI_NUMERICSERV);
        candidates.insert(candidates.end(), loopback.begin(), loopback.end());
    }
    for (size_t i = 0; i < candidates.size() && fd_ < 0; ++i) fd_ = listen_at(candidates[i]);
    if (fd_ >= 0) address_ = name_of_socket(fd_);
}

Listener::~Listener() { close(); }

void Listener::drain() const {
    if (fd_ < 0) return;
    while (true) {
        const int fd = accept4(fd_, nullptr, nullptr, SOCK_CLOEXEC);
        if (fd < 0) return;
        ::close(fd);
    }
}

void Listener::close() {
    if (fd_ >= 0) ::close(fd_);
    fd_ = -1;
}

std::vector<Answer> try_to_reach(const std::vector<std::string>& addresses, milliseconds limit) {
    std::vector<Answer> answers;
    for (size_t first = 0; first < addresses.size(); first += kMostAtOnce) {
        const auto deadline = Clock::now() + limit;
        std::vector<Attempt> attempts;
        for (size_t i = first; i < std::min(first + kMostAtOnce, addresses.size()); ++i) {
            attempts.push_back(begin(addresses[i]));
        }
        wait_for(attempts, deadline);
        for (const Attempt& attempt : attempts) answers.push_back(attempt.answer);
    }
    return answers;
}

Ways::Ways(int64_t replica, const std::vector<int64_t>& members,
           const std::vector<std::string>& addresses, milliseconds patience, milliseconds limit)
    : patience_(patience), limit_(limit) {
    for (size_t i = 0; i < std::min(members.size(), addresses.size()); ++i) {
        if (members[i] == replica || addresses[i].empty()) continue;
        members_.push_back(members[i]);
        addresses_.push_back(addresses[i]);
    }
    constexpr milliseconds kEachPeer{20};
    period_ =
        std::max<Clock::duration>(std::clamp(limit / 8, milliseconds(200), milliseconds(5000)),
                                  kEachPeer * static_cast<int>(members_.size()));
}

Ways::Results Ways::try_all(milliseconds patience) const {
    Results results;
    const auto answers = try_to_reach(addresses_, patience);
    for (size_t i = 0; i < answers.size(); ++i) {
        if (answers[i] == Answer::kUnknown) continue;
        const bool is_reached = answers[i] == Answer::kReached;
        (is_reached ? results.reached : results.unreached).push_back(members_[i]);
        if (answers[i] == Answer::kRefused) results.refused.push_back(members_[i]);
    }
    return results;
}

void Ways::look() {
    const auto now = Clock::now();
    if (members_.empty() || now - last_look_ < period_) return;
    const auto passed = std::min<Clock::duration>(now - last_look_, 2 * period_);
    last_look_ = now;
    const Results results =
        try_all(std::min(patience_, std::chrono::duration_cast<milliseconds>(limit_ / 4)));
    for (const int64_t member : results.reached) unreached_.erase(member);
    for (const int64_t member : results.unreached) unreached_[member] += passed;
}

void Ways::forgive() {
    unreached_.clear();
    last_look_ = Clock::now();
}

std::vector<int64_t> Ways::lost() const {
    std::vector<int64_t> lost;
    for (const auto& [member, duration] : unreached_) {
        if (duration >= limit_) lost.push_back(member);
    }
    return lost;
}

}  // namespace diloco
