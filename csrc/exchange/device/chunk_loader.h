// Copies chunks of tensors in page-locked memory to a device and back, with two chunks on the
// device at a time.
//
// While the caller's stream works on one chunk, the loader's own streams copy the next chunk to the
// device and the previous chunk back. All calls come from one thread; only finish() blocks it.
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

    // Copies elements [begin, end) of 1-D tensors of one size and dtype to the device, and makes
    // the caller's stream wait for them. The returned tensors hold that range until release().
    // Successive ranges rise. A lower range or other tensors begin a new pass, whose loads see
    // what earlier passes have written back.
    std::vector<at::Tensor> load(const std::vector<at::Tensor>& hosts, int64_t begin, int64_t end);

    // Call after enqueuing the work on the tensors of load(), also if enqueuing threw: some of the
    // work may be enqueued. With `is_written` the range is copied back to `hosts`.
    void release(const std::vector<at::Tensor>& hosts, int64_t begin, int64_t end, bool is_written);

    // Waits on the host until the device has read all ranges and written ranges are copied back.
    void finish() const;

  private:
    struct Buffers {
        std::vector<at::Tensor> tensors;
        Mark free;  // reached when the next load may overwrite the buffers
    };

    void grow(const std::vector<at::Tensor>& hosts, int64_t count);

    const c10::Device device_;
    const OwnStream loads_;
    const OwnStream stores_;
    std::array<Buffers, 2> buffers_;
    size_t next_ = 0;
    Mark written_;
    const void* last_ = nullptr;  // data pointer of the first tensor of the last load
    int64_t last_end_ = 0;        // end of the last load's range
};

}  // namespace diloco
