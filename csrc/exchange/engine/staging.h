// What the calling thread enqueues on a device while it encodes a staged job; see job.h.
#pragma once

#include "exchange/engine/job.h"

namespace diloco {

// Call before the first encoding.
void begin_staging(Job& job);

// Encodes elements [begin, end) of a job, staged or not.
void encode_range(Job& job, int64_t begin, int64_t end);

// Brings encoded runs into host memory if peers are to have them, and with the last runs the count
// of bad elements.
Mark fetch_runs(const Job& job, int64_t run, int64_t end_run);

}  // namespace diloco
