// A job is one exchange that the engine thread carries out: its inputs, progress and outcome.
//
// The engine sends from host memory and receives into it. If the fragment is on a device, the job
// is "staged": the device encodes, and copies of the payload, of the result and of the count of bad
// elements (NaN, Inf or out of the wire's range) move between device and host. With a loader, so do
// outer parameters.
//
// The calling thread makes a job and encodes into its payload, batch by batch; the engine thread
// sends the runs that are encoded. The job's tensors are detached aliases, which have no Python
// object: the engine thread drops the last reference without the GIL.
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

// Where the runs of a fragment lie in its payload; see Layout in diloco_comm/ops/wire.py.
struct Layout {
    int64_t num_elements = 0;
    int64_t num_runs = 1;
    int64_t run_elements = 0;
    int64_t run_bytes = 0;
    std::string wire;
    int64_t block_size = 0;
    int64_t code_offset = 0;    // bytes from the start of a run to its first code
    int64_t unit_elements = 1;  // the codes of unit_elements elements take unit_bytes
    int64_t unit_bytes = 0;

    int64_t run_begin(int64_t run) const { return std::min(run * run_elements, num_elements); }
    int64_t run_length(int64_t run) const { return run_begin(run + 1) - run_begin(run); }

    // The bytes of a run that are sent: they hold its elements. Other bytes of a run are padding.
    int64_t used_bytes(int64_t run) const {
        const int64_t length = run_length(run);
        if (length == 0) return 0;
        return code_offset + (length + unit_elements - 1) / unit_elements * unit_bytes;
    }
};

// The most chunks for which a message's tag has room.
constexpr int64_t kMaxChunks = int64_t{1} << 19;

// The numbers that all exchanges of one fragment have in common; made once.
struct Plan {
    Layout layout;
    // The layout of the payloads in the result. With num_phases == 2 that is the encoded mean. Its
    // wire may be another one, so that a run has the same elements but another number of bytes.
    Layout mean_layout;
    int64_t num_chunks = 1;
    int64_t num_phases = 0;  // 0: one rank; 1: all payloads to all ranks; 2: reduce and publish
    int64_t window = 1;      // the most chunks in flight in each phase
    Schedule schedule;
    std::string impl;

    int64_t world_size() const { return layout.num_runs / num_chunks; }
    int64_t payload_bytes() const { return layout.num_runs * layout.run_bytes; }
    // Whether the mean is encoded on another wire than the payloads.
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
    std::vector<int64_t> replicas;  // NonFiniteError: the replicas that have bad elements
};

// This rank's progress with the vote on a job. From kVoted on, this rank holds the complete result,
// and peers may have its vote.
enum class Standing : uint8_t {
    kNone,      // no peer has this rank's vote
    kVoted,     // the vote was sent to at least one peer, or its sending had begun
    kRejected,  // at least one vote reports bad elements, so the job fails on every rank
    kAgreed,    // every rank's vote has arrived, and no vote reports bad elements
};

// Bytes that a kBroadcast job sends to one rank, or receives from it, without encoding.
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
    int64_t outer_begin = 0;  // the fragment's element at which `outer` begins
};

// The device tensors and events of a staged job.
struct Staging {
    std::shared_ptr<DeviceQueue> queue;
    at::Tensor payload;                   // Job::payload on the device
    at::Tensor result;                    // Job::result on the device, or undefined
    at::Tensor bad;                       // Job::encode_bad on the device, int64[1]
    Mark begin;                           // the end of the caller's stream before staging
    std::shared_ptr<ChunkLoader> loader;  // null: the outer parameters are on the device
    at::Tensor outer;                     // with a loader: in page-locked memory
    Mark stored;  // outcome: reached when the device has the result; null: nothing was copied
};

// Throws in a forked child of the process `owner`: a child has no engine thread, and may find a
// mutex locked for ever.
void check_process(pid_t owner);

struct Job {
    const pid_t pid = getpid();

    // Inputs, constant once the job is submitted.
    Header header;
    std::shared_ptr<const Plan> plan;
    at::Tensor payload;  // this rank's payload, uint8
    at::Tensor result;   // num_phases == 2: the encoded mean; 1: the peers' payloads by rank
    EncodeInputs encode;
    bool is_overlapped = false;  // the caller goes on to compute, and takes the result later
    bool is_held = false;        // start() only encodes; ship() sends later
    int64_t reduce_key = 0;
    // The residual of the runs that this rank averages: [num_chunks * run_elements] fp32 or bf16,
    // or undefined. Reducing reads the first tensor and writes the second.
    at::Tensor reduce_residual;
    at::Tensor new_reduce_residual;
    std::vector<Transfer> sends;
    std::vector<Transfer> recvs;
    at::Tensor blob;                 // the bytes that a kObjects job sends to all ranks, uint8
    std::optional<Staging> staging;  // None: the fragment is in host memory

    // Progress, guarded by `mutex`.
    std::mutex mutex;
    std::condition_variable changed;
    std::condition_variable landed;  // notified when num_landed or is_done changes
    int64_t num_encoded = 0;         // runs that are encoded; staged: whose encoding is enqueued
    std::vector<std::pair<int64_t, Mark>> fetched;  // staged: runs before the number are in host
                                                    // memory once the mark is reached
    int64_t num_landed = 0;  // complete runs of the result, before the vote; 0 if staged
    bool is_encode_failed = false;
    bool is_done = false;
    // The running job waits for this replica's header; -1: for payloads and votes.
    std::optional<int64_t> awaited;
    std::vector<Header> headers;  // of all ranks, in rank order; empty until all are here
    std::vector<double> weights;  // of all ranks, over their sum; empty until the headers match

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
    codec::DigestSums digest;  // of all payloads, or of the encoded mean; complete before the vote
    at::Tensor encode_bad;     // int64[1]: bad elements of the own payload
    at::Tensor reduce_bad;     // int64[1]: the same of the runs that this rank averaged

    bool has_payload() const { return plan != nullptr; }

    // Tells the engine thread that the first `runs` runs are encoded, or will be at `mark`.
    void announce(int64_t runs, Mark mark = nullptr) {
        {
            std::lock_guard<std::mutex> lock(mutex);
            num_encoded = runs;
            if (mark) fetched.emplace_back(runs, std::move(mark));
        }
        changed.notify_all();
    }

    // Records for whom the engine thread waits; see `awaited`.
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

    // The mark after which an announced run is in host memory; null: the run is there now. The
    // caller holds the mutex.
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
