// Encoding a job whose fragment may be on a device (a staged job, see job.h). The calling thread
// enqueues the kernels and the copies to host memory, and does not wait for them.
#pragma once

#include "exchange/engine/job.h"

namespace diloco {

// Prepares the device's tensors of a staged job. Call before its first encode_range().
void begin_staging(Job& job);

// Encodes elements [begin, end) of a job, staged or not.
void encode_range(Job& job, int64_t begin, int64_t end);

// Enqueues the copy of encoded runs [run, end_run) to host memory, if there are peers to send them
// to. With the last run the count of bad elements is copied, too. Returns the mark of the copies.
Mark fetch_runs(const Job& job, int64_t run, int64_t end_run);

}  // namespace diloco
