// The digest of bytes in host memory (wire/digest.h), for C++ callers without torch.
#pragma once

#include <cstdint>

#include "codec/kernels.h"
#include "wire/digest.h"

namespace diloco::codec {

using wire::finish_digest;

// Adds the bytes whose first word has index `first_word`, on the calling thread. Parts of one whole
// may be added in any order, by several threads to sums of their own; each part but the last is a
// multiple of 8 bytes long. `kernels` is the fastest implementation where it is null.
void add_digest(const uint8_t* data, uint64_t num_bytes, uint64_t first_word, DigestSums& sums,
                const Kernels* kernels = nullptr);

}  // namespace diloco::codec
