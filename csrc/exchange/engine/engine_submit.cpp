// The part of the engine that runs on a caller's thread: it encodes a job's payload, and queues the
// job for the engine thread.
#include <ATen/Parallel.h>
#include <sched.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "exchange/engine/control.h"
#include "exchange/engine/engine.h"
#include "exchange/engine/staging.h"
#include "exchange/transport/pages.h"

namespace diloco {

void Engine::start(const JobPtr& job) {
    check_process();
    const int64_t faults = minor_faults();
    std::vector<JobPtr> finished;  // freed without the lock: a tensor's deleter may want the GIL
    {
        std::lock_guard<std::mutex> lock(mutex_);
        refuse_if_dead();
        finished.swap(finished_);
    }
    finished.clear();
    encode_all(job);
    job->encode = EncodeInputs();
    job->caller_faults = minor_faults() - faults;
}

void Engine::encode_all(const JobPtr& job) {
    const Plan& plan = *job->plan;
    const Layout& layout = plan.layout;
    const bool is_staged = job->staging.has_value();
    // A caller that waits for the result lets the engine send encoded runs while it encodes the
    // rest. A caller that goes on to compute encodes everything first: there is time to send later,
    // and a sending thread would take this thread's core. A device encodes by itself.
    const bool is_urgent = !is_staged && !job->is_overlapped && !job->is_held;
    const bool sends_early = is_staged || is_urgent;
    // If the caller waits, the first batch is small, so that the peers hear of this job and the
    // link has work. Other batches are large enough for every intra-op thread. A device encodes
    // whole chunks, since a chunk is sent only when all of it is in host memory. A batch keeps the
    // device busy for longer than the host needs for the launch. It is smaller if outer parameters
    // come from host memory, because the ChunkLoader holds only two batches of them on the device.
    constexpr int64_t kFirstElements = int64_t{1} << 18;
    constexpr int64_t kElementsPerThread = int64_t{1} << 20;
    constexpr int64_t kDeviceElements = int64_t{32} << 20;
    constexpr int64_t kLoadedElements = int64_t{4} << 20;
    const auto num_runs_of = [&](int64_t elements) {
        return std::max<int64_t>(1, elements / layout.run_elements);
    };
    const auto whole_chunks_of = [&](int64_t elements) {
        const int64_t runs = layout.num_runs / std::max<int64_t>(1, plan.num_chunks);
        return std::max<int64_t>(1, (num_runs_of(elements) + runs / 2) / runs) * runs;
    };
    const int64_t batch =
        is_staged ? whole_chunks_of(job->staging->loader ? kLoadedElements : kDeviceElements)
                  : num_runs_of(at::get_num_threads() * kElementsPerThread);
    const auto begin_time = Clock::now();
    bool is_submitted = job->is_held;  // a held job is submitted by ship(), not here
    try {
        if (is_staged) begin_staging(*job);
        for (int64_t run = 0; run < layout.num_runs;) {
            const bool is_first = run == 0 && is_urgent;
            const int64_t num_runs = is_first ? num_runs_of(kFirstElements) : batch;
            const int64_t end_run = std::min(layout.num_runs, run + num_runs);
            const int64_t begin = layout.run_begin(run);
            const int64_t end = layout.run_begin(end_run);
            if (begin < end) encode_range(*job, begin, end);
            job->announce(end_run, is_staged ? fetch_runs(*job, run, end_run) : nullptr);
            run = end_run;
            // Submitted after the first batch: a wrong argument makes its encoding throw before any
            // peer has a header of this job.
            if (!is_submitted && (sends_early || run == layout.num_runs)) {
                submit(job);
                is_submitted = true;
            }
            // With few cores, the sending threads get a turn between two batches.
            if (is_urgent) sched_yield();
        }
    } catch (...) {
        std::lock_guard<std::mutex> lock(job->mutex);
        job->is_encode_failed = true;
        job->changed.notify_all();
        throw;
    }
    std::lock_guard<std::mutex> lock(job->mutex);
    job->encode_seconds = seconds_since(begin_time);
}

void Engine::submit(const JobPtr& job) {
    check_process();
    std::vector<JobPtr> finished;  // freed without the lock: a tensor's deleter may want the GIL
    {
        std::lock_guard<std::mutex> lock(mutex_);
        refuse_if_dead();
        finished.swap(finished_);
        queue_.push_back(job);
    }
    changed_.notify_all();
}

void Engine::ship(const JobPtr& job, bool is_reset) {
    check_process();
    if (is_reset) {
        job->header.flags |= kReset;
        // A weight of NaN means that this rank has no weight to offer, which ends the round.
        if (!std::isnan(job->header.weight)) job->header.weight = 0.0;
    }
    {
        std::lock_guard<std::mutex> lock(mutex_);
        TORCH_CHECK(!is_closing_, "this DiLoCo is closed");
        queue_.push_back(job);
    }
    changed_.notify_all();
}

}  // namespace diloco
