// A device for tests that lags behind the host, as a GPU does: streams are threads that run what is
// enqueued on them later, in order, after random pauses. Registered as PrivateUse1, so that the
// engine's own streams, events and copies run on it through the same interfaces as on CUDA.
//
// What a GPU forgives by luck fails here. Memory that is freed is overwritten in the order of the
// stream that allocated it. Tensors of the host cannot stand in for those of the device, and a
// tensor's elements lie in memory that the device's allocator has given out. Whatever
// makes the host wait is written down: torch.ops.lagging.host_waits() lists it; tasks() lists what
// was enqueued, where, and after what; set_devices() lists the devices that threads changed to.
#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_copy_from.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include "lagging_memory.h"
#include "lagging_streams.h"

namespace lagging {
namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

DeviceAllocator device_allocator;
REGISTER_ALLOCATOR(kType, &device_allocator);

// --------------------------------------------------------------------------------------- guards

// On a GPU whatever sets a device makes a context there, unless it is the thread's device already.
void set_device(DeviceIndex to) noexcept {
    if (current_device == to) return;
    current_device = to;
    note_device(to);
}

// Events are used on their stream's device; afterwards the thread's device is what it was.
class OnDevice {
  public:
    explicit OnDevice(DeviceIndex device) { set_device(device); }
    ~OnDevice() { set_device(before_); }
    OnDevice(const OnDevice&) = delete;
    OnDevice& operator=(const OnDevice&) = delete;

  private:
    const DeviceIndex before_ = static_cast<DeviceIndex>(current_device);
};

struct GuardImpl final : c10::impl::DeviceGuardImplInterface {
    static constexpr c10::DeviceType static_type = kType;
    c10::DeviceType type() const override { return kType; }
    Device exchangeDevice(Device to) const override {
        const Device before = getDevice();
        setDevice(to);
        return before;
    }
    Device getDevice() const override { return Device(kType, current_device); }
    void setDevice(Device to) const override {
        if (to.has_index()) set_device(to.index());
    }
    // With this a guard ends. No context is made.
    void uncheckedSetDevice(Device to) const noexcept override {
        if (to.has_index()) current_device = to.index();
    }
    DeviceIndex deviceCount() const noexcept override { return kNumDevices; }
    Stream getStream(Device of) const override { return stream(of, current[of.index()]); }
    Stream getDefaultStream(Device of) const override { return stream(of, of.index()); }
    Stream getStreamFromGlobalPool(Device of, bool) const override { return fresh(of); }
    Stream getNewStream(Device of, int) const override { return fresh(of); }
    Stream exchangeStream(Stream to) const override {
        return stream(to.device(), std::exchange(current[to.device_index()], to.id()));
    }
    void destroyEvent(void* event, const DeviceIndex device) const noexcept override {
        const OnDevice there(device);
        delete static_cast<PointPtr*>(event);
    }
    void record(void** event, const Stream& on, const DeviceIndex,
                const c10::EventFlag) const override {
        const OnDevice there(on.device_index());
        if (*event == nullptr) *event = new PointPtr(std::make_shared<Point>());
        record_point(*static_cast<PointPtr*>(*event), on.id());
    }
    void block(void* event, const Stream& on) const override {
        if (event == nullptr) return;
        const OnDevice there(on.device_index());
        const PointPtr point = *static_cast<PointPtr*>(event);
        uint64_t version = 0;
        {
            std::lock_guard<std::mutex> lock(point->mutex);
            version = point->recorded;
        }
        lane(on.id()).enqueue("wait " + name_of(*point, version),
                              [point, version] { wait_for(point, version); });
    }
    bool queryEvent(void* event) const override {
        if (event == nullptr) return true;
        const PointPtr point = *static_cast<PointPtr*>(event);
        std::lock_guard<std::mutex> lock(point->mutex);
        return point->reached == point->recorded;
    }
    double elapsedTime(void* first, void* last, const DeviceIndex) const override {
        const auto time_of = [](void* event) {
            const PointPtr point = *static_cast<PointPtr*>(event);
            std::lock_guard<std::mutex> lock(point->mutex);
            TORCH_CHECK(point->reached == point->recorded, "an event was not reached yet");
            return point->at;
        };
        return std::chrono::duration<double, std::milli>(time_of(last) - time_of(first)).count();
    }
    void synchronizeEvent(void* event) const override {
        if (event == nullptr) return;
        note_wait("synchronizeEvent");
        const PointPtr point = *static_cast<PointPtr*>(event);
        wait_for(point, point->recorded);
    }
    bool queryStream(const Stream& one) const override { return lane(one.id()).is_idle(); }
    void synchronizeStream(const Stream& one) const override {
        note_wait("synchronizeStream");
        lane(one.id()).synchronize();
    }
    void synchronizeDevice(const DeviceIndex) const override {
        note_wait("synchronizeDevice");
        synchronize_all();
    }
    void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& by) const override {
        if (data.get_context() == nullptr) return;
        static_cast<Block*>(data.get_context())->users.insert(by.id());
    }

  private:
    static Stream stream(Device of, StreamId id) { return Stream(Stream::UNSAFE, of, id); }
    static Stream fresh(Device of) {
        std::lock_guard<std::mutex> lock(lanes().mutex);
        return stream(of, lanes().next++);
    }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, GuardImpl);

struct Hooks final : at::PrivateUse1HooksInterface {
    bool isBuilt() const override { return true; }
    bool isAvailable() const override { return true; }
    bool hasPrimaryContext(DeviceIndex) const override { return true; }
    DeviceIndex deviceCount() const override { return kNumDevices; }
    void setCurrentDevice(DeviceIndex to) const override { current_device = to; }
    DeviceIndex getCurrentDevice() const override {
        return static_cast<DeviceIndex>(current_device);
    }
    DeviceIndex exchangeDevice(DeviceIndex to) const override {
        return static_cast<DeviceIndex>(std::exchange(current_device, to));
    }
    DeviceIndex maybeExchangeDevice(DeviceIndex to) const override { return exchangeDevice(to); }
    bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
    c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
};

const bool are_hooks_registered = [] {
    at::RegisterPrivateUse1HooksInterface(new Hooks);
    return true;
}();

// ------------------------------------------------------------------------------------ operators

bool is_here(const at::Tensor& tensor) {
    return tensor.defined() && tensor.device().type() == kType;
}

// The stream that work on a tensor goes to: the current one of its device.
Lane& lane_of(const at::Tensor& tensor) { return lane(current[tensor.device().index()]); }

// The device's memory as the stream's thread sees it. It does not keep the memory.
at::Tensor on_host(const at::Tensor& tensor) {
    TORCH_CHECK(is_here(tensor), "a tensor in host memory where one of the device is needed");
    const void* data = tensor.unsafeGetTensorImpl()->data();
    const size_t num_bytes = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(),
                                                              tensor.dtype().itemsize());
    TORCH_CHECK(tensor.numel() == 0 || device_blocks().have(data, num_bytes), "a tensor of ",
                tensor.sizes(), " lies outside of the memory that was allocated");
    return at::from_blob(const_cast<void*>(data), tensor.sizes(), tensor.strides(),
                         tensor.options().device(at::kCPU).pinned_memory(false));
}

at::Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype,
                 std::optional<c10::Layout>, std::optional<Device> device, std::optional<bool>,
                 std::optional<c10::MemoryFormat> format) {
    const c10::OptionalDeviceGuard guard(device);
    return at::detail::empty_generic(size, &device_allocator,
                                     c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                     c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride,
                         std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                         std::optional<Device> device, std::optional<bool>) {
    const c10::OptionalDeviceGuard guard(device);
    return at::detail::empty_strided_generic(size, stride, &device_allocator,
                                             c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                             c10::dtype_or_default(dtype));
}

at::Tensor as_strided(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                      std::optional<c10::SymInt> offset) {
    return at::cpu::as_strided_symint(self, size, stride, offset);
}

at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) {
    return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size));
}

void record_stream(at::Tensor& self, Stream by) {
    GuardImpl().recordDataPtrOnStream(self.storage().data_ptr(), by);
}

at::Tensor& set_storage(at::Tensor& self, at::Storage storage, c10::SymInt offset,
                        c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
    return at::cpu::set__symint(self, storage, offset, size, stride);
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
    const bool is_within = is_here(from) && is_here(to);
    const at::Tensor& outside = is_here(from) ? to : from;
    const bool is_async = is_within || (non_blocking && is_pinned(outside.const_data_ptr()));
    // What is outside is kept until the copy is done, as the caching host allocator does.
    const at::Tensor source = is_here(from) ? on_host(from) : from.detach();
    const at::Tensor target = is_here(to) ? on_host(to) : to.detach();
    const char* name = is_within ? "copy" : is_here(to) ? "copy in" : "copy out";
    Lane& here = lane_of(is_here(from) ? from : to);
    here.enqueue(name, [source, target] {
        const at::NoGradGuard no_grad;
        target.copy_(source.expand_as(target));
    });
    if (!is_async) {
        note_wait(std::string(name) + (non_blocking ? " of pageable memory" : ""));
        here.synchronize();
    }
    return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
    if (to.sizes() != from.sizes()) {
        const at::Tensor fresh = at::empty(from.sizes(), to.options());
        const at::Tensor& grown = to.set_(fresh.storage(), 0, fresh.sizes(), fresh.strides());
        return copy_from(from, grown, false);
    }
    return copy_from(from, to, false);
}

void fall_back(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
    note_wait(op.schema().name());
    for (const StreamId stream : current) lane(stream).synchronize();
    at::native::cpu_fallback(op, stack);
}

// In place and without a result: enqueued, not waited for.
template <class Task>
void enqueue_in_place(const char* name, const at::Tensor& self, Task task) {
    const at::Tensor there = on_host(self);
    lane_of(self).enqueue(name, [there, task] {
        const at::NoGradGuard no_grad;
        task(there);
    });
}

at::Tensor& zero_(at::Tensor& self) {
    enqueue_in_place("zero_", self, [](const at::Tensor& one) { one.zero_(); });
    return self;
}

at::Tensor& fill_(at::Tensor& self, const at::Scalar& value) {
    enqueue_in_place("fill_", self, [value](const at::Tensor& one) { one.fill_(value); });
    return self;
}

// A number that the host gave is taken along.
at::Tensor operand(const at::Tensor& other) {
    if (is_here(other)) return on_host(other);
    TORCH_CHECK(other.dim() == 0, "both tensors must be on the device");
    return other.clone();
}

at::Tensor& mul_(at::Tensor& self, const at::Tensor& other) {
    const at::Tensor factor = operand(other);
    enqueue_in_place("mul_", self, [factor](const at::Tensor& one) { one.mul_(factor); });
    return self;
}

at::Tensor& add_(at::Tensor& self, const at::Tensor& other, const at::Scalar& alpha) {
    const at::Tensor added = operand(other);
    enqueue_in_place("add_", self,
                     [added, alpha](const at::Tensor& one) { one.add_(added, alpha); });
    return self;
}

at::Tensor& ne_out(const at::Tensor& self, const at::Scalar& other, at::Tensor& out) {
    const at::Tensor source = on_host(self);
    enqueue_in_place("ne", out,
                     [source, other](const at::Tensor& one) { one.copy_(source.ne(other)); });
    return out;
}

at::Tensor& sum_out(const at::Tensor& self, at::OptionalIntArrayRef dims, bool keep,
                    std::optional<at::ScalarType>, at::Tensor& out) {
    const at::Tensor source = on_host(self);
    enqueue_in_place("sum", out,
                     [source](const at::Tensor& one) { one.copy_(source.sum().view_as(one)); });
    return out;
}

at::Tensor cat(const at::ITensorListRef& tensors, int64_t dim) {
    std::vector<at::Tensor> sources;
    int64_t size = 0;
    for (const at::Tensor& one : tensors) {
        TORCH_CHECK(is_here(one) && one.dim() == 1 && dim == 0, "1-D tensors of the device alone");
        sources.push_back(on_host(one));
        size += one.numel();
    }
    at::Tensor out = at::empty({size}, tensors.front().options());
    enqueue_in_place("cat", out, [sources](at::Tensor one) { at::cat_out(one, sources); });
    return out;
}

// diloco_comm's own: enqueued, and run later by the CPU's implementation, or by Triton's in the
// interpreter.
c10::IValue for_the_host(const c10::IValue& value) {
    if (value.isTensor()) {
        const at::Tensor& tensor = value.toTensor();
        if (!tensor.defined()) return value;
        TORCH_CHECK(is_here(tensor), "a tensor in host memory was given among the device's");
        return on_host(tensor);
    }
    if (value.isTensorList()) {
        c10::List<at::Tensor> list;
        for (const at::Tensor& tensor : value.toTensorVector()) {
            TORCH_CHECK(is_here(tensor), "a tensor in host memory was given among the device's");
            list.push_back(on_host(tensor));
        }
        return list;
    }
    return value;
}

// The operator of that name; the one of Triton where the last argument asks for it, as on a GPU.
c10::OperatorHandle asked_for(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
    const std::string name = op.schema().name();
    if (stack.back().toStringRef() != "triton") return op;
    const std::string triton = "diloco_comm_triton" + name.substr(name.find("::"));
    return c10::Dispatcher::singleton().findSchemaOrThrow(triton.c_str(), "");
}

void enqueue_operator(const c10::OperatorHandle& given_op, torch::jit::Stack* stack) {
    const c10::OperatorHandle op = asked_for(given_op, *stack);
    const size_t count = op.schema().arguments().size();
    torch::jit::Stack arguments;
    Lane* here = nullptr;
    for (size_t i = 0; i < count; ++i) {
        const c10::IValue& given = torch::jit::peek(*stack, i, count);
        if (given.isTensor() && is_here(given.toTensor())) here = &lane_of(given.toTensor());
        if (given.isTensorList() && !given.toTensorVector().empty()) {
            here = &lane_of(given.toTensorVector()[0]);
        }
        arguments.push_back(for_the_host(given));
    }
    TORCH_CHECK(here != nullptr, op.schema().name(), ": no tensor of the device was given");
    torch::jit::drop(*stack, count);
    here->enqueue(op.schema().name(), [op, arguments] {
        const at::NoGradGuard no_grad;
        torch::jit::Stack copy = arguments;
        op.callBoxed(copy);
    });
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
    m.impl("empty.memory_format", &empty);
    m.impl("empty_strided", &empty_strided);
    m.impl("as_strided", &as_strided);
    m.impl("view", &view);
    m.impl("record_stream", &record_stream);
    m.impl("set_.source_Storage_storage_offset", &set_storage);
    m.impl("_copy_from", &copy_from);
    m.impl("_copy_from_and_resize", &copy_from_and_resize);
    m.impl("zero_", &zero_);
    m.impl("fill_.Scalar", &fill_);
    m.impl("mul_.Tensor", &mul_);
    m.impl("add_.Tensor", &add_);
    m.impl("ne.Scalar_out", &ne_out);
    m.impl("sum.IntList_out", &sum_out);
    m.impl("cat", &cat);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
    m.fallback(torch::CppFunction::makeFromBoxedFunction<&fall_back>());
}

void serve(torch::Library& library) {
    for (const char* name : {"encode", "reduce", "outer_step", "outer_step_adam",
                             "outer_step_delayed", "decode", "merge", "norms", "digest"}) {
        library.impl(name, torch::CppFunction::makeFromBoxedFunction<&enqueue_operator>());
    }
}

TORCH_LIBRARY_IMPL(diloco_comm, PrivateUse1, m) { serve(m); }
TORCH_LIBRARY_IMPL(diloco_comm_triton, PrivateUse1, m) { serve(m); }

// -------------------------------------------------------------------------------- for the tests

std::vector<std::string> take(std::vector<std::string> Record::* list) {
    std::lock_guard<std::mutex> lock(record().mutex);
    return std::exchange(record().*list, {});
}

// Calls a C function, given by address, when the stream gets there.
void host_function(int64_t address) {
    lane(current[current_device]).enqueue("host function", [address] {
        reinterpret_cast<void (*)()>(address)();
    });
}

}  // namespace
}  // namespace lagging

TORCH_LIBRARY(lagging, m) {
    using namespace lagging;
    m.def("set_lag(int us) -> ()", [](int64_t us) { lag_us = us; });
    m.def("host_waits() -> str[]", [] { return take(&Record::waits); });
    m.def("tasks() -> str[]", [] { return take(&Record::tasks); });
    m.def("set_devices() -> str[]", [] { return take(&Record::devices); });
    m.def("num_allocations() -> int", [] { return num_allocations.load(); });
    m.def("synchronize() -> ()", [] { synchronize_all(); });
    m.def("host_function(int address) -> ()", &host_function);
    m.def("on_host(Tensor tensor) -> Tensor", &on_host);
}
