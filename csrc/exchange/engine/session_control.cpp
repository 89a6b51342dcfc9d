// The messages of a session that carry no payload: headers, votes, and bytes that are not encoded.
// The "last words" are a rank's votes, whose failed sends are ignored.
#include <cmath>
#include <sstream>
#include <utility>

#include "exchange/engine/control.h"
#include "exchange/engine/session.h"
#include "exchange/transport/pages.h"

namespace diloco {

void Session::post_header_recvs() {
    // Posts the receives for the next job's headers early, so that a header finds its buffer even
    // if it arrives before this rank has begun the job.
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
    std::vector<Header> headers(headers_in_.size(), job.header);
    for (int i = 1; i <= num_peers(); ++i) {
        faults_.before("header", -1, i - 1);
        control_sends_.push_back(
            transport_.send(kControl, peer(i), header_tag(sequence), &header_out_, sizeof(Header)));
    }
    for (int rank = 0; rank < transport_.size(); ++rank) {
        if (rank == transport_.rank()) continue;
        job.await(membership_.replicas[static_cast<size_t>(rank)]);
        headers[static_cast<size_t>(rank)] = receive_header(rank);
    }
    job.await(-1);
    {
        std::lock_guard<std::mutex> lock(job.mutex);
        job.headers = std::move(headers);
    }
    wait_all(control_sends_);
    ++sequence_;
    post_header_recvs();
}

const Header& Session::receive_header(int rank) {
    const Header& header = headers_in_[static_cast<size_t>(rank)];
    transport_.wait(header_recvs_[static_cast<size_t>(rank)], deadline_);
    if (header.magic != kMagic || header.sequence != sequence_) {
        throw TransportError(rank, "a header that is not ours arrived");
    }
    return header;
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

void Session::post_last_words(int peer, int tag, const void* data, size_t num_bytes) {
    try {
        control_sends_.push_back(transport_.send(kControl, peer, tag, data, num_bytes));
    } catch (const TransportError&) {
        // This peer is gone already; the other peers must still have the vote.
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
