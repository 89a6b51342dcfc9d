// One piece of work for the engine thread: what goes in, how far it is, what came out.
//
// The engine's buffers are in host memory. Where the fragment is on a device, the job is staged:
// the fragment is encoded there, and payload, result and the count of bad elements have twins on
// the device. These alone are copied, and the outer parameters where a loader brings them.
//
// The calling thread makes a job and encodes into its payload, chunk by chunk; the engine thread
// ships what is encoded. The job's tensors are detached aliases, which have no Python object: the
// engine thread drops the last reference without the GIL.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "codec/digest.h"
#include "exchange/device/chunk_loader.h"
#include "exchange/device/device_queue.h"
#include "exchange/engine/schedule.h"
#include "exchange/transport/message.h"

namespace diloco {

// Where the runs of a fragment lie in its payload; see wire.py.
struct Layout {
    int64_t num_elements = 0;
    int64_t num_runs = 1;
    int64_t run_elements = 0;
    int64_t run_bytes = 0;
    std::string wire;
    int64_t block_size = 0;
    int64_t code_offset = 0;    // bytes from the start of a run to its first code
    int64_t unit_elements = 1;  // the codes of so many elements are unit_bytes
    int64_t unit_bytes = 0;

    int64_t run_begin(int64_t run) const { return std::min(run * run_elements, num_elements); }
    int64_t run_length(int64_t run) const { return run_begin(run + 1) - run_begin(run); }

    // Bytes of a run that hold elements and travel. The rest of a short run is padding.
    int64_t used_bytes(int64_t run) const {
        const int64_t length = run_length(run);
        if (length == 0) return 0;
        return code_offset + (length + unit_elements - 1) / unit_elements * unit_bytes;
    }
};

// The most chunks for which a message's tag has room.
constexpr int64_t kMaxChunks = int64_t{1} << 19;

// Common to all exchanges of one fragment's buffers; made once.
struct Plan {
    Layout layout;
    // Of the payloads of the result. In two phases, of the mean, which may be on another wire: runs
    // hold the same elements, and take other bytes.
    Layout mean_layout;
    int64_t num_chunks = 1;
    int64_t num_phases = 0;  // 0: one rank; 1: all payloads to all ranks; 2: reduce and publish
    int64_t window = 1;
    Schedule schedule;
    std::string impl;

    int64_t world_size() const { return layout.num_runs / num_chunks; }
    int64_t payload_bytes() const { return layout.num_runs * layout.run_bytes; }
    // Whether owners encode the mean on another wire than that of the payloads.
    bool reencodes() const { return num_phases == 2 && mean_layout.wire != layout.wire; }
    int64_t mean_bytes() const { return mean_layout.num_runs * mean_layout.run_bytes; }
};

// Why a job ended without a result. `kind` names the Python exception.
struct Failure {
    std::string kind;  // "SyncError", "ReplicaMismatch", "NonFiniteError"
    std::string message;
    std::string cause;  // the backend's text, if the backend failed
    std::string stage;
    double seconds = 0.0;
    // The replica to which the connection was lost, if any; NonFiniteError: the replicas without
    // which the others can go on.
    std::vector<int64_t> missing;
    std::vector<int64_t> replicas;  // NonFiniteError: with bad elements
};

// This rank's progress with the vote on a job. From kVoted on this rank holds the whole result, and
// peers may have its vote.
enum class Standing : uint8_t {
    kNone,      // no peer has this rank's vote
    kVoted,     // at least one peer was told, or was about to be
    kRejected,  // some vote is bad: no rank can have all votes and all of them good
    kAgreed,    // every vote is here, and all are good
};

// Exact bytes to or from one rank.
struct Transfer {
    int peer = 0;
    at::Tensor bytes;
};

struct EncodeInputs {
    c10::IValue outer;   // Tensor?
    c10::IValue params;  // Tensor[]
    int64_t rng_key = 0;
    c10::IValue residual;
    c10::IValue new_residual;
    int64_t outer_begin = 0;  // the element of the fragment that `outer` begins with
};

// The device's side of a job.
struct Staging {
    std::shared_ptr<DeviceQueue> queue;
    at::Tensor payload;                   // device twins of the job's
    at::Tensor result;                    // or undefined
    at::Tensor bad;                       // int64[1], twin of encode_bad
    Mark begin;                           // the end of the caller's stream before staging
    std::shared_ptr<ChunkLoader> loader;  // null: the outer parameters are on the device
    at::Tensor outer;                     // with a loader: in page-locked memory
    Mark stored;  // outcome: when the result is on the device; null: nothing was copied
};

// Throws in a forked child: a child has no engine thread, and may find a mutex locked for ever.
void check_process(pid_t owner);

struct Job {
    const pid_t pid = getpid();

    // Inputs, constant once the job is submitted.
    Header header;
    std::shared_ptr<const Plan> plan;
    at::Tensor payload;  // own, uint8
    at::Tensor result;   // the average (two phases), or the peers' payloads in the order of ranks
    EncodeInputs encode;
    bool is_overlapped = false;  // the caller goes on to compute, and takes the result later
    bool is_held = false;        // start() only encodes; ship() sends later
    int64_t reduce_key = 0;
    at::Tensor reduce_residual;  // [num_chunks * run_elements] fp32/bf16, own runs, or undefined
    at::Tensor new_reduce_residual;  // same
    std::vector<Transfer> sends;
    std::vector<Transfer> recvs;
    at::Tensor blob;                 // kObjects: uint8
    std::optional<Staging> staging;  // None: the fragment is in host memory

    // Progress, guarded by `mutex`.
    std::mutex mutex;
    std::condition_variable changed;
    std::condition_variable landed;                 // or done
    int64_t num_encoded = 0;                        // runs, or those whose encoding is enqueued
    std::vector<std::pair<int64_t, Mark>> fetched;  // staged: (end run, when it is in host memory)
    int64_t num_landed = 0;  // runs of the result that are complete before the vote; not staged
    bool is_encode_failed = false;
    bool is_done = false;
    // The running job waits for this replica's header; -1: for payloads and votes.
    std::optional<int64_t> awaited;
    std::vector<Header> headers;  // of all ranks, in rank order; empty until all are here
    std::vector<double> weights;  // normalised, likewise

    // Outcome, constant once is_done.
    std::optional<Failure> failure;
    Standing standing = Standing::kNone;
    std::vector<at::Tensor> blobs;
    std::map<std::string, double> seconds;
    double encode_seconds = 0.0;
    int64_t sent_bytes = 0;
    int64_t received_bytes = 0;
    int64_t caller_faults = 0;
    int64_t engine_faults = 0;
    codec::DigestSums digest;  // of the payloads that are added up; complete before the vote
    at::Tensor encode_bad;     // int64[1]
    at::Tensor reduce_bad;

    bool has_payload() const { return plan != nullptr; }

    void announce(int64_t runs, Mark mark = nullptr) {
        {
            std::lock_guard<std::mutex> lock(mutex);
            num_encoded = runs;
            if (mark) fetched.emplace_back(runs, std::move(mark));
        }
        changed.notify_all();
    }

    void await(int64_t replica) {
        std::lock_guard<std::mutex> lock(mutex);
        awaited = replica;
    }

    // Announces that the first `runs` runs of the result are complete, though not voted on.
    void land(int64_t runs) {
        {
            std::lock_guard<std::mutex> lock(mutex);
            num_landed = runs;
        }
        landed.notify_all();
    }

    // The mark after which an announced run is in host memory; null: it is there. The caller holds
    // the mutex.
    Mark fetched_mark(int64_t run) const {
        for (const auto& [end, mark] : fetched) {
            if (run < end) return mark;
        }
        return nullptr;
    }

    void finish(std::optional<Failure> why = std::nullopt) {
        {
            std::lock_guard<std::mutex> lock(mutex);
            failure = std::move(why);
            awaited.reset();
            is_done = true;
        }
        changed.notify_all();
        landed.notify_all();
    }
};

using JobPtr = std::shared_ptr<Job>;

}  // namespace diloco
