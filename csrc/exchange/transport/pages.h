// Buffers for messages. All their pages are touched when they are made, so that no exchange pays
// for page faults.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace diloco {

// Returns a zeroed uint8 tensor of `num_bytes`, aligned to 64 bytes, on huge pages where possible.
at::Tensor empty_pages(int64_t num_bytes);

// Minor page faults of the calling thread so far (RUSAGE_THREAD).
int64_t minor_faults();

}  // namespace diloco
