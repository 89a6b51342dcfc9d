// The operators torch.ops.diloco_comm.* for all devices. Every argument is checked here, once; then
// the class `Engine` of the device runs the checked call. An error is one sentence that says what
// was given and what is expected. Only cpu.cpp and cuda.cpp include this file.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <cmath>
#include <limits>

#include "codec/codec.h"
#include "codec/kernels.h"
#include "operators/checks.h"

namespace diloco {
namespace {

using at::Tensor;
using at::TensorList;

// Raises the version of a tensor that an operator has written, so that autograd notices if it has
// saved the tensor.
void mark_written(const Tensor& tensor) {
    if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

void mark_written(TensorList tensors) {
    for (const Tensor& tensor : tensors) mark_written(tensor);
}

void set_alpha(codec::StepConstants& constants, double alpha) {
    constants.alpha = static_cast<float>(alpha);
    constants.one_minus_alpha = static_cast<float>(1.0 - alpha);
}

codec::Optimizer parse_optimizer(c10::string_view name, bool has_momentum) {
    const codec::Optimizer optimizer = name == "sgd"          ? codec::Optimizer::kSgd
                                       : name == "heavy_ball" ? codec::Optimizer::kHeavyBall
                                       : name == "nesterov"   ? codec::Optimizer::kNesterov
                                                              : codec::Optimizer::kAdam;
    TORCH_CHECK_VALUE(optimizer != codec::Optimizer::kAdam,
                      "optimizer must be sgd, heavy_ball or nesterov, got '", name, "'");
    TORCH_CHECK_VALUE(optimizer == codec::Optimizer::kSgd || has_momentum, "optimizer ", name,
                      " needs a momentum tensor, got None");
    return optimizer;
}

codec::StepConstants step_constants(c10::string_view optimizer, bool has_momentum, double lr,
                                    double mu, double alpha, double clip) {
    codec::StepConstants constants{};
    constants.optimizer = parse_optimizer(optimizer, has_momentum);
    TORCH_CHECK_VALUE(clip > 0.0, "clip must be positive, got ", clip);
    constants.lr = static_cast<float>(lr);
    constants.mu = static_cast<float>(mu);
    // Operator schemas have no literal for infinity, so a bound above fp32's range means none.
    constexpr float kLargest = std::numeric_limits<float>::max();
    constants.clip =
        clip > kLargest ? std::numeric_limits<float>::infinity() : static_cast<float>(clip);
    set_alpha(constants, alpha);
    return constants;
}

codec::StepConstants adam_constants(double lr, double beta1, double beta2, double eps, int64_t step,
                                    double alpha) {
    TORCH_CHECK_VALUE(step >= 1, "step counts from 1, got ", step);
    codec::StepConstants constants{};
    constants.optimizer = codec::Optimizer::kAdam;
    const auto exponent = static_cast<double>(step);
    constants.lr = static_cast<float>(lr / (1.0 - std::pow(beta1, exponent)));
    constants.mu = static_cast<float>(beta1);
    constants.one_minus_beta1 = static_cast<float>(1.0 - beta1);
    constants.beta2 = static_cast<float>(beta2);
    constants.one_minus_beta2 = static_cast<float>(1.0 - beta2);
    constants.sqrt_correction = static_cast<float>(std::sqrt(1.0 - std::pow(beta2, exponent)));
    constants.eps = static_cast<float>(eps);
    set_alpha(constants, alpha);
    return constants;
}

codec::StepConstants arrival_constants(bool has_pending, double lr, double mu, double direct,
                                       double ahead, double behind, bool first, bool last) {
    TORCH_CHECK_VALUE((first && last) || has_pending,
                      "an arrival that is not both first and last needs a pending tensor, got "
                      "None");
    codec::StepConstants constants{};
    constants.optimizer = last ? codec::Optimizer::kCommit : codec::Optimizer::kAccumulate;
    constants.lr = static_cast<float>(lr);
    constants.mu = static_cast<float>(mu);
    constants.direct = static_cast<float>(direct);
    constants.ahead = static_cast<float>(ahead);
    constants.behind = static_cast<float>(behind);
    constants.is_first = first;
    return constants;
}

// Checks and sets the arguments that encode and reduce have in common.
void set_target(codec::EncodeArgs& args, c10::Device device, const Tensor& payload,
                int64_t num_elements, bool stochastic, int64_t rng_key,
                const OptionalTensor& residual, const OptionalTensor& new_residual,
                const OptionalTensor& nonfinite) {
    args.payload = payload.data_ptr<uint8_t>();
    args.residual_dtype = check_residuals(device, residual, new_residual, num_elements);
    args.residual = data_or_null(residual);
    args.new_residual = data_or_null(new_residual);
    check_count(device, "nonfinite", nonfinite);
    args.is_stochastic = stochastic;
    args.key = static_cast<uint64_t>(rng_key);
}

template <class Args>
void set_terms(Args& args, const TermList& terms) {
    args.term_payloads = terms.payloads.data();
    args.coefficients = terms.coefficients.data();
    args.num_terms = terms.count;
}

// The operators for one device. Each call makes an `Engine` from `impl` and a tensor on the device
// of the call, and calls its function with checked arguments. Pointers to counts, verdicts and sums
// are in the memory of that device.
template <class Engine>
struct Operators {
    static void encode(const OptionalTensor& outer, TensorList params, const Tensor& payload,
                       int64_t begin, int64_t end, int64_t run_elements, c10::string_view wire,
                       int64_t block_size, bool stochastic, int64_t rng_key,
                       const OptionalTensor& residual, const OptionalTensor& new_residual,
                       const OptionalTensor& nonfinite, int64_t outer_begin, int64_t max_blocks,
                       c10::string_view impl) {
        Engine engine(impl, payload);
        codec::EncodeArgs args{};
        args.layout = parse_layout(wire, block_size, run_elements);
        check_max_blocks(max_blocks);
        const FragmentView view(engine.device, "params", params);
        args.params = view.get();
        const int64_t num_elements = view.num_elements();
        check_range(args.layout, begin, end, num_elements);
        check_payload(engine.device, "payload", payload, args.layout, runs_up_to(args.layout, end));
        if (outer.has_value()) {
            check_window(engine.device, args.layout, *outer, outer_begin, begin, end, num_elements);
            args.outer = outer->const_data_ptr<float>() - outer_begin;
        }
        set_target(args, engine.device, payload, num_elements, stochastic, rng_key, residual,
                   new_residual, nonfinite);
        if (begin < end) engine.encode(args, begin, end, nonfinite, max_blocks);
    }

    static void reduce(const Tensor& received, const Tensor& result, c10::ArrayRef<double> weights,
                       int64_t num_elements, int64_t run_elements, c10::string_view wire,
                       int64_t block_size, bool stochastic, int64_t rng_key, int64_t index_begin,
                       const OptionalTensor& residual, const OptionalTensor& new_residual,
                       const OptionalTensor& nonfinite, int64_t max_blocks, c10::string_view impl) {
        Engine engine(impl, received);
        codec::EncodeArgs args{};
        args.layout = parse_layout(wire, block_size, run_elements);
        check_max_blocks(max_blocks);
        const TermList& terms = check_runs(engine.device, received, result, weights, num_elements,
                                           args.layout, index_begin);
        set_terms(args, terms);
        set_target(args, engine.device, result, num_elements, stochastic, rng_key, residual,
                   new_residual, nonfinite);
        args.index_begin = static_cast<uint64_t>(index_begin);
        if (num_elements > 0) engine.reduce(args, terms, num_elements, nonfinite, max_blocks);
    }

    static void outer_step(const Tensor& outer, const OptionalTensor& momentum, TensorList params,
                           TensorList payloads, c10::ArrayRef<double> coefficients, int64_t begin,
                           int64_t end, int64_t run_elements, c10::string_view wire,
                           int64_t block_size, c10::string_view optimizer, double lr, double mu,
                           double alpha, double clip, const OptionalTensor& verdict,
                           int64_t outer_begin, c10::string_view impl) {
        Engine engine(impl, outer);
        codec::StepArgs args{};
        args.constants = step_constants(optimizer, momentum.has_value(), lr, mu, alpha, clip);
        args.layout = parse_layout(wire, block_size, run_elements);
        const bool needs_momentum = args.constants.optimizer != codec::Optimizer::kSgd;
        step(engine, args, outer, needs_momentum ? momentum : OptionalTensor(), OptionalTensor(),
             params, payloads, coefficients, begin, end, verdict, outer_begin);
    }

    static void outer_step_adam(const Tensor& outer, const Tensor& exp_avg,
                                const Tensor& exp_avg_sq, TensorList params, TensorList payloads,
                                c10::ArrayRef<double> coefficients, int64_t begin, int64_t end,
                                int64_t run_elements, c10::string_view wire, int64_t block_size,
                                double lr, double beta1, double beta2, double eps,
                                int64_t number_of_step, double alpha, const OptionalTensor& verdict,
                                int64_t outer_begin, c10::string_view impl) {
        Engine engine(impl, outer);
        codec::StepArgs args{};
        args.layout = parse_layout(wire, block_size, run_elements);
        args.constants = adam_constants(lr, beta1, beta2, eps, number_of_step, alpha);
        step(engine, args, outer, exp_avg, exp_avg_sq, params, payloads, coefficients, begin, end,
             verdict, outer_begin);
    }

    static void outer_step_delayed(const Tensor& outer, const OptionalTensor& momentum,
                                   const OptionalTensor& pending, TensorList payloads,
                                   c10::ArrayRef<double> coefficients, int64_t begin, int64_t end,
                                   int64_t run_elements, c10::string_view wire, int64_t block_size,
                                   double lr, double mu, double direct, double ahead, double behind,
                                   bool first, bool last, const OptionalTensor& verdict,
                                   int64_t outer_begin, c10::string_view impl) {
        Engine engine(impl, outer);
        codec::StepArgs args{};
        args.constants =
            arrival_constants(pending.has_value(), lr, mu, direct, ahead, behind, first, last);
        args.layout = parse_layout(wire, block_size, run_elements);
        // This operator writes no parameters, so `outer` takes their place as the fragment's only
        // tensor.
        step(engine, args, outer, last ? momentum : OptionalTensor(), pending, outer, payloads,
             coefficients, begin, end, verdict, outer_begin, "pending", window_begin(outer_begin));
    }

    static void decode(TensorList payloads, c10::ArrayRef<double> coefficients, TensorList outs,
                       int64_t begin, int64_t end, int64_t run_elements, c10::string_view wire,
                       int64_t block_size, int64_t max_blocks, c10::string_view impl) {
        TORCH_CHECK_VALUE(!payloads.empty(), "payloads must hold 1 to ", codec::kMaxTerms,
                          " tensors, got 0");
        Engine engine(impl, payloads[0]);
        codec::DecodeArgs args{};
        args.layout = parse_layout(wire, block_size, run_elements);
        check_max_blocks(max_blocks);
        const FragmentView view(engine.device, "outs", outs);
        args.outs = view.get();
        check_range(args.layout, begin, end, view.num_elements());
        const TermList& terms =
            check_terms(engine.device, payloads, coefficients, args.layout, end);
        set_terms(args, terms);
        if (begin == end) return;
        engine.decode(args, terms, begin, end, max_blocks);
        mark_written(outs);
    }

    static void merge(const Tensor& outer, TensorList params, double alpha, c10::string_view impl) {
        Engine engine(impl, outer);
        codec::MergeArgs args{};
        const FragmentView view(engine.device, "params", params);
        args.params = view.get();
        check_flat_of(engine.device, "outer", outer, view.num_elements());
        args.outer = outer.const_data_ptr<float>();
        args.alpha = static_cast<float>(alpha);
        args.one_minus_alpha = static_cast<float>(1.0 - alpha);
        if (view.num_elements() == 0) return;
        engine.merge(args);
        mark_written(params);
    }

    static void norms(const OptionalTensor& outer, TensorList params, const Tensor& out,
                      c10::string_view impl) {
        Engine engine(impl, out);
        codec::NormsArgs args{};
        const FragmentView view(engine.device, "params", params);
        args.params = view.get();
        if (outer.has_value()) {
            check_flat_of(engine.device, "outer", *outer, view.num_elements());
            args.outer = outer->const_data_ptr<float>();
        }
        check_flat(engine.device, "out", out, at::kDouble);
        TORCH_CHECK_VALUE(out.numel() == 2, "out must have two elements, got ", out.numel());
        engine.norms(args, out.data_ptr<double>());
    }

    static void digest(const Tensor& tensor, const Tensor& sums, int64_t first_word,
                       int64_t max_blocks, c10::string_view impl) {
        Engine engine(impl, tensor);
        check_max_blocks(max_blocks);
        check_digest(engine.device, tensor, sums, first_word);
        engine.digest(tensor, static_cast<uint64_t*>(sums.data_ptr()),
                      static_cast<uint64_t>(first_word), max_blocks);
    }

  private:
    static void step(Engine& engine, codec::StepArgs& args, const Tensor& outer,
                     const OptionalTensor& momentum, const OptionalTensor& second,
                     TensorList params, TensorList payloads, c10::ArrayRef<double> coefficients,
                     int64_t begin, int64_t end, const OptionalTensor& verdict, int64_t outer_begin,
                     const char* second_name = "exp_avg_sq", int64_t params_begin = 0) {
        const FragmentView view(engine.device, "params", params, params_begin);
        args.params = view.get();
        const int64_t num_elements = view.num_elements();
        check_range(args.layout, begin, end, num_elements);
        check_window(engine.device, args.layout, outer, outer_begin, begin, end, num_elements);
        const int64_t size = outer.numel();
        if (momentum.has_value()) {
            check_flat_of(engine.device, "momentum", *momentum, size, "outer");
        }
        if (second.has_value()) check_flat_of(engine.device, second_name, *second, size, "outer");
        const TermList& terms =
            check_terms(engine.device, payloads, coefficients, args.layout, end);
        set_terms(args, terms);
        check_count(engine.device, "verdict", verdict);
        args.outer = origin_or_null(outer, outer_begin);
        args.momentum = origin_or_null(momentum, outer_begin);
        args.second = origin_or_null(second, outer_begin);
        const auto* count = static_cast<const int64_t*>(data_or_null(verdict));
        if (begin < end && engine.outer_step(args, terms, begin, end, count)) mark_written(params);
    }
};

constexpr char kEncode[] = "encode";
constexpr char kReduce[] = "reduce";
constexpr char kOuterStep[] = "outer_step";
constexpr char kOuterStepAdam[] = "outer_step_adam";
constexpr char kOuterStepDelayed[] = "outer_step_delayed";
constexpr char kDecode[] = "decode";
constexpr char kMerge[] = "merge";
constexpr char kNorms[] = "norms";
constexpr char kDigest[] = "digest";

// Registers each operator as `Wrap<its name, its function>::run`.
template <class Engine, template <const char*, auto> class Wrap>
void register_operators(torch::Library& library) {
    using Own = Operators<Engine>;
    library.impl(kEncode, &Wrap<kEncode, &Own::encode>::run);
    library.impl(kReduce, &Wrap<kReduce, &Own::reduce>::run);
    library.impl(kOuterStep, &Wrap<kOuterStep, &Own::outer_step>::run);
    library.impl(kOuterStepAdam, &Wrap<kOuterStepAdam, &Own::outer_step_adam>::run);
    library.impl(kOuterStepDelayed, &Wrap<kOuterStepDelayed, &Own::outer_step_delayed>::run);
    library.impl(kDecode, &Wrap<kDecode, &Own::decode>::run);
    library.impl(kMerge, &Wrap<kMerge, &Own::merge>::run);
    library.impl(kNorms, &Wrap<kNorms, &Own::norms>::run);
    library.impl(kDigest, &Wrap<kDigest, &Own::digest>::run);
}

}  // namespace
}  // namespace diloco
