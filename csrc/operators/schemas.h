// The schemas of torch.ops.diloco_comm.* for all devices. diloco_comm/ops has functions of the same
// names. Only cpu.cpp includes this file, and in tests cuda.cpp with emulated kernels.
#pragma once

namespace diloco {
namespace {

constexpr const char* kSchemas[] = {
    "encode(Tensor? outer, Tensor[] params, Tensor(a!) payload, int begin, int end, int "
    "run_elements, str wire, int block_size, bool stochastic=False, int rng_key=0, Tensor? "
    "residual=None, Tensor(b!)? new_residual=None, Tensor(c!)? nonfinite=None, int "
    "outer_begin=0, int max_blocks=0, str impl='') -> ()",
    "reduce(Tensor received, Tensor(a!) result, float[] weights, int num_elements, int "
    "run_elements, str wire, int block_size, bool stochastic=False, int rng_key=0, int "
    "index_begin=0, Tensor? residual=None, Tensor(b!)? new_residual=None, Tensor(c!)? "
    "nonfinite=None, int max_blocks=0, str impl='') -> ()",
    "outer_step(Tensor(a!) outer, Tensor(b!)? momentum, Tensor(c!)[] params, Tensor[] "
    "payloads, float[] coefficients, int begin, int end, int run_elements, str wire, int "
    "block_size, str optimizer, float lr, float mu=0., float alpha=0., float clip=1e308, "
    "Tensor? verdict=None, int outer_begin=0, str impl='') -> ()",
    "outer_step_adam(Tensor(a!) outer, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq, "
    "Tensor(d!)[] params, Tensor[] payloads, float[] coefficients, int begin, int end, int "
    "run_elements, str wire, int block_size, float lr, float beta1, float beta2, float eps, "
    "int step, float alpha=0., Tensor? verdict=None, int outer_begin=0, str impl='') -> ()",
    "outer_step_delayed(Tensor(a!) outer, Tensor(b!)? momentum, Tensor(c!)? pending, Tensor[] "
    "payloads, float[] coefficients, int begin, int end, int run_elements, str wire, int "
    "block_size, float lr, float mu=0., float direct=1., float ahead=0., float behind=0., bool "
    "first=False, bool last=False, Tensor? verdict=None, int outer_begin=0, str impl='') -> ()",
    "decode(Tensor[] payloads, float[] coefficients, Tensor(a!)[] outs, int begin, int end, "
    "int run_elements, str wire, int block_size, int max_blocks=0, str impl='') -> ()",
    "merge(Tensor outer, Tensor(a!)[] params, float alpha=0., str impl='') -> ()",
    "norms(Tensor? outer, Tensor[] params, Tensor(a!) out, str impl='') -> ()",
    "digest(Tensor tensor, Tensor(a!) sums, int first_word=0, int max_blocks=0, str impl='') -> ()",
};

// The operators that run on CPU tensors alone.
constexpr const char* kCpuSchemas[] = {
    "gram(Tensor[] payloads, Tensor(a!) out, int begin, int end, int num_elements, int "
    "run_elements, str wire, int block_size, int first_row=0, str impl='') -> ()",
};

}  // namespace
}  // namespace diloco
