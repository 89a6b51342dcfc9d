// A c10d backend over a link: one of the groups that a call of Link::connect() makes. It has send
// and recv, and no collectives.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <vector>

#include "exchange/link/link.h"

namespace diloco {

class LinkGroup : public c10d::Backend {
  public:
    // `number` is the group's index among the groups of its Link::connect(). `channels` are by
    // rank, null for the own rank.
    LinkGroup(std::shared_ptr<Link> link, int rank, int number,
              std::vector<std::shared_ptr<link::Channel>> channels);
    // Ends this group's pending works, and tells the peers, whose works of this group then fail.
    ~LinkGroup() override;

    const std::string getBackendName() const override { return "link"; }

    // `tensors` has one contiguous tensor on the CPU. A send may overtake another one with a
    // different tag; messages of one tag that are pending at the same time must have one size.
    // Dropping the returned work cancels a message that is not complete.
    c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors, int peer,
                                        int tag) override;
    c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors, int peer,
                                        int tag) override;

  private:
    c10::intrusive_ptr<c10d::Work> post(std::vector<at::Tensor>& tensors, int peer, int tag,
                                        bool is_send);

    std::shared_ptr<Link> link_;
    int number_;
    std::vector<std::shared_ptr<link::Channel>> channels_;
};

// Makes two groups for each lane; see Link::connect().
std::vector<c10::intrusive_ptr<LinkGroup>> connect_groups(
    Link& link, const std::string& token, int rank, const std::vector<link::Place>& peers,
    int lanes, std::chrono::milliseconds limit, const std::function<void()>& check);

}  // namespace diloco
