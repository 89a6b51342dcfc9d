#include "exchange/engine/operator_calls.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>

namespace diloco {
namespace {

// Boxed, so that kernels registered from C++ and from Python look the same from here.
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
          job.encode.residual, job.encode.new_residual, bad, plan.impl});
}

void call_reduce(const Job& job, const at::Tensor& received, const at::Tensor& result, int64_t run,
                 int64_t chunk) {
    const Plan& plan = *job.plan;
    const int64_t length = plan.layout.run_length(run);
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
