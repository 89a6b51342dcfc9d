// A c10d backend over a link: one group of a token. It has send and recv, and no collectives.
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
    // `channels`: by rank; null for the own rank.
    LinkGroup(std::shared_ptr<Link> link, int rank, int number,
              std::vector<std::shared_ptr<link::Channel>> channels);
    // Ends its works, and tells the peers, whose works then fail.
    ~LinkGroup() override;

    const std::string getBackendName() const override { return "link"; }

    // One contiguous tensor on the CPU. A send may overtake another one with a different tag;
    // messages of one tag that are under way at the same time have one size. The
    // work of a message that is no longer wanted may be dropped: then the message may not travel.
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

// Two groups for each lane; see Link::connect().
std::vector<c10::intrusive_ptr<LinkGroup>> connect_groups(
    Link& link, const std::string& token, int rank, const std::vector<link::Place>& peers,
    int lanes, std::chrono::milliseconds limit, const std::function<void()>& check);

}  // namespace diloco
