// Copies between a device and page-locked host memory for the engine, and marks (events) that tell
// when the copies are complete.
//
// The code uses c10's generic streams and events, and links to no device's runtime. The caller's
// stream encodes and takes outer steps; a DeviceQueue copies on two streams of its own. No function
// here blocks the host: a caller polls a mark to learn whether the device has reached it.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>

#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "exchange/device/own_stream.h"

namespace diloco {

// A point in a stream; any thread may poll whether the device has reached it.
using Mark = std::shared_ptr<c10::Event>;

// The calling thread's current stream; a mark at the present end of a stream; a copy that is
// enqueued on a stream.
c10::Stream caller_stream(c10::Device device);
Mark mark_stream(const c10::Stream& stream);
void copy_on(const c10::Stream& stream, const at::Tensor& to, const at::Tensor& from);

class DeviceQueue {
  public:
    explicit DeviceQueue(c10::Device device);

    const c10::Device& device() const { return device_; }

    // Marks the present end of the calling thread's stream.
    Mark mark_caller() const;

    // Makes the calling thread's stream wait for a mark.
    void block_caller(const Mark& mark) const;

    // From the calling thread: when its stream reaches this point, copies each second tensor
    // (device) into the first (page-locked). The mark is reached when the copies are complete.
    using Pair = std::pair<at::Tensor, at::Tensor>;
    Mark fetch(const std::vector<Pair>& pairs);

    // From the engine thread: copies page-locked bytes to the device once the device has reached
    // `after` (null: at once). The mark is reached when the copy is complete.
    Mark store(const at::Tensor& device, const at::Tensor& host, const Mark& after);

    // From the engine thread: the mark of the last copy out of this host buffer, or null.
    Mark last_store(const at::Tensor& host) const;

    // Keeps the caching allocator from giving a buffer away while the queue's streams use it.
    void keep(const at::Tensor& device) const;

  private:
    const c10::Device device_;
    const OwnStream fetches_;
    const OwnStream stores_;
    std::unordered_map<const void*, Mark> stored_;  // by storage; engine thread only
};

}  // namespace diloco
