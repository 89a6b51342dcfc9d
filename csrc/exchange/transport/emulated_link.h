// An emulated egress link: a token clock that decides when a message may really be posted.
//
// A message of b bytes occupies the link for b * 8 / rate after the previous one and arrives half
// a round trip later. The sender holds the message back until then; over a fast real link it then
// arrives at once. Occupation is computed on a virtual clock, so late wake-ups do not add up.
#pragma once

#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <torch/csrc/distributed/c10d/Work.hpp>

namespace diloco {

// A message on the emulated link: its Work exists once the link has released the message.
struct DelayedSend {
    std::chrono::steady_clock::time_point release;
    std::function<c10::intrusive_ptr<c10d::Work>()> post;
    std::mutex mutex;
    std::condition_variable changed;
    c10::intrusive_ptr<c10d::Work> work;
    std::exception_ptr error;
    bool is_posted = false;
};

class EmulatedLink {
  public:
    EmulatedLink(double gbps, double rtt_ms);
    ~EmulatedLink();
    EmulatedLink(const EmulatedLink&) = delete;
    EmulatedLink& operator=(const EmulatedLink&) = delete;

    std::shared_ptr<DelayedSend> post(size_t num_bytes,
                                      std::function<c10::intrusive_ptr<c10d::Work>()> send);

    // Drops messages that are not released yet; does not wait.
    void stop();

  private:
    using Clock = std::chrono::steady_clock;
    void loop();

    double bytes_per_s_;
    Clock::duration half_rtt_;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<std::shared_ptr<DelayedSend>> queue_;
    Clock::time_point free_at_{};
    bool is_stopped_ = false;
    std::thread thread_;
};

}  // namespace diloco
