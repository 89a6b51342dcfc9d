// The operators that the engine calls through torch's dispatcher, which chooses the implementation
// registered for the tensors' device. The exchange includes nothing of csrc/operators.
#pragma once

#include "exchange/engine/job.h"

namespace diloco {

// Encodes elements [begin, end) of the job's fragment into its payload.
void call_encode(const Job& job, int64_t begin, int64_t end);

// Decodes all ranks' copies of one run from `received`, averages them, and encodes the mean into
// `result`. If the mean has another wire, it is first written to `values` as fp32; the buffer is
// allocated when needed, and kept for the next call.
void call_reduce(const Job& job, const at::Tensor& received, const at::Tensor& result, int64_t run,
                 int64_t chunk, at::Tensor& values);

}  // namespace diloco
