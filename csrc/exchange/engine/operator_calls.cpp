#include "exchange/engine/operator_calls.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>

#include <string>

namespace diloco {
namespace {

// Calls an operator boxed, which works for kernels registered from C++ and from Python alike.
void call(const char* name, torch::jit::Stack stack) {
    const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
    const at::AutoDispatchBelowADInplaceOrView no_autograd;
    op.callBoxed(stack);
}

c10::IValue optional_tensor(const at::Tensor& tensor) {
    return tensor.defined() ? c10::IValue(tensor) : c10::IValue();
}

}  // namespace

void call_encode(const Job& job, int64_t begin, int64_t end) {
    const Plan& plan = *job.plan;
    const at::Tensor& payload = job.staging ? job.staging->payload : job.payload;
    const at::Tensor& bad = job.staging ? job.staging->bad : job.encode_bad;
    call("diloco_comm::encode",
         {job.encode.outer, job.encode.params, payload, begin, end, plan.layout.run_elements,
          plan.layout.wire, plan.layout.block_size, (job.header.flags & 1) != 0, job.encode.rng_key,
          job.encode.residual, job.encode.new_residual, bad, job.encode.outer_begin, int64_t{0},
          plan.impl});
}

namespace {

// Averages a run whose mean has another wire than the payloads: decodes the mean to fp32 `values`,
// and encodes them on the mean's wire.
void reencode(const Job& job, const at::Tensor& received, const at::Tensor& result, int64_t length,
              const at::Tensor& values) {
    const Plan& plan = *job.plan;
    const Layout &layout = plan.layout, &mean = plan.mean_layout;
    const std::string impl = job.staging ? std::string() : plan.impl;
    c10::List<at::Tensor> payloads, mean_values;
    for (size_t rank = 0; rank < job.weights.size(); ++rank) {
        payloads.push_back(
            received.narrow(0, static_cast<int64_t>(rank) * layout.run_bytes, layout.run_bytes));
    }
    mean_values.push_back(values.narrow(0, 0, length));
    call("diloco_comm::decode",
         {payloads, c10::List<double>(job.weights), mean_values, int64_t{0}, length,
          layout.run_elements, layout.wire, layout.block_size, int64_t{0}, impl});
    call("diloco_comm::encode",
         {c10::IValue(), mean_values, result, int64_t{0}, length, mean.run_elements, mean.wire,
          mean.block_size, false, job.reduce_key, c10::IValue(), c10::IValue(), job.reduce_bad,
          int64_t{0}, int64_t{0}, impl});
}

}  // namespace

void call_reduce(const Job& job, const at::Tensor& received, const at::Tensor& result, int64_t run,
                 int64_t chunk, at::Tensor& values) {
    const Plan& plan = *job.plan;
    const int64_t length = plan.layout.run_length(run);
    if (plan.reencodes()) {
        // Kept for the next call: new pages would cost as much as the decoding.
        if (!values.defined() || values.numel() < length) values = at::empty({length}, at::kFloat);
        return reencode(job, received, result, length, values);
    }
    const auto own_part = [&](const at::Tensor& residual) {
        return residual.defined() ? residual.narrow(0, chunk * plan.layout.run_elements, length)
                                  : residual;
    };
    call("diloco_comm::reduce",
         {received, result, c10::List<double>(job.weights), length, plan.layout.run_elements,
          plan.layout.wire, plan.layout.block_size, (job.header.flags & 1) != 0, job.reduce_key,
          plan.layout.run_begin(run), optional_tensor(own_part(job.reduce_residual)),
          optional_tensor(own_part(job.new_reduce_residual)), job.reduce_bad, int64_t{0},
          // plan.impl names an implementation for the device; the reduction runs on the host.
          job.staging ? std::string() : plan.impl});
}

}  // namespace diloco
