#include "exchange/device/own_stream.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/Event.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>
#include <dlfcn.h>

#include <map>
#include <mutex>
#include <optional>
#include <vector>

namespace diloco {
namespace {

// CUDA's lowest priority, which torch's default stream has, too: no stream can give way to the
// training on the default stream.
constexpr int kLeastPriority = 0;

// The type of the driver's cuStreamCreateWithPriority.
using CreateStream = int (*)(void** stream, unsigned flags, int priority);

CreateStream find_in_driver() {
    void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    if (driver == nullptr) return nullptr;
    return reinterpret_cast<CreateStream>(dlsym(driver, "cuStreamCreateWithPriority"));
}

std::optional<c10::Stream> create_in_driver(c10::Device device) {
    if (device.type() != c10::DeviceType::CUDA) return std::nullopt;
    static const CreateStream create = find_in_driver();
    if (create == nullptr) return std::nullopt;
    const c10::DeviceGuard guard(device);
    // The driver needs the device's context to be current on this thread; recording an event makes
    // the context current.
    c10::Event event(device.type());
    event.record(c10::impl::VirtualGuardImpl(device.type()).getStream(device));
    // The new stream and the default stream do not wait for each other.
    constexpr unsigned kNonBlocking = 1;
    void* stream = nullptr;
    const int status = create(&stream, kNonBlocking, kLeastPriority);
    if (status != 0) {
        TORCH_WARN_ONCE("cuStreamCreateWithPriority failed with status ", status,
                        ": copies run on streams of torch's pool");
        return std::nullopt;
    }
    // The id of a stream that torch did not make is the stream's address.
    return c10::Stream(c10::Stream::UNSAFE, device, reinterpret_cast<c10::StreamId>(stream));
}

struct FreeStreams {
    std::mutex mutex;
    std::map<c10::DeviceIndex, std::vector<c10::Stream>> of_device;
};

// Streams that an OwnStream has returned, by device index: a process uses one device type only. The
// pool is never destroyed, since static objects that own streams may outlive it.
FreeStreams& free_streams() {
    static auto* all = new FreeStreams;
    return *all;
}

c10::Stream take(c10::Device device) {
    const c10::impl::VirtualGuardImpl impl(device.type());
    if (!device.has_index()) device = impl.getDevice();
    FreeStreams& all = free_streams();
    {
        std::lock_guard<std::mutex> lock(all.mutex);
        auto& streams = all.of_device[device.index()];
        if (!streams.empty()) {
            const c10::Stream stream = streams.back();
            streams.pop_back();
            return stream;
        }
    }
    if (const auto stream = create_in_driver(device)) return *stream;
    return impl.getNewStream(device, kLeastPriority);
}

}  // namespace

OwnStream::OwnStream(c10::Device device) : stream_(take(device)) {}

OwnStream::~OwnStream() {
    FreeStreams& all = free_streams();
    std::lock_guard<std::mutex> lock(all.mutex);
    all.of_device[stream_.device_index()].push_back(stream_);
}

}  // namespace diloco
