// Buffers for messages that cost no page fault after they are made.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace diloco {

// A zeroed uint8 tensor of `num_bytes`, 64-byte aligned, huge pages advised, every page touched.
at::Tensor empty_pages(int64_t num_bytes);

// Minor page faults of the calling thread so far (RUSAGE_THREAD).
int64_t minor_faults();

}  // namespace diloco
