// Operator arguments that are not tensors: optimizers and their constants, the same on every
// device. Included by cpu.cpp and cuda.cpp alone.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <cmath>
#include <limits>

#include "codec/kernels.h"

namespace diloco {
namespace {

using at::Tensor;
using at::TensorList;

// Autograd must notice that a tensor it saved was written.
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
    // Schemas cannot say inf: a bound that fp32 cannot hold is none.
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

}  // namespace
}  // namespace diloco
