// Shared by the files of a session: the lane and tags of control messages, and stopwatches.
#pragma once

#include <chrono>
#include <cstdint>

#include "exchange/transport/transport.h"

namespace diloco {

// Headers, votes, exchanged objects and broadcast tensors share the first lane's connections with
// the payloads: fewer threads to wake, and TCP acknowledgements that ride on the next message.
constexpr int kControl = 0;

inline double seconds_since(Clock::time_point begin) {
    return std::chrono::duration<double>(Clock::now() - begin).count();
}

class Stopwatch {
  public:
    explicit Stopwatch(double& total) : total_(total), begin_(Clock::now()) {}
    ~Stopwatch() { total_ += seconds_since(begin_); }

  private:
    double& total_;
    Clock::time_point begin_;
};

// Bit 30 keeps tags of control messages apart from tags of data.
inline int control_tag(uint64_t number) {
    return (1 << 30) | static_cast<int>(number & 0x3fffffff);
}
inline int header_tag(uint64_t sequence) { return control_tag(2 * sequence); }
inline int vote_tag(uint64_t sequence) { return control_tag(2 * sequence + 1); }

}  // namespace diloco
