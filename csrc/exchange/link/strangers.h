// Strangers: connections that came, and whose peers have not shown yet that they may come in. And
// the descriptors of a process that listens, which strangers take.
#pragma once

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "exchange/link/sockets.h"

namespace diloco::link {

// Where strangers wait. Newcomers are accepted at once; when there are too many, choose() names the
// stranger that has to go. The host with most strangers loses one, so no host keeps the others out.
// An allowed peer speaks as soon as its connection is there, so silent strangers go first.
//
// The caller numbers the strangers from 1 in the order in which they came.
class Strangers {
  public:
    // `origin`: the address of the peer's host, without the port.
    void add(uint64_t id, std::string origin);
    void remove(uint64_t id) { all_.erase(id); }

    // A byte of this stranger has come. Returns whether the stranger counted as silent before.
    bool hear(uint64_t id);

    bool empty() const { return all_.empty(); }
    size_t size() const { return all_.size(); }
    // 0 where there is no stranger.
    uint64_t oldest() const { return all_.empty() ? 0 : all_.begin()->first; }

    // The host with most strangers loses its oldest silent one, or its oldest one where all of them
    // have spoken; where several hosts have most, a host with a silent one. 0 where there is no
    // stranger.
    uint64_t choose() const;

  private:
    struct Stranger {
        std::string origin{};
        bool has_spoken = false;
    };

    struct Host {
        size_t count = 0;
        uint64_t silent = 0, spoken = 0;  // the oldest of each; 0 where there is none

        uint64_t chosen() const { return silent != 0 ? silent : spoken; }
        bool is_worse_than(const Host& other) const;
    };

    std::map<uint64_t, Stranger> all_;  // by age
};

// The address of a connection's peer, without port and brackets; "" where the peer is gone.
std::string origin_of(int fd);

// Whether a call has failed because this process, or this machine, has no descriptor or no memory
// left.
inline bool is_exhausted(int error) {
    return error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM;
}

// Raises the number of descriptors that this process may have as far as allowed, and returns the
// number.
int64_t raise_descriptors();
// A quarter of the descriptors may belong to strangers, at most 256: the program needs some, too.
size_t most_strangers();

// Descriptors for the time when no other descriptor is left. A process that listens still takes
// some connections then, and so sees which of the strangers speak.
class Reserve {
  public:
    // Opens what is missing, as far as this process may.
    void fill();
    // Gives one descriptor back to the kernel; false where the reserve is empty.
    bool release();
    // Gives all of them back.
    void clear() { kept_.clear(); }

  private:
    std::vector<Descriptor> kept_;
};

}  // namespace diloco::link
