#include "exchange/engine/session.h"

#include <cstring>
#include <sstream>
#include <thread>
#include <utility>

#include "codec/digest.h"
#include "exchange/engine/control.h"
#include "exchange/engine/operator_calls.h"

namespace diloco {
namespace {

bool is_bad(const Vote& vote) { return vote.num_bad > 0 || vote.num_bad_mean > 0; }

}  // namespace

Session::Session(Membership membership, std::vector<BackendPtr> groups,
                 std::chrono::milliseconds timeout, FaultInjector& faults)
    : membership_(std::move(membership)),
      timeout_(timeout),
      faults_(faults),
      headers_in_(static_cast<size_t>(membership_.size())),
      votes_in_(static_cast<size_t>(membership_.size())),
      transport_(std::move(groups), membership_.rank, membership_.size()),
      header_recvs_(static_cast<size_t>(membership_.size())),
      vote_recvs_(static_cast<size_t>(membership_.size())) {
    post_header_recvs();
}

int Session::data_tag(int phase, int64_t index) const {
    // A tag has ten bits of the job's sequence number, a bit for the phase, and 19 bits for the
    // index of the chunk or transfer.
    TORCH_CHECK(index < kMaxChunks, "an exchange has at most ", kMaxChunks, " messages to a peer");
    const auto job = static_cast<int>((sequence_ & 0x3ff) << 20);
    return job | (phase << 19) | static_cast<int>(index);
}

void Session::run(Job& job, const at::Tensor& staging) {
    deadline_ = Clock::now() + timeout_;
    const int64_t sent = transport_.sent_bytes();
    const int64_t received = transport_.received_bytes();
    exchange_headers(job);
    check_headers(job);
    switch (Kind(job.header.kind)) {
        case Kind::kObjects:
            exchange_blobs(job);
            break;
        case Kind::kBroadcast:
            broadcast(job);
            break;
        default:
            // A job without a payload exchanges headers only: NCCL carries the payload elsewhere.
            if (!job.has_payload()) break;
            post_vote_recvs(sequence_ - 1);
            run_chunks(job, staging);
    }
    job.sent_bytes = transport_.sent_bytes() - sent;
    job.received_bytes = transport_.received_bytes() - received;
}

void Session::wait_all(std::vector<Receipt>& receipts) {
    for (Receipt& receipt : receipts) transport_.wait(receipt, deadline_);
    receipts.clear();
}

// -------------------------------------------------------------------------------------- chunks

void Session::wait_for_encoded(Job& job, int64_t run) {
    Stopwatch watch(job.seconds["wait_encode"]);
    std::unique_lock<std::mutex> lock(job.mutex);
    job.changed.wait(lock, [&] { return job.num_encoded > run || job.is_encode_failed; });
    if (job.is_encode_failed) throw std::runtime_error("encoding failed on this replica");
    const Mark mark = job.fetched_mark(run);
    lock.unlock();
    wait_for_mark(mark);
}

// Polls the mark: the driver's own wait could neither be aborted nor end at a deadline.
void Session::wait_for_mark(const Mark& mark) {
    constexpr std::chrono::microseconds kPoll{20};
    while (mark && !mark->query()) {
        if (transport_.is_aborted()) throw Aborted();
        if (Clock::now() >= deadline_) {
            throw std::runtime_error("this replica's device did not get to the exchange in time");
        }
        std::this_thread::sleep_for(kPoll);
    }
}

// Posting never waits, and so would notice neither an abort nor the deadline.
void Session::check_time() const {
    if (transport_.is_aborted()) throw Aborted();
    if (Clock::now() >= deadline_) throw std::runtime_error("timed out");
}

// Called when a chunk of the result is complete: tells the caller, or copies the chunk to the
// device if the job is staged.
void Session::deliver_chunk(Job& job, int64_t chunk) {
    if (!job.staging) {
        // After the last chunk the vote follows at once: two wake-ups would cost more than they
        // hide.
        if (chunk + 1 < job.plan->num_chunks) job.land((chunk + 1) * transport_.size());
        return;
    }
    Staging& staging = *job.staging;
    const int64_t num_bytes = transport_.size() * job.plan->mean_layout.run_bytes;
    const int64_t num_payloads = job.plan->num_phases == 1 ? num_peers() : 1;
    for (int64_t place = 0; place < num_payloads; ++place) {
        const int64_t at = place * job.plan->mean_bytes() + chunk * num_bytes;
        staging.stored = staging.queue->store(staging.result.narrow(0, at, num_bytes),
                                              job.result.narrow(0, at, num_bytes), staging.begin);
    }
}

// Where another rank's payload begins in the result, if each rank sends its whole payload to all
// others (num_phases == 1). The result has no payload of this rank.
uint8_t* Session::peer_payload(Job& job, int rank) const {
    const int place = rank < transport_.rank() ? rank : rank - 1;
    return bytes(job.result) + place * job.plan->payload_bytes();
}

// Adds a chunk of `payload` to the digest of the round, which is equal on all ranks. `source` is
// the rank from which the payload comes, or 0 if it is the encoded mean.
void Session::digest_chunk(Job& job, const uint8_t* payload, int64_t chunk, int64_t source) {
    const Kind kind = Kind(job.header.kind);
    if (kind != Kind::kSync && kind != Kind::kFlush) return;
    Stopwatch watch(job.seconds["digest"]);
    const Layout& layout = job.plan->mean_layout;
    const int64_t first = chunk * transport_.size();
    for (int64_t run = first; run < first + transport_.size(); ++run) {
        const int64_t at = (source * layout.num_runs + run) * layout.run_bytes;
        codec::add_digest(payload + run * layout.run_bytes,
                          static_cast<size_t>(layout.used_bytes(run)),
                          static_cast<uint64_t>(at) / sizeof(uint64_t), job.digest);
    }
}

void Session::run_chunks(Job& job, const at::Tensor& staging) {
    const Plan& plan = *job.plan;
    const auto depth = static_cast<size_t>(2 * plan.window + 1);
    if (in_flight_.size() < depth) in_flight_.resize(depth);
    // The previous round's result must be copied to the device before this buffer is overwritten.
    if (job.staging && job.result.defined()) {
        wait_for_mark(job.staging->queue->last_store(job.result));
    }
    for (const Step& step : plan.schedule) {
        faults_.before(action_name(step.action), step.chunk, 0);
        run_step(job, step, staging);
    }
}

void Session::run_step(Job& job, const Step& step, const at::Tensor& staging) {
    const int64_t depth = 2 * job.plan->window + 1;
    InFlight& chunk = in_flight_[static_cast<size_t>(std::max(step.chunk, 0) % depth)];
    stage_ = action_name(step.action);
    switch (step.action) {
        case Action::kPostExchange:
            check_time();
            if (job.plan->num_phases == 1) {
                post_chunk(job, step);
            } else {
                post_exchange(job, step, staging);
            }
            break;
        case Action::kWaitExchange: {
            Stopwatch watch(job.seconds["exchange"]);
            wait_all(chunk.exchange_recvs);
            if (job.plan->num_phases == 1) {
                wait_all(chunk.sends);
                deliver_chunk(job, step.chunk);
                for (int i = 1; i <= num_peers(); ++i) {
                    digest_chunk(job, peer_payload(job, peer(i)), step.chunk, peer(i));
                }
            }
            break;
        }
        case Action::kReduce: {
            Stopwatch watch(job.seconds["reduce"]);
            reduce(job, step.chunk, staging);
            break;
        }
        case Action::kPostPublish:
            check_time();
            post_publish(job, step);
            break;
        case Action::kWaitPublish: {
            Stopwatch watch(job.seconds["exchange"]);
            wait_all(chunk.publish_recvs);
            wait_all(chunk.sends);
            deliver_chunk(job, step.chunk);
            digest_chunk(job, bytes(job.result), step.chunk, 0);
            break;
        }
        case Action::kVote: {
            Stopwatch watch(job.seconds["vote"]);
            vote(job);
            break;
        }
    }
}

// Posts a chunk if num_phases == 1: all its runs go to every peer.
void Session::post_chunk(Job& job, const Step& step) {
    const Layout& layout = job.plan->layout;
    const int64_t first = step.chunk * transport_.size();
    const int64_t offset = first * layout.run_bytes;
    int64_t end = offset;
    for (int64_t run = first; run < first + transport_.size(); ++run) {
        if (layout.run_length(run) > 0) end = run * layout.run_bytes + layout.used_bytes(run);
    }
    const auto num_bytes = static_cast<size_t>(end - offset);
    const int tag = data_tag(0, step.chunk);
    InFlight& chunk = in_flight_[static_cast<size_t>(step.chunk % (2 * job.plan->window + 1))];
    for (int i = 1; i <= num_peers(); ++i) {
        chunk.exchange_recvs.push_back(transport_.recv(
            step.lane, peer(i), tag, peer_payload(job, peer(i)) + offset, num_bytes));
    }
    wait_for_encoded(job, first + transport_.size() - 1);
    for (int i = 1; i <= num_peers(); ++i) {
        chunk.sends.push_back(
            transport_.send(step.lane, peer(i), tag, bytes(job.payload) + offset, num_bytes));
    }
    // The own chunk is digested while the peers' are under way.
    digest_chunk(job, bytes(job.payload), step.chunk, transport_.rank());
}

void Session::post_exchange(Job& job, const Step& step, const at::Tensor& staging) {
    const Layout &layout = job.plan->layout, &mean = job.plan->mean_layout;
    const int64_t size = transport_.size();
    const int64_t first = step.chunk * size;
    const int64_t stride = layout.run_bytes;
    const auto used_bytes = [&](int rank) {
        return static_cast<size_t>(layout.used_bytes(first + rank));
    };
    InFlight& chunk = in_flight_[static_cast<size_t>(step.chunk % (2 * job.plan->window + 1))];
    uint8_t* received = bytes(staging) + (step.chunk % job.plan->window) * size * stride;
    for (int i = 1; i <= num_peers(); ++i) {
        const int from = peer(i);
        chunk.exchange_recvs.push_back(transport_.recv(step.lane, from, data_tag(0, step.chunk),
                                                       received + from * stride,
                                                       used_bytes(transport_.rank())));
        chunk.publish_recvs.push_back(transport_.recv(
            step.lane, from, data_tag(1, step.chunk),
            bytes(job.result) + (first + from) * mean.run_bytes, mean.used_bytes(first + from)));
    }
    for (int i = 1; i <= num_peers(); ++i) {
        const int to = peer(i);
        wait_for_encoded(job, first + to);
        chunk.sends.push_back(transport_.send(step.lane, to, data_tag(0, step.chunk),
                                              bytes(job.payload) + (first + to) * stride,
                                              used_bytes(to)));
    }
}

void Session::reduce(Job& job, int64_t chunk, const at::Tensor& staging) {
    const Layout& layout = job.plan->layout;
    const int64_t size = transport_.size();
    const int64_t run = chunk * size + transport_.rank();
    if (layout.run_length(run) == 0) return;
    wait_for_encoded(job, run);
    const int64_t stride = layout.run_bytes;
    const at::Tensor received =
        staging.narrow(0, (chunk % job.plan->window) * size * stride, size * stride);
    std::memcpy(bytes(received) + transport_.rank() * stride, bytes(job.payload) + run * stride,
                static_cast<size_t>(layout.used_bytes(run)));
    const int64_t mean_stride = job.plan->mean_layout.run_bytes;
    call_reduce(job, received, job.result.narrow(0, run * mean_stride, mean_stride), run, chunk,
                mean_values_);
}

void Session::post_publish(Job& job, const Step& step) {
    const Layout& layout = job.plan->mean_layout;
    const int64_t run = step.chunk * static_cast<int64_t>(transport_.size()) + transport_.rank();
    InFlight& chunk = in_flight_[static_cast<size_t>(step.chunk % (2 * job.plan->window + 1))];
    for (int i = 1; i <= num_peers(); ++i) {
        chunk.sends.push_back(transport_.send(step.lane, peer(i), data_tag(1, step.chunk),
                                              bytes(job.result) + run * layout.run_bytes,
                                              static_cast<size_t>(layout.used_bytes(run))));
    }
}

// ---------------------------------------------------------------------------------------- vote

void Session::post_vote_recvs(uint64_t sequence) {
    for (int i = 1; i <= num_peers(); ++i) {
        const auto from = static_cast<size_t>(peer(i));
        vote_recvs_[from] =
            transport_.recv(kControl, peer(i), vote_tag(sequence), &votes_in_[from], sizeof(Vote));
    }
}

void Session::vote(Job& job) {
    const uint64_t sequence = job.header.sequence;
    // A single replica has no chunk to wait for; its bad elements are known when all are encoded.
    wait_for_encoded(job, job.plan->layout.num_runs - 1);
    // Past this rank's deadline the other ranks may have given up, and gone on without this rank.
    if (num_peers() > 0 && Clock::now() >= deadline_) {
        throw std::runtime_error("it was too late to vote");
    }
    // seal() or close() has aborted this session. After seal() the replica tells its group for
    // which rounds it voted, so it must not vote again.
    if (transport_.is_aborted()) throw Aborted();
    vote_out_ = Vote();
    vote_out_.sequence = sequence;
    // A reset payload is zeros, without bad elements.
    if (!(job.header.flags & kReset)) vote_out_.num_bad = job.encode_bad.item<int64_t>();
    vote_out_.num_bad_mean = job.reduce_bad.item<int64_t>();
    // Set before the first peer is told: after any later failure, some peer may have the vote.
    job.standing = is_bad(vote_out_) ? Standing::kRejected : Standing::kVoted;
    for (int i = 1; i <= num_peers(); ++i) {
        if (i > 1) faults_.before("vote", -1, i - 1);
        post_last_words(peer(i), vote_tag(sequence), &vote_out_, sizeof(Vote));
    }
    std::vector<Vote> votes(votes_in_.size(), vote_out_);
    for (int rank = 0; rank < transport_.size(); ++rank) {
        if (rank == transport_.rank()) continue;
        const auto from = static_cast<size_t>(rank);
        transport_.wait(vote_recvs_[from], deadline_);
        if (votes_in_[from].sequence != sequence) {
            throw TransportError(rank, "a vote that is not ours arrived");
        }
        votes[from] = votes_in_[from];
        if (is_bad(votes[from])) job.standing = Standing::kRejected;
    }
    // A rank that has every vote commits. A rank that lacks a vote still holds the result, and
    // learns from the others after a change of the group that the round counts.
    wait_for_last_words();
    reject_bad_elements(votes);
    job.standing = Standing::kAgreed;
}

void Session::reject_bad_elements(const std::vector<Vote>& votes) {
    BadElements bad = find_bad_elements(votes, membership_.replicas);
    if (bad.text.empty()) return;
    Failure failure;
    failure.kind = "NonFiniteError";
    failure.stage = stage_;
    failure.message = std::move(bad.text);
    // If every replica is named, leaving some out would not help: `missing` stays empty.
    if (bad.replicas.size() < votes.size()) failure.missing = bad.replicas;
    failure.replicas = std::move(bad.replicas);
    throw Rejected(std::move(failure));
}

}  // namespace diloco
