// Faults on purpose, for tests: random delays before steps, and a stop or a death at a stage.
#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

namespace diloco {

struct Fault {
    std::string action;         // "", "kill" or "stop" (a signal to ourselves), "fail"
    std::string stage;          // a step's name (schedule.h), "header" or "vote"
    int64_t chunk = -1;         // chunk of the step; -1: any
    int64_t num_peers = 0;      // header and vote: act after sending to this many peers
    double max_delay_us = 0.0;  // random delay before every step, when there is no action
    uint64_t seed = 0;
};

class FaultInjector {
  public:
    // A fault with an action happens once. A fault without one sets the random delay, in place of
    // any delay set before.
    void add(Fault fault);

    // Called before each step, and before each header or vote to a peer. `num_told` is the number
    // of peers to which this header or vote was sent already.
    void before(const char* stage, int64_t chunk, int64_t num_told);

  private:
    std::vector<Fault> faults_;
    double max_delay_us_ = 0.0;
    std::mt19937_64 random_;
};

}  // namespace diloco
