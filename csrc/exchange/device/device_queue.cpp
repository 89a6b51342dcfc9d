#include "exchange/device/device_queue.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace diloco {

c10::Stream caller_stream(c10::Device device) {
    return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

Mark mark_stream(const c10::Stream& stream) {
    auto event = std::make_shared<c10::Event>(stream.device_type());
    event->record(stream);
    return event;
}

void copy_on(const c10::Stream& stream, const at::Tensor& to, const at::Tensor& from) {
    const c10::StreamGuard guard(stream);
    const at::AutoDispatchBelowADInplaceOrView no_autograd;
    to.copy_(from, /*non_blocking=*/true);
}

DeviceQueue::DeviceQueue(c10::Device device) : device_(device), fetches_(device), stores_(device) {}

Mark DeviceQueue::mark_caller() const { return mark_stream(caller_stream(device_)); }

void DeviceQueue::block_caller(const Mark& mark) const { mark->block(caller_stream(device_)); }

Mark DeviceQueue::fetch(const std::vector<Pair>& pairs) {
    mark_caller()->block(fetches_.get());
    for (const auto& [host, device] : pairs) copy_on(fetches_.get(), host, device);
    return mark_stream(fetches_.get());
}

Mark DeviceQueue::store(const at::Tensor& device, const at::Tensor& host, const Mark& after) {
    if (after) after->block(stores_.get());
    copy_on(stores_.get(), device, host);
    Mark done = mark_stream(stores_.get());
    stored_[host.storage().data()] = done;
    return done;
}

Mark DeviceQueue::last_store(const at::Tensor& host) const {
    const auto found = stored_.find(host.storage().data());
    return found == stored_.end() ? nullptr : found->second;
}

void DeviceQueue::keep(const at::Tensor& device) const {
    const c10::impl::VirtualGuardImpl impl(device_.type());
    impl.recordDataPtrOnStream(device.storage().data_ptr(), fetches_.get());
    impl.recordDataPtrOnStream(device.storage().data_ptr(), stores_.get());
}

}  // namespace diloco
