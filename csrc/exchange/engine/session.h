// A session has the process groups of one epoch, and runs jobs on them.
//
// A job sends a header, then the chunks of its payload, then a vote. All headers have arrived and
// match before a chunk is posted; the result counts only when every rank's vote has arrived. All
// calls are on the engine thread, except the constructor, abort() and emulate_link().
#pragma once

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "exchange/engine/faults.h"
#include "exchange/engine/job.h"
#include "exchange/transport/transport.h"

namespace diloco {

struct Membership {
    int64_t epoch = 0;
    int rank = 0;
    std::vector<int64_t> replicas{0};  // in rank order

    int size() const { return static_cast<int>(replicas.size()); }
};

// The ranks agree that this job has no result; the groups stay usable.
class Rejected : public std::runtime_error {
  public:
    explicit Rejected(Failure failure)
        : std::runtime_error(failure.message), failure(std::move(failure)) {}
    Failure failure;
};

inline uint8_t* bytes(const at::Tensor& tensor) { return tensor.data_ptr<uint8_t>(); }

class Session {
  public:
    Session(Membership membership, std::vector<BackendPtr> groups,
            std::chrono::milliseconds timeout, FaultInjector& faults);

    // Runs one job. `staging`, of window * size * run_bytes bytes, is the buffer into which the
    // peers' runs are received. Throws Rejected, TransportError or Aborted.
    void run(Job& job, const at::Tensor& staging);

    void emulate_link(double gbps, double rtt_ms) { transport_.emulate_link(gbps, rtt_ms); }
    void abort() { transport_.abort(); }

    const Membership& membership() const { return membership_; }
    const std::string& stage() const { return stage_; }

  private:
    // The pending receives and sends of one chunk.
    struct InFlight {
        std::vector<Receipt> exchange_recvs;
        std::vector<Receipt> publish_recvs;
        std::vector<Receipt> sends;
    };

    int peer(int i) const { return (transport_.rank() + i) % transport_.size(); }
    int num_peers() const { return transport_.size() - 1; }
    int data_tag(int phase, int64_t index) const;
    void post_header_recvs();
    void exchange_headers(Job& job);
    const Header& receive_header(int rank);
    void check_headers(Job& job);
    void run_chunks(Job& job, const at::Tensor& staging);
    void run_step(Job& job, const Step& step, const at::Tensor& staging);
    void post_exchange(Job& job, const Step& step, const at::Tensor& staging);
    void post_chunk(Job& job, const Step& step);
    void reduce(Job& job, int64_t chunk, const at::Tensor& staging);
    void post_publish(Job& job, const Step& step);
    void wait_for_encoded(Job& job, int64_t run);
    void wait_for_mark(const Mark& mark);
    void check_time() const;
    void deliver_chunk(Job& job, int64_t chunk);
    uint8_t* peer_payload(Job& job, int rank) const;
    void digest_chunk(Job& job, const uint8_t* payload, int64_t chunk, int64_t source);
    void exchange_blobs(Job& job);
    void broadcast(Job& job);
    void post_vote_recvs(uint64_t sequence);
    void vote(Job& job);
    void post_last_words(int peer, int tag, const void* data, size_t num_bytes);
    void wait_for_last_words();
    void reject_bad_elements(const std::vector<Vote>& votes);
    void wait_all(std::vector<Receipt>& receipts);

    Membership membership_;
    std::chrono::milliseconds timeout_;
    FaultInjector& faults_;
    std::vector<Header> headers_in_;
    Header header_out_;
    std::vector<Vote> votes_in_;
    Vote vote_out_;
    uint64_t sequence_ = 0;
    Clock::time_point deadline_{};
    std::string stage_;
    Transport transport_;  // destroyed before the memory that its messages use
    std::vector<Receipt> header_recvs_;
    std::vector<Receipt> vote_recvs_;
    std::vector<Receipt> control_sends_;
    std::vector<InFlight> in_flight_;
    at::Tensor mean_values_;  // the buffer `values` of call_reduce()
};

}  // namespace diloco
