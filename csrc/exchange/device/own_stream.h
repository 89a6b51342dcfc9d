// A stream of a device that nobody else in this process has.
//
// torch's own streams come from a pool of 32 a device, which are handed out in turn: one of them
// may be FSDP's, and copies on it would wait behind FSDP's collectives. On CUDA the driver makes an
// OwnStream. On other devices, or if the driver fails, torch does. No stream is ever destroyed,
// since the caching allocator may still have to ask the stream about memory: the next owner gets
// the stream.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

namespace diloco {

class OwnStream {
  public:
    explicit OwnStream(c10::Device device);
    ~OwnStream();
    OwnStream(const OwnStream&) = delete;
    OwnStream& operator=(const OwnStream&) = delete;

    const c10::Stream& get() const { return stream_; }

  private:
    const c10::Stream stream_;
};

}  // namespace diloco
