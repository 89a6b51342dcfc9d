// An emulated slow link: it holds each outgoing message back for as long as the slow link would
// take to carry it.
//
// A message of b bytes occupies the link for b * 8 / rate seconds after the previous message, and
// arrives half a round trip later. Only then is it posted on the real, fast link. The times are
// computed from each other, not from when the thread wakes up, so late wake-ups do not add up.
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

// A message on the emulated link. `post` sends it over the real link at the time `release`, and its
// result is `work` or, if it throws, `error`.
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
