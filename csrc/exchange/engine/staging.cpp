#include "exchange/engine/staging.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include "exchange/engine/operator_calls.h"

namespace diloco {

void begin_staging(Job& job) {
    Staging& staging = *job.staging;
    staging.begin = staging.queue->mark_caller();
    const at::AutoDispatchBelowADInplaceOrView no_autograd;
    staging.bad.zero_();
    staging.queue->keep(staging.payload);
    if (staging.result.defined()) staging.queue->keep(staging.result);
}

void encode_range(Job& job, int64_t begin, int64_t end) {
    if (!job.staging || !job.staging->loader) return call_encode(job, begin, end);
    const std::vector<at::Tensor> outer{job.staging->outer};
    ChunkLoader& loader = *job.staging->loader;
    job.encode.outer = loader.load(outer, begin, end)[0];
    job.encode.outer_begin = begin;
    try {
        call_encode(job, begin, end);
    } catch (...) {
        loader.release(outer, begin, end, false);
        throw;
    }
    loader.release(outer, begin, end, false);
}

Mark fetch_runs(const Job& job, int64_t run, int64_t end_run) {
    const Staging& staging = *job.staging;
    const Layout& layout = job.plan->layout;
    std::vector<DeviceQueue::Pair> pairs;
    if (job.plan->num_phases > 0) {
        const int64_t offset = run * layout.run_bytes;
        const int64_t num_bytes = (end_run - run) * layout.run_bytes;
        pairs.emplace_back(job.payload.narrow(0, offset, num_bytes),
                           staging.payload.narrow(0, offset, num_bytes));
    }
    if (end_run == layout.num_runs) pairs.emplace_back(job.encode_bad, staging.bad);
    return staging.queue->fetch(pairs);
}

}  // namespace diloco
