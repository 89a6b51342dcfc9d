// Messages between the ranks of one epoch over c10d backends: tagged send and recv, deadlines,
// abort from another thread, and an emulated link.
//
// A lane is two process groups, and so two connections to every peer, one for each direction:
// gloo's thread cannot read from a connection while another thread writes to it, and burns its time
// polling. Every message in flight between two ranks has its own tag, so the order in which
// messages arrive does not matter.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <chrono>
#include <exception>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "exchange/transport/emulated_link.h"

namespace diloco {

using Clock = std::chrono::steady_clock;
using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// The text of an error, without the C++ stack that torch adds.
std::string text_of(const std::exception& error);

// A message could not be sent or received, or not in time. The group cannot be used any more.
class TransportError : public std::runtime_error {
  public:
    TransportError(int peer, const std::string& what) : std::runtime_error(what), peer(peer) {}
    // what() is a few plain words; `cause` keeps the backend's full text.
    TransportError(int peer, const std::exception& error);
    bool is_timeout() const { return std::string(what()) == "timed out"; }
    int peer;
    std::string cause;  // the backend's text
};

// abort() ended a wait.
class Aborted : public std::runtime_error {
  public:
    Aborted() : std::runtime_error("the exchange was closed") {}
};

// One posted message, for which wait() waits. A message of 0 bytes has no `work` and no `delayed`.
struct Receipt {
    WorkPtr work;
    std::shared_ptr<DelayedSend> delayed;  // with an emulated link
    int peer = -1;
};

class Transport {
  public:
    Transport(std::vector<BackendPtr> groups, int rank, int size);

    int rank() const { return rank_; }
    int size() const { return size_; }

    // Post one message. The memory at `data` must stay until wait() has returned for the receipt.
    Receipt send(int lane, int peer, int tag, const void* data, size_t num_bytes);
    Receipt recv(int lane, int peer, int tag, void* data, size_t num_bytes);

    // Throws TransportError (also at the deadline) or Aborted. Leaves the receipt empty.
    void wait(Receipt& receipt, Clock::time_point deadline);

    // Ends the current and every later wait. From any thread.
    void abort();
    bool is_aborted() const { return is_aborted_; }

    // Later sends go over a link of this rate and round-trip time; a rate of 0 is the real link.
    void emulate_link(double gbps, double rtt_ms);

    int64_t sent_bytes() const { return sent_bytes_; }
    int64_t received_bytes() const { return received_bytes_; }

  private:
    // The group of a lane that carries messages from rank `from` to rank `to`.
    c10d::Backend& group(int lane, int from, int to) const;
    WorkPtr post_send(int lane, int peer, int tag, const void* data, size_t num_bytes);
    void wait_for_work(c10d::Work& work, Clock::time_point deadline);

    std::vector<BackendPtr> groups_;
    int rank_;
    int size_;
    std::mutex post_mutex_;  // c10d backends do not promise that posting is thread-safe
    std::mutex abort_mutex_;
    c10d::Work* waiting_ = nullptr;
    std::atomic<bool> is_aborted_{false};
    int64_t sent_bytes_ = 0;
    int64_t received_bytes_ = 0;
    std::unique_ptr<EmulatedLink> link_;  // last: its thread posts on the groups above
};

}  // namespace diloco
