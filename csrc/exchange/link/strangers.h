// Strangers are accepted connections whose peers have not yet shown that they are allowed. They use
// up file descriptors, so this file limits their number, and keeps some descriptors in reserve.
#pragma once

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "exchange/link/sockets.h"

namespace diloco::link {

// The list of strangers. New connections are accepted at once; when there are too many strangers,
// choose() names the one to be closed. It belongs to the host with the most strangers, so that no
// host can keep others out. Silent strangers go first: an allowed peer speaks at once.
//
// The caller numbers the strangers from 1 in the order in which they came.
class Strangers {
  public:
    // `origin`: the address of the peer's host, without the port.
    void add(uint64_t id, std::string origin);
    void remove(uint64_t id) { all_.erase(id); }

    // Notes that a stranger has sent a byte. Returns whether it was silent before.
    bool hear(uint64_t id);

    bool empty() const { return all_.empty(); }
    size_t size() const { return all_.size(); }
    // The id of the oldest stranger, or 0 without strangers.
    uint64_t oldest() const { return all_.empty() ? 0 : all_.begin()->first; }

    // The id of the stranger to close, or 0 without strangers: the oldest silent stranger of the
    // host with the most strangers, or its oldest if all of them have spoken. Among several such
    // hosts, hosts with a silent stranger come first.
    uint64_t choose() const;

  private:
    struct Stranger {
        std::string origin{};
        bool has_spoken = false;
    };

    struct Host {
        size_t count = 0;
        uint64_t silent = 0, spoken = 0;  // ids of the oldest silent and spoken stranger, or 0

        uint64_t chosen() const { return silent != 0 ? silent : spoken; }
        bool is_worse_than(const Host& other) const;
    };

    std::map<uint64_t, Stranger> all_;  // by id, so the oldest comes first
};

// The address of a connection's peer, without port and brackets; "" if the peer is gone.
std::string origin_of(int fd);

// Whether a call has failed because this process, or this machine, has no descriptor or no memory
// left.
inline bool is_exhausted(int error) {
    return error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM;
}

// Raises the number of descriptors that this process may have as far as allowed, and returns the
// number.
int64_t raise_descriptors();
// The most strangers: a quarter of the descriptors, from 16 to 256. The program needs the others.
size_t most_strangers();

// Descriptors that are kept back for the time when no other is left. Then a listening process
// can still accept some connections, and so learn which strangers speak.
class Reserve {
  public:
    // Opens descriptors until the reserve is full, or none is left.
    void fill();
    // Closes one descriptor of the reserve; false if the reserve is empty.
    bool release();
    // Closes all descriptors of the reserve.
    void clear() { kept_.clear(); }

  private:
    std::vector<Descriptor> kept_;
};

}  // namespace diloco::link
