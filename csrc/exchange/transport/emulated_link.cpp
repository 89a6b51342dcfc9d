#include "exchange/transport/emulated_link.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace diloco {

using std::chrono::duration;
using std::chrono::duration_cast;

EmulatedLink::EmulatedLink(double gbps, double rtt_ms)
    : bytes_per_s_(gbps * 1e9 / 8.0),
      half_rtt_(duration_cast<Clock::duration>(duration<double, std::milli>(rtt_ms / 2.0))) {
    thread_ = std::thread([this] { loop(); });
}

EmulatedLink::~EmulatedLink() {
    stop();
    thread_.join();
}

void EmulatedLink::stop() {
    std::deque<std::shared_ptr<DelayedSend>> dropped;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        is_stopped_ = true;
        dropped.swap(queue_);
    }
    changed_.notify_all();
    for (auto& message : dropped) {
        std::lock_guard<std::mutex> lock(message->mutex);
        message->error =
            std::make_exception_ptr(std::runtime_error("the emulated link was taken down"));
        message->is_posted = true;
        message->post = nullptr;
        message->changed.notify_all();
    }
}

std::shared_ptr<DelayedSend> EmulatedLink::post(
    size_t num_bytes, std::function<c10::intrusive_ptr<c10d::Work>()> send) {
    auto message = std::make_shared<DelayedSend>();
    message->post = std::move(send);
    {
        std::lock_guard<std::mutex> lock(mutex_);
        if (is_stopped_) throw std::runtime_error("the emulated link was taken down");
        const duration<double> occupied(static_cast<double>(num_bytes) / bytes_per_s_);
        free_at_ = std::max(Clock::now(), free_at_) + duration_cast<Clock::duration>(occupied);
        message->release = free_at_ + half_rtt_;
        queue_.push_back(message);
    }
    changed_.notify_all();
    return message;
}

void EmulatedLink::loop() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
        changed_.wait(lock, [this] { return is_stopped_ || !queue_.empty(); });
        if (is_stopped_) return;
        const auto release = queue_.front()->release;
        if (Clock::now() < release) {
            changed_.wait_until(lock, release, [this] { return is_stopped_; });
            continue;
        }
        const auto message = queue_.front();
        queue_.pop_front();
        lock.unlock();
        c10::intrusive_ptr<c10d::Work> work;
        std::exception_ptr error;
        try {
            work = message->post();
        } catch (...) {
            error = std::current_exception();
        }
        {
            std::lock_guard<std::mutex> message_lock(message->mutex);
            message->work = std::move(work);
            message->error = error;
            message->is_posted = true;
            message->post = nullptr;
        }
        message->changed.notify_all();
        lock.lock();
    }
}

}  // namespace diloco
