// A device's queues as the engine sees them: copies to and from page-locked memory, and marks.
//
// Knows streams and events of any kind of device through c10 and links to none. The caller's
// stream encodes and steps; two streams of our own copy beside it. Nothing here waits on the host:
// who needs to know asks a mark.
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

// A point in a stream; any thread may ask whether the device has got there.
using Mark = std::shared_ptr<c10::Event>;

// A mark on a stream; a copy on a stream, without a wait of the host.
c10::Stream caller_stream(c10::Device device);
Mark mark_stream(const c10::Stream& stream);
void copy_on(const c10::Stream& stream, const at::Tensor& to, const at::Tensor& from);

class DeviceQueue {
  public:
    explicit DeviceQueue(c10::Device device);

    const c10::Device& device() const { return device_; }

    // Of the calling thread's stream, now.
    Mark mark_caller() const;

    // Makes the calling thread's stream wait.
    void block_caller(const Mark& mark) const;

    // From the calling thread: when its stream gets here, copies each second tensor (device) into
    // the first (page-locked); the mark is reached when the bytes are there.
    using Pair = std::pair<at::Tensor, at::Tensor>;
    Mark fetch(const std::vector<Pair>& pairs);

    // From the engine thread: copies page-locked bytes to the device, not before `after`; the mark
    // is reached when they are there.
    Mark store(const at::Tensor& device, const at::Tensor& host, const Mark& after);

    // From the engine thread: the last copy out of this host buffer; null when there was none.
    Mark last_store(const at::Tensor& host) const;

    // Keeps the caching allocator from giving a buffer away while our streams use it.
    void keep(const at::Tensor& device) const;

  private:
    const c10::Device device_;
    const OwnStream fetches_;
    const OwnStream stores_;
    std::unordered_map<const void*, Mark> stored_;  // by storage; engine thread only
};

}  // namespace diloco
