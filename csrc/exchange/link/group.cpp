#include "exchange/link/group.h"

#include <utility>

namespace diloco {
namespace {

using link::MessagePtr;

class LinkWork : public c10d::Work {
  public:
    LinkWork(std::shared_ptr<Link> link, MessagePtr message, at::Tensor tensor)
        : link_(std::move(link)), message_(std::move(message)), tensor_(std::move(tensor)) {}

    ~LinkWork() override {
        if (link_->is_own_process()) {
            link_->cancel(message_);
        } else {
            // In a forked child the message is leaked: a thread of the parent may have been waiting
            // on its condition variable, which then cannot be destroyed.
            new MessagePtr(std::move(message_));
        }
    }

    bool isCompleted() override { return link_->is_done(*message_); }

    bool isSuccess() const override {
        return link_->is_done(*message_) && message_->error.empty() && !message_->is_aborted;
    }

    std::exception_ptr exception() const override {
        if (!link_->is_done(*message_) || message_->error.empty()) return nullptr;
        return std::make_exception_ptr(std::runtime_error(message_->error));
    }

    bool wait(std::chrono::milliseconds timeout) override { return link_->wait(message_, timeout); }

    void abort() override { link_->cancel(message_); }

    std::vector<at::Tensor> result() override { return {tensor_}; }

  private:
    std::shared_ptr<Link> link_;
    MessagePtr message_;
    at::Tensor tensor_;  // keeps the message's memory alive
};

}  // namespace

LinkGroup::LinkGroup(std::shared_ptr<Link> link, int rank, int number,
                     std::vector<std::shared_ptr<link::Channel>> channels)
    : Backend(rank, static_cast<int>(channels.size())),
      link_(std::move(link)),
      number_(number),
      channels_(std::move(channels)) {}

LinkGroup::~LinkGroup() {
    if (link_->is_own_process()) link_->close_group(number_, channels_);
}

c10::intrusive_ptr<c10d::Work> LinkGroup::send(std::vector<at::Tensor>& tensors, int peer,
                                               int tag) {
    return post(tensors, peer, tag, true);
}

c10::intrusive_ptr<c10d::Work> LinkGroup::recv(std::vector<at::Tensor>& tensors, int peer,
                                               int tag) {
    return post(tensors, peer, tag, false);
}

c10::intrusive_ptr<c10d::Work> LinkGroup::post(std::vector<at::Tensor>& tensors, int peer, int tag,
                                               bool is_send) {
    TORCH_CHECK_VALUE(tensors.size() == 1, "a link carries one tensor a message, got ",
                      tensors.size());
    const at::Tensor& tensor = tensors[0];
    TORCH_CHECK_VALUE(tensor.device().is_cpu() && tensor.is_contiguous(),
                      "a link carries contiguous tensors on the CPU, got one on ", tensor.device(),
                      tensor.is_contiguous() ? "" : " that is not contiguous");
    TORCH_CHECK_VALUE(peer >= 0 && peer < getSize() && peer != getRank(),
                      "a link has no peer of rank ", peer, ": this process has rank ", getRank(),
                      " of ", getSize());
    TORCH_CHECK_VALUE(tag >= 0, "a tag is at least 0, got ", tag);
    link_->check_process();
    auto message = std::make_shared<link::Message>();
    message->is_send = is_send;
    message->data = static_cast<uint8_t*>(tensor.data_ptr());
    message->num_bytes = tensor.nbytes();
    message->number = static_cast<uint16_t>(number_);
    message->tag = static_cast<uint32_t>(tag);
    link_->post(*channels_[static_cast<size_t>(peer)], message);
    return c10::make_intrusive<LinkWork>(link_, std::move(message), tensor);
}

std::vector<c10::intrusive_ptr<LinkGroup>> connect_groups(
    Link& link, const std::string& token, int rank, const std::vector<link::Place>& peers,
    int lanes, std::chrono::milliseconds limit, const std::function<void()>& check) {
    const auto channels = link.connect(token, rank, peers, lanes, limit, check);
    std::vector<c10::intrusive_ptr<LinkGroup>> groups;
    for (int number = 0; number < 2 * lanes; ++number) {
        groups.push_back(
            c10::make_intrusive<LinkGroup>(link.shared_from_this(), rank, number, channels));
    }
    return groups;
}

}  // namespace diloco
