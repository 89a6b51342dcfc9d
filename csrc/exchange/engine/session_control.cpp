// The parts of a session that carry no payload: headers, the last words, plain bytes.
#include <cmath>
#include <sstream>
#include <utility>

#include "exchange/engine/control.h"
#include "exchange/engine/session.h"
#include "exchange/transport/pages.h"

namespace diloco {
namespace {

bool is_leave(const Header& header) { return Kind(header.kind) == Kind::kLeave; }

}  // namespace

void Session::post_header_recvs() {
    // Receives are posted before they are needed: a peer's header, or its leave, arrives without a
    // round trip.
    for (int i = 1; i <= num_peers(); ++i) {
        const auto from = static_cast<size_t>(peer(i));
        header_recvs_[from] = transport_.recv(kControl, peer(i), header_tag(sequence_),
                                              &headers_in_[from], sizeof(Header));
    }
}

void Session::exchange_headers(Job& job) {
    stage_ = "header";
    Stopwatch watch(job.seconds["header"]);
    const uint64_t sequence = sequence_;
    job.header.sequence = sequence;
    job.header.epoch = static_cast<int32_t>(membership_.epoch);
    job.header.replica = membership_.replicas[static_cast<size_t>(membership_.rank)];
    header_out_ = job.header;
    is_waiting_for_headers_ = true;
    std::vector<Header> headers(headers_in_.size(), job.header);
    std::vector<Header> leaves;
    try {
        for (int i = 1; i <= num_peers(); ++i) {
            faults_.before("header", -1, i - 1);
            control_sends_.push_back(transport_.send(kControl, peer(i), header_tag(sequence),
                                                     &header_out_, sizeof(Header)));
        }
        for (int rank = 0; rank < transport_.size() && leaves.empty(); ++rank) {
            if (rank == transport_.rank()) continue;
            awaited_rank_ = rank;
            const Header& header = receive_header(rank, deadline_);
            if (is_leave(header)) leaves.push_back(header);
            headers[static_cast<size_t>(rank)] = header;
        }
    } catch (const TransportError&) {
        leaves = leaves_that_arrived();
        if (leaves.empty()) throw;
    }
    is_waiting_for_headers_ = false;
    awaited_rank_ = -1;
    if (!leaves.empty()) {
        Failure failure;
        failure.kind = "PeerLeft";
        failure.stage = stage_;
        for (const Header& leave : leaves) {
            failure.replicas.push_back(leave.replica);
            failure.inner_steps.push_back(leave.inner_step);
        }
        throw Rejected(std::move(failure));
    }
    {
        std::lock_guard<std::mutex> lock(job.mutex);
        job.headers = std::move(headers);
    }
    wait_all(control_sends_);
    ++sequence_;
    post_header_recvs();
}

const Header& Session::receive_header(int rank, Clock::time_point deadline) {
    const Header& header = headers_in_[static_cast<size_t>(rank)];
    transport_.wait(header_recvs_[static_cast<size_t>(rank)], deadline);
    if (header.magic != kMagic || header.sequence != sequence_) {
        throw TransportError(rank, "a header that is not ours arrived");
    }
    return header;
}

// A peer that left has closed its connections, so a send to it fails; its leave is already here.
std::vector<Header> Session::leaves_that_arrived() {
    std::vector<Header> leaves;
    for (int rank = 0; rank < transport_.size(); ++rank) {
        if (!header_recvs_[static_cast<size_t>(rank)].work) continue;
        try {
            const Header& header = receive_header(rank, Clock::now());
            if (is_leave(header)) leaves.push_back(header);
        } catch (const TransportError&) {
        } catch (const Aborted&) {
        }
    }
    return leaves;
}

void Session::check_headers(Job& job) {
    Failure failure;
    failure.stage = stage_;
    failure.message = find_mismatch(job.headers);
    if (!failure.message.empty()) {
        failure.kind = "ReplicaMismatch";
        throw Rejected(std::move(failure));
    }
    if (!job.has_payload()) return;
    double sum = 0.0;
    bool is_valid = true;
    std::vector<int64_t> reset;
    for (const Header& header : job.headers) {
        is_valid = is_valid && std::isfinite(header.weight) && header.weight >= 0.0;
        sum += header.weight;
        if (header.flags & kReset) reset.push_back(header.replica);
    }
    if (is_valid && sum == 0.0 && !reset.empty()) {
        failure.kind = "NonFiniteError";
        failure.message = nothing_to_average(reset);
        failure.replicas = std::move(reset);
        throw Rejected(std::move(failure));
    }
    if (!is_valid || !(sum > 0.0) || !std::isfinite(sum)) {
        std::ostringstream text;
        text << "the replicas' weights must be finite, not negative, and not all zero:";
        for (const Header& header : job.headers) {
            text << " replica " << header.replica << " has " << header.weight << ";";
        }
        failure.kind = "SyncError";
        failure.message = text.str();
        failure.message.pop_back();
        throw Rejected(std::move(failure));
    }
    std::vector<double> weights;
    for (const Header& header : job.headers) {
        weights.push_back(static_cast<double>(static_cast<float>(header.weight / sum)));
    }
    std::lock_guard<std::mutex> lock(job.mutex);
    job.weights = std::move(weights);
}

void Session::leave(int64_t inner_step) {
    deadline_ = Clock::now() + std::chrono::seconds(1);
    header_out_ = Header();
    header_out_.kind = static_cast<uint8_t>(Kind::kLeave);
    header_out_.sequence = sequence_;
    header_out_.epoch = static_cast<int32_t>(membership_.epoch);
    header_out_.replica = membership_.replicas[static_cast<size_t>(membership_.rank)];
    header_out_.inner_step = inner_step;
    for (int i = 1; i <= num_peers(); ++i) {
        post_last_words(peer(i), header_tag(sequence_), &header_out_, sizeof(Header));
    }
    wait_for_last_words();
}

void Session::post_last_words(int peer, int tag, const void* data, size_t num_bytes) {
    try {
        control_sends_.push_back(transport_.send(kControl, peer, tag, data, num_bytes));
    } catch (const TransportError&) {
        // This peer is gone already; the other peers must still hear that this rank leaves.
    }
}

void Session::wait_for_last_words() {
    for (Receipt& receipt : control_sends_) {
        try {
            transport_.wait(receipt, deadline_);
        } catch (const TransportError&) {
        } catch (const Aborted&) {
        }
    }
    control_sends_.clear();
}

void Session::exchange_blobs(Job& job) {
    stage_ = "objects";
    job.blobs.assign(headers_in_.size(), at::Tensor());
    std::vector<Receipt> receipts;
    for (int i = 1; i <= num_peers(); ++i) {
        const auto from = static_cast<size_t>(peer(i));
        job.blobs[from] = empty_pages(job.headers[from].blob_bytes);
        receipts.push_back(transport_.recv(kControl, peer(i), data_tag(0, 0),
                                           bytes(job.blobs[from]),
                                           static_cast<size_t>(job.headers[from].blob_bytes)));
    }
    job.blobs[static_cast<size_t>(transport_.rank())] = job.blob;
    for (int i = 1; i <= num_peers(); ++i) {
        receipts.push_back(transport_.send(kControl, peer(i), data_tag(0, 0), bytes(job.blob),
                                           static_cast<size_t>(job.blob.numel())));
    }
    wait_all(receipts);
}

void Session::broadcast(Job& job) {
    stage_ = kind_name(Kind(job.header.kind));
    std::vector<Receipt> receipts;
    std::vector<int64_t> next(headers_in_.size(), 0);
    for (Transfer& item : job.recvs) {
        receipts.push_back(transport_.recv(
            kControl, item.peer, data_tag(0, next[static_cast<size_t>(item.peer)]++),
            bytes(item.bytes), static_cast<size_t>(item.bytes.numel())));
    }
    next.assign(next.size(), 0);
    for (Transfer& item : job.sends) {
        receipts.push_back(transport_.send(
            kControl, item.peer, data_tag(0, next[static_cast<size_t>(item.peer)]++),
            bytes(item.bytes), static_cast<size_t>(item.bytes.numel())));
    }
    wait_all(receipts);
}

}  // namespace diloco
