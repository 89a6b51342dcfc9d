// Addresses and sockets: where this host listens, how an address is written, and descriptors that
// forked children do not keep.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace diloco {

struct Address {
    sockaddr_storage storage{};
    socklen_t length = 0;

    const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
};

// All addresses of a host; empty where it has none.
std::vector<Address> look_up(const std::string& host, const std::string& port, int flags);

// Where gloo would listen, best first: on `interface` (the first of a comma-separated list), else
// at the address of the host's name, else on loopback. The ports are 0.
std::vector<Address> own_addresses(const std::string& interface);

// The first of the above on which this process can listen, without a port and without brackets.
std::string own_host(const std::string& interface);

// "host:port", and "[host]:port" where the host has colons of its own.
std::string name_of_place(const std::string& host, const std::string& port);
std::string name_of_address(const Address& address);
std::string name_of_socket(int fd);
std::string name_of_peer(int fd);

// Whether the peer has closed a connection with bytes unread: an end like any other.
inline bool is_reset(int error) { return error == ECONNRESET || error == EPIPE; }

// Host (without brackets) and port; null where the text is no "host:port".
std::optional<std::pair<std::string, std::string>> split_place(const std::string& text);

// A non-blocking socket that listens; -1 and errno where it cannot.
int listen_at(const Address& address);

// An open descriptor. A child of fork() does not keep it: what else lives on in a child, such as a
// loader's worker, would keep the connections of a killed process alive.
class Descriptor {
  public:
    Descriptor() = default;
    // Calls `open`, which returns a descriptor or -1; no fork() comes between.
    explicit Descriptor(const std::function<int()>& open);
    ~Descriptor() { reset(); }
    Descriptor(Descriptor&& other) noexcept { swap(other); }
    Descriptor& operator=(Descriptor&& other) noexcept {
        swap(other);
        return *this;
    }

    int get() const { return fd_; }
    explicit operator bool() const { return fd_ >= 0; }

    // Closes it, unless this process is a forked child, which has closed it already.
    void reset();

  private:
    void swap(Descriptor& other) {
        std::swap(fd_, other.fd_);
        std::swap(pid_, other.pid_);
    }

    int fd_ = -1;
    pid_t pid_ = -1;
};

// The kernel's view of a TCP connection; empty and 0 where the kernel does not know.
struct TcpFacts {
    std::string congestion{};   // the name of its congestion control
    uint32_t num_segments = 0;  // with data, that were sent
    uint32_t num_sent_again = 0;
    uint32_t round_trip_us = 0;  // smoothed
};
TcpFacts tcp_facts_of(int fd);

// Waits until a descriptor is ready for an event of poll(); false where `end` comes first.
bool is_ready(int fd, short event, std::chrono::steady_clock::time_point end);

// A non-blocking socket that is connected, until `end`; none and the reason where that fails.
Descriptor dial(const Address& address, std::chrono::steady_clock::time_point end,
                std::string& trouble);

}  // namespace diloco
