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

    // Brings elements [begin, end) of 1-D tensors of one size and dtype for the caller's stream.
    // The tensors returned hold that range alone, until release(). Ranges rise; a lower range, or
    // other tensors, begin a new pass, which sees earlier writes.
    std::vector<at::Tensor> load(const std::vector<at::Tensor>& hosts, int64_t begin, int64_t end);

    // Call after enqueuing the work on the tensors of load(), also if that failed: some of the work
    // may be enqueued. Copies the range back if written.
    void release(const std::vector<at::Tensor>& hosts, int64_t begin, int64_t end, bool is_written);

    // Waits on the host until the device has read all ranges and written ranges are copied back.
    void finish() const;

  private:
    struct Buffers {
        std::vector<at::Tensor> tensors;
        Mark free;  // when the next load may overwrite the buffers
    };

    void grow(const std::vector<at::Tensor>& hosts, int64_t count);

    const c10::Device device_;
    const OwnStream loads_;
    const OwnStream stores_;
    std::array<Buffers, 2> buffers_;
    size_t next_ = 0;
    Mark written_;
    const void* last_ = nullptr;  // the first tensor of the last load, and its end
    int64_t last_end_ = 0;
};

}  // namespace diloco
