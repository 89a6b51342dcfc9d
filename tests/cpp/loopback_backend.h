// A c10d backend between threads of one process, so that sanitizers see the whole exchange.
//
// send() copies into a mailbox and is complete; a receive copies out of it when it is waited for.
// Messages are matched by source, destination and tag, as gloo does.
#pragma once

#include <ATen/core/Tensor.h>

#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <tuple>
#include <vector>

namespace diloco_test {

struct Mailbox {
    using Address = std::tuple<int, int, int>;  // source, destination, tag
    std::mutex mutex;
    std::condition_variable changed;
    std::map<Address, std::deque<std::vector<uint8_t>>> messages;
    std::map<Address, int> num_sent;
    std::vector<bool> is_dead = std::vector<bool>(16, false);

    void kill(int rank) {
        std::lock_guard<std::mutex> lock(mutex);
        is_dead[static_cast<size_t>(rank)] = true;
        changed.notify_all();
    }
};

class SentWork : public c10d::Work {
  public:
    bool wait(std::chrono::milliseconds) override { return true; }
    void abort() override {}
};

class RecvWork : public c10d::Work {
  public:
    RecvWork(std::shared_ptr<Mailbox> mailbox, Mailbox::Address address, at::Tensor tensor)
        : mailbox_(std::move(mailbox)), address_(address), tensor_(std::move(tensor)) {}

    bool wait(std::chrono::milliseconds timeout) override {
        const auto source = static_cast<size_t>(std::get<0>(address_));
        std::unique_lock<std::mutex> lock(mailbox_->mutex);
        auto& queue = mailbox_->messages[address_];
        const bool in_time = mailbox_->changed.wait_for(lock, timeout, [&] {
            return is_aborted_ || !queue.empty() || mailbox_->is_dead[source];
        });
        if (is_aborted_) return false;
        if (!in_time) throw std::runtime_error("timed out");
        if (queue.empty()) throw std::runtime_error("connection closed by peer");
        const std::vector<uint8_t> message = std::move(queue.front());
        queue.pop_front();
        if (message.size() != tensor_.nbytes()) throw std::runtime_error("sizes differ");
        std::memcpy(tensor_.data_ptr(), message.data(), message.size());
        return true;
    }

    void abort() override {
        std::lock_guard<std::mutex> lock(mailbox_->mutex);
        is_aborted_ = true;
        mailbox_->changed.notify_all();
    }

  private:
    std::shared_ptr<Mailbox> mailbox_;
    Mailbox::Address address_;
    at::Tensor tensor_;
    bool is_aborted_ = false;
};

class LoopbackBackend : public c10d::Backend {
  public:
    LoopbackBackend(std::shared_ptr<Mailbox> mailbox, int rank, int size)
        : Backend(rank, size), mailbox_(std::move(mailbox)) {}
    ~LoopbackBackend() override { mailbox_->kill(getRank()); }

    const std::string getBackendName() const override { return "loopback"; }

    c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors, int peer,
                                        int tag) override {
        const auto* data = static_cast<const uint8_t*>(tensors[0].data_ptr());
        std::vector<uint8_t> message(data, data + tensors[0].nbytes());
        {
            std::lock_guard<std::mutex> lock(mailbox_->mutex);
            if (mailbox_->is_dead[static_cast<size_t>(peer)]) {
                throw std::runtime_error("connection closed by peer");
            }
            mailbox_->messages[{getRank(), peer, tag}].push_back(std::move(message));
            ++mailbox_->num_sent[{getRank(), peer, tag}];
        }
        mailbox_->changed.notify_all();
        return c10::make_intrusive<SentWork>();
    }

    c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors, int peer,
                                        int tag) override {
        return c10::make_intrusive<RecvWork>(mailbox_, Mailbox::Address{peer, getRank(), tag},
                                             tensors[0]);
    }

  private:
    std::shared_ptr<Mailbox> mailbox_;
};

}  // namespace diloco_test
