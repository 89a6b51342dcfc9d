// Brings chunks of tensors that live in page-locked memory to a device and back, two at a time.
//
// While the caller's stream works on one chunk, the next one is on its way in and the one before on
// its way out, on streams of the loader. Calls come from one thread; finish() alone waits on it.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <vector>

#include "exchange/device/device_queue.h"

namespace diloco {

class ChunkLoader {
  public:
    explicit ChunkLoader(c10::Device device);

    // Elements [begin, end) of 1-D tensors of one size and dtype, for the caller's stream. What is
    // returned pretends to be the whole tensors on the device: only that range may be touched.
    // Ranges rise; a lower one, or other tensors, begin a new pass, which sees what was written.
    std::vector<at::Tensor> load(const std::vector<at::Tensor>& hosts, int64_t begin, int64_t end);

    // After the caller has enqueued its work on what load() gave; copies the range back if asked.
    void release(const std::vector<at::Tensor>& hosts, int64_t begin, int64_t end, bool is_written);

    // Waits on the host until all that was lent is read, and what was written is back.
    void finish() const;

  private:
    struct Buffers {
        std::vector<at::Tensor> tensors;
        Mark free;  // when the next load may overwrite them
    };

    void grow(const std::vector<at::Tensor>& hosts, int64_t count);

    const c10::Device device_;
    const OwnStream loads_;
    const OwnStream stores_;
    std::array<Buffers, 2> buffers_;
    size_t next_ = 0;
    Mark written_;
    const void* last_ = nullptr;  // of which tensors, and up to where, the last load was
    int64_t last_end_ = 0;
};

}  // namespace diloco
