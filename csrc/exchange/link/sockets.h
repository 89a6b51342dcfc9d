// Addresses and sockets: the addresses of this host, their text, and descriptors that forked
// children do not keep open.
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

// All addresses of a host; empty if the host is unknown. `flags` are AI_ flags of getaddrinfo().
std::vector<Address> look_up(const std::string& host, const std::string& port, int flags);

// The addresses at which gloo would listen, best first. With an `interface` (the first of a
// comma-separated list): its address only. Else: the addresses of the host's name, then loopback.
// The ports are 0.
std::vector<Address> own_addresses(const std::string& interface);

// The first of own_addresses() at which this process can listen, without port and brackets;
// 127.0.0.1 if there is none. Throws if the interface has no address.
std::string own_host(const std::string& interface);

// "host:port", or "[host]:port" if the host contains colons, as IPv6 addresses do.
std::string name_of_place(const std::string& host, const std::string& port);
std::string name_of_address(const Address& address);
std::string name_of_socket(int fd);
std::string name_of_peer(int fd);

// Whether an errno says that the peer has closed the connection before it has read all bytes. Such
// an end counts as any other end.
inline bool is_reset(int error) { return error == ECONNRESET || error == EPIPE; }

// Host (without brackets) and port; null if the text is not "host:port".
std::optional<std::pair<std::string, std::string>> split_place(const std::string& text);

// Returns a non-blocking socket that listens at the address, or -1 and errno.
int listen_at(const Address& address);

// An open descriptor, which is closed in a child of fork(). Else a child that outlives its parent,
// such as a DataLoader's worker, would keep the connections of a killed process open.
class Descriptor {
  public:
    Descriptor() = default;
    // Calls `open`, which returns a descriptor or -1. No fork() comes between `open` and the entry
    // in the table of descriptors that a child closes.
    explicit Descriptor(const std::function<int()>& open);
    ~Descriptor() { reset(); }
    Descriptor(Descriptor&& other) noexcept { swap(other); }
    Descriptor& operator=(Descriptor&& other) noexcept {
        swap(other);
        return *this;
    }

    int get() const { return fd_; }
    explicit operator bool() const { return fd_ >= 0; }

    // Closes the descriptor, unless this process is a forked child, which has closed it already.
    void reset();

  private:
    void swap(Descriptor& other) {
        std::swap(fd_, other.fd_);
        std::swap(pid_, other.pid_);
    }

    int fd_ = -1;
    pid_t pid_ = -1;
};

// The kernel's view of a TCP connection; empty and 0 if the kernel does not tell.
struct TcpFacts {
    std::string congestion{};   // the name of the congestion control
    uint32_t num_segments = 0;  // segments with data that were sent
    uint32_t num_sent_again = 0;
    uint32_t round_trip_us = 0;  // smoothed round-trip time in microseconds
};
TcpFacts tcp_facts_of(int fd);

// Waits until a descriptor is ready for an event of poll(), at most until `end`. Returns whether it
// is ready.
bool is_ready(int fd, short event, std::chrono::steady_clock::time_point end);

// Connects to an address until `end`. Returns a non-blocking socket, or none and the error in
// `trouble`.
Descriptor dial(const Address& address, std::chrono::steady_clock::time_point end,
                std::string& trouble);

}  // namespace diloco
