#include "exchange/transport/transport.h"

#include <ATen/ops/from_blob.h>
#include <c10/util/Exception.h>

#include <utility>

namespace diloco {
namespace {

at::Tensor as_tensor(const void* data, size_t num_bytes) {
    return at::from_blob(const_cast<void*>(data), {static_cast<int64_t>(num_bytes)},
                         at::TensorOptions().dtype(at::kByte));
}

std::chrono::milliseconds remaining(Clock::time_point deadline) {
    return std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
}

std::string in_words(const std::string& text) {
    const auto says = [&](const char* part) { return text.find(part) != std::string::npos; };
    // diloco's link writes "connection closed by peer: PEER", and ": CAUSE" if a cause is known.
    const std::string closed = "connection closed by peer: ";
    if (const auto begin = text.find(closed); begin != std::string::npos) {
        const auto cause = text.find(": ", begin + closed.size());
        return "the connection was closed" +
               (cause == std::string::npos ? std::string() : text.substr(cause));
    }
    if (says("onnection closed") || says("onnection reset") || says("Broken pipe")) {
        return "the connection was closed";
    }
    if (says("imed out") || says("timeout")) return "timed out";
    return text;
}

}  // namespace

std::string text_of(const std::exception& error) {
    const auto* torch_error = dynamic_cast<const c10::Error*>(&error);
    return torch_error ? torch_error->what_without_backtrace() : error.what();
}

TransportError::TransportError(int peer, const std::exception& error)
    : std::runtime_error(in_words(text_of(error))), peer(peer), cause(text_of(error)) {}

Transport::Transport(std::vector<BackendPtr> groups, int rank, int size)
    : groups_(std::move(groups)), rank_(rank), size_(size) {}

void Transport::emulate_link(double gbps, double rtt_ms) {
    link_ = gbps > 0 ? std::make_unique<EmulatedLink>(gbps, rtt_ms) : nullptr;
}

c10d::Backend& Transport::group(int lane, int from, int to) const {
    return *groups_[static_cast<size_t>(2 * lane + (from > to ? 1 : 0))];
}

WorkPtr Transport::post_send(int lane, int peer, int tag, const void* data, size_t num_bytes) {
    std::vector<at::Tensor> tensors{as_tensor(data, num_bytes)};
    std::lock_guard<std::mutex> lock(post_mutex_);
    return group(lane, rank_, peer).send(tensors, peer, tag);
}

Receipt Transport::send(int lane, int peer, int tag, const void* data, size_t num_bytes) {
    Receipt receipt;
    receipt.peer = peer;
    if (num_bytes == 0) return receipt;
    sent_bytes_ += static_cast<int64_t>(num_bytes);
    try {
        if (link_) {
            receipt.delayed =
                link_->post(num_bytes, [=] { return post_send(lane, peer, tag, data, num_bytes); });
        } else {
            receipt.work = post_send(lane, peer, tag, data, num_bytes);
        }
    } catch (const std::exception& error) {
        throw TransportError(peer, error);
    }
    return receipt;
}

Receipt Transport::recv(int lane, int peer, int tag, void* data, size_t num_bytes) {
    Receipt receipt;
    receipt.peer = peer;
    if (num_bytes == 0) return receipt;
    received_bytes_ += static_cast<int64_t>(num_bytes);
    std::vector<at::Tensor> tensors{as_tensor(data, num_bytes)};
    try {
        std::lock_guard<std::mutex> lock(post_mutex_);
        receipt.work = group(lane, peer, rank_).recv(tensors, peer, tag);
    } catch (const std::exception& error) {
        throw TransportError(peer, error);
    }
    return receipt;
}

void Transport::wait(Receipt& receipt, Clock::time_point deadline) {
    if (receipt.delayed) {
        DelayedSend& message = *receipt.delayed;
        std::unique_lock<std::mutex> lock(message.mutex);
        // The loop waits in short slices and checks is_aborted_: abort() wakes only waits for a
        // Work, not for a message that the emulated link still holds.
        while (!message.is_posted) {
            if (is_aborted_) throw Aborted();
            if (Clock::now() >= deadline) throw TransportError(receipt.peer, "timed out");
            message.changed.wait_for(lock, std::chrono::milliseconds(20));
        }
        if (message.error) {
            try {
                std::rethrow_exception(message.error);
            } catch (const std::exception& error) {
                throw TransportError(receipt.peer, error);
            }
        }
        receipt.work = std::move(message.work);
        lock.unlock();
        receipt.delayed.reset();
    }
    if (!receipt.work) return;
    const WorkPtr work = std::move(receipt.work);
    receipt.work.reset();
    try {
        wait_for_work(*work, deadline);
    } catch (const Aborted&) {
        throw;
    } catch (const std::exception& error) {
        throw TransportError(receipt.peer, error);
    }
}

void Transport::wait_for_work(c10d::Work& work, Clock::time_point deadline) {
    {
        std::lock_guard<std::mutex> lock(abort_mutex_);
        if (is_aborted_) throw Aborted();
        waiting_ = &work;
    }
    std::exception_ptr error;
    bool is_complete = false;
    try {
        // At least 1 ms: torch takes 0 as "no timeout".
        is_complete = work.wait(std::max(remaining(deadline), std::chrono::milliseconds(1)));
    } catch (...) {
        error = std::current_exception();
    }
    {
        std::lock_guard<std::mutex> lock(abort_mutex_);
        waiting_ = nullptr;
        if (is_aborted_) throw Aborted();
    }
    if (error) std::rethrow_exception(error);
    if (!is_complete) throw std::runtime_error("the operation was aborted");
}

void Transport::abort() {
    std::lock_guard<std::mutex> lock(abort_mutex_);
    is_aborted_ = true;
    if (waiting_ != nullptr) waiting_->abort();
}

}  // namespace diloco
