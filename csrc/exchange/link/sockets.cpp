#include "exchange/link/sockets.h"

#include <ifaddrs.h>
#include <linux/tcp.h>
#include <net/if.h>
#include <netdb.h>
#include <poll.h>
#include <pthread.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <stdexcept>

namespace diloco {
namespace {

constexpr int kBacklog = 4096;

Address copy_of(const sockaddr* address, socklen_t length) {
    Address copy;
    std::memcpy(&copy.storage, address, length);
    copy.length = length;
    return copy;
}

// The address of a network interface; null if it has none or does not exist.
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

// Host and port of an address as texts of numbers; empty if it is no internet address.
std::pair<std::string, std::string> numbers_of(const Address& address) {
    char host[NI_MAXHOST];
    char port[NI_MAXSERV];
    if (getnameinfo(address.get(), address.length, host, sizeof(host), port, sizeof(port),
                    NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
        return {};
    }
    return {host, port};
}

std::string name_by(int (*ask)(int, sockaddr*, socklen_t*), int fd) {
    Address address;
    address.length = sizeof(address.storage);
    if (ask(fd, reinterpret_cast<sockaddr*>(&address.storage), &address.length) != 0) return "";
    return name_of_address(address);
}

// All open descriptors of this process's links.
class Table {
  public:
    static Table& instance() {
        static auto* table = new Table();  // never destroyed: a fork may come at any time
        return *table;
    }

    int open(const std::function<int()>& open) {
        std::lock_guard<std::mutex> lock(mutex_);
        const int fd = open();
        const int error = errno;
        if (fd >= 0) fds_.push_back(fd);
        errno = error;
        return fd;
    }

    void close(int fd) {
        std::lock_guard<std::mutex> lock(mutex_);
        fds_.erase(std::remove(fds_.begin(), fds_.end(), fd), fds_.end());
        ::close(fd);
    }

  private:
    Table() {
        pthread_atfork([] { instance().mutex_.lock(); }, [] { instance().mutex_.unlock(); },
                       [] {
                           for (const int fd : instance().fds_) ::close(fd);
                           instance().fds_.clear();
                           instance().mutex_.unlock();
                       });
    }

    std::mutex mutex_;
    std::vector<int> fds_;
};

}  // namespace

std::vector<Address> look_up(const std::string& host, const std::string& port, int flags) {
    addrinfo hints{};
    hints.ai_family = AF_UNSPEC;
    hints.ai_socktype = SOCK_STREAM;
    hints.ai_flags = flags;
    addrinfo* all = nullptr;
    std::vector<Address> found;
    if (getaddrinfo(host.c_str(), port.c_str(), &hints, &all) != 0) return found;
    for (const addrinfo* one = all; one != nullptr; one = one->ai_next) {
        found.push_back(copy_of(one->ai_addr, one->ai_addrlen));
    }
    freeaddrinfo(all);
    return found;
}

std::vector<Address> own_addresses(const std::string& interface) {
    std::vector<Address> candidates;
    if (!interface.empty()) {
        const auto address = address_of_interface(interface.substr(0, interface.find(',')));
        if (address) candidates.push_back(*address);
        return candidates;
    }
    char name[256] = {};
    if (gethostname(name, sizeof(name) - 1) == 0) candidates = look_up(name, "0", 0);
    const auto loopback = look_up("127.0.0.1", "0", AI_NUMERICHOST | AI_NUMERICSERV);
    candidates.insert(candidates.end(), loopback.begin(), loopback.end());
    return candidates;
}

std::string own_host(const std::string& interface) {
    const std::vector<Address> addresses = own_addresses(interface);
    if (!interface.empty() && addresses.empty()) {
        throw std::runtime_error("the network interface " + interface + " has no address");
    }
    for (const Address& address : addresses) {
        const Descriptor listener([&] { return listen_at(address); });
        if (listener) return numbers_of(address).first;
    }
    return "127.0.0.1";
}

std::string name_of_place(const std::string& host, const std::string& port) {
    return (host.find(':') == std::string::npos ? host : "[" + host + "]") + ":" + port;
}

std::string name_of_address(const Address& address) {
    const auto [host, port] = numbers_of(address);
    return port.empty() ? "" : name_of_place(host, port);
}

std::string name_of_socket(int fd) { return name_by(getsockname, fd); }

std::string name_of_peer(int fd) { return name_by(getpeername, fd); }

std::optional<std::pair<std::string, std::string>> split_place(const std::string& text) {
    const size_t colon = text.rfind(':');
    if (colon == std::string::npos || colon == 0 || colon + 1 == text.size()) return std::nullopt;
    std::string host = text.substr(0, colon);
    if (host.size() > 2 && host.front() == '[' && host.back() == ']') {
        host = host.substr(1, host.size() - 2);
    }
    return std::make_pair(host, text.substr(colon + 1));
}

int listen_at(const Address& address) {
    const int fd = socket(address.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0) return -1;
    // SO_REUSEADDR: the port of a process that has just ended can be used again at once.
    const int yes = 1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
    if (bind(fd, address.get(), address.length) == 0 && listen(fd, kBacklog) == 0) return fd;
    const int error = errno;
    close(fd);
    errno = error;
    return -1;
}

Descriptor::Descriptor(const std::function<int()>& open)
    : fd_(Table::instance().open(open)), pid_(getpid()) {}

void Descriptor::reset() {
    if (fd_ >= 0 && pid_ == getpid()) Table::instance().close(fd_);
    fd_ = -1;
}

TcpFacts tcp_facts_of(int fd) {
    TcpFacts facts;
    char name[16] = {};
    socklen_t size = sizeof(name) - 1;
    if (getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name, &size) == 0) facts.congestion = name;
    tcp_info info{};
    size = sizeof(info);
    if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &size) == 0) {
        facts.num_segments = info.tcpi_data_segs_out;
        facts.num_sent_again = info.tcpi_total_retrans;
        facts.round_trip_us = info.tcpi_rtt;
    }
    return facts;
}

bool is_ready(int fd, short event, std::chrono::steady_clock::time_point end) {
    pollfd one{fd, event, 0};
    while (true) {
        const auto left =
            std::chrono::ceil<std::chrono::milliseconds>(end - std::chrono::steady_clock::now());
        if (left.count() <= 0) return false;
        // poll() takes an int of milliseconds, so a longer time needs several calls.
        const int most = static_cast<int>(std::min<int64_t>(left.count(), 1 << 30));
        const int num_ready = poll(&one, 1, most);
        if (num_ready > 0 || (num_ready < 0 && errno != EINTR)) return num_ready > 0;
    }
}

Descriptor dial(const Address& address, std::chrono::steady_clock::time_point end,
                std::string& trouble) {
    Descriptor fd([&] {
        return socket(address.storage.ss_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    });
    int error = fd ? 0 : errno;
    if (fd && connect(fd.get(), address.get(), address.length) != 0) {
        error = errno;
        if (error == EINPROGRESS) {
            error = ETIMEDOUT;
            socklen_t size = sizeof(error);
            if (is_ready(fd.get(), POLLOUT, end)) {
                getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &size);
            }
        }
    }
    if (error == 0) return fd;
    trouble = std::strerror(error);
    return {};
}

}  // namespace diloco
