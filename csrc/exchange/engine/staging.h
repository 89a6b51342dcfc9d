// What the calling thread enqueues on a device while it encodes a staged job; see job.h.
#pragma once

#include "exchange/engine/job.h"

namespace diloco {

// Before the first encoding.
void begin_staging(Job& job);

// Encodes elements [begin, end); a job that is not staged, too.
void encode_range(Job& job, int64_t begin, int64_t end);

// Brings encoded runs into host memory, if anybody else is to have them, and with the last ones
// the count of bad elements.
Mark fetch_runs(const Job& job, int64_t run, int64_t end_run);

}  // namespace diloco
