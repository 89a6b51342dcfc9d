// The digest of bytes in host memory (wire/digest.h), for C++ callers without torch.
#pragma once

#include <cstdint>

#include "codec/kernels.h"
#include "wire/digest.h"

namespace diloco::codec {

using wire::finish_digest;

// Adds a part of the digested bytes to `sums`; its first 64-bit word has index `first_word` among
// all words. Parts may be added in any order, and by several threads to sums of their own. Every
// part but the last must be a multiple of 8 bytes long. If `kernels` is null, the fastest
// implementation runs.
void add_digest(const uint8_t* data, uint64_t num_bytes, uint64_t first_word, DigestSums& sums,
                const Kernels* kernels = nullptr);

}  // namespace diloco::codec
