// Argument checks of the operators. Each tensor and number is checked once, and an error is one
// sentence that says what was given and what is expected. Only cpu.cpp and cuda.cpp include this
// file. `device` is the device on which an operator's tensors must be.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <vector>

#include "codec/codec.h"

namespace diloco {
namespace {

using at::Tensor;
using at::TensorList;
using codec::DType;
using wire::Format;
using OptionalTensor = std::optional<Tensor>;

// The most elements of a fragment: more than any memory holds, and so few that their bytes and bits
// do not overflow an int64.
constexpr int64_t kMaxElements = int64_t{1} << 48;

Format parse_format(c10::string_view name) {
    constexpr std::array<const char*, wire::kNumFormats> kNames{
        "fp32",  "bf16", "fp16", "fp8_e4m3", "fp8_e5m2", "int8",   "int4",   "e3m0",    "int2r",
        "int1r", "sub2", "sub4", "sub8",     "sub16",    "topk32", "topk64", "topk128", "topk256"};
    std::string known;
    for (int i = 0; i < wire::kNumFormats; ++i) {
        if (name == kNames[i]) return static_cast<Format>(i);
        known += std::string(i == 0 ? "" : ", ") + kNames[i];
    }
    TORCH_CHECK_VALUE(false, "wire must be one of ", known, ", got '", name, "'");
}

codec::RunLayout parse_layout(c10::string_view name, int64_t block_size, int64_t run_elements) {
    const Format format = parse_format(name);
    if (wire::has_element_codes(format)) {
        TORCH_CHECK_VALUE(block_size >= wire::kMinBlockSize && block_size <= wire::kMaxBlockSize &&
                              (block_size & (block_size - 1)) == 0,
                          "block_size must be one of 32, 64, 128, 256, 512, 1024, got ",
                          block_size);
    } else {
        TORCH_CHECK_VALUE(block_size == wire::own_block(format), "wire ", name, " has blocks of ",
                          wire::own_block(format), ", got block_size=", block_size);
    }
    TORCH_CHECK_VALUE(run_elements > 0 && run_elements % block_size == 0,
                      "run_elements must be a positive multiple of block_size ", block_size,
                      ", got ", run_elements);
    TORCH_CHECK_VALUE(run_elements <= kMaxElements, "run_elements must be at most 2^48, got ",
                      run_elements);
    return {format, static_cast<int>(block_size), run_elements};
}

DType parse_dtype(const char* name, const Tensor& tensor) {
    switch (tensor.scalar_type()) {
        case at::kFloat:
            return DType::kFp32;
        case at::kBFloat16:
            return DType::kBf16;
        case at::kHalf:
            return DType::kFp16;
        default:
            TORCH_CHECK_TYPE(false, name, " must be float32, bfloat16 or float16, got ",
                             tensor.scalar_type());
    }
}

void check_device(c10::Device device, const char* name, const Tensor& tensor) {
    TORCH_CHECK_VALUE(tensor.device() == device, name, " must be on ", device,
                      " like the others, got ", tensor.device());
}

void check_flat(c10::Device device, const char* name, const Tensor& tensor, at::ScalarType dtype) {
    check_device(device, name, tensor);
    TORCH_CHECK_TYPE(tensor.scalar_type() == dtype, name, " must be ", dtype, ", got ",
                     tensor.scalar_type());
    TORCH_CHECK_VALUE(tensor.dim() == 1 && tensor.is_contiguous(), name,
                      " must be one-dimensional and contiguous, got shape ", tensor.sizes(),
                      " strides ", tensor.strides());
}

void check_flat_of(c10::Device device, const char* name, const Tensor& tensor, int64_t num_elements,
                   const char* whole = "the fragment") {
    check_flat(device, name, tensor, at::kFloat);
    TORCH_CHECK_VALUE(tensor.numel() == num_elements, name, " must have ", num_elements,
                      " elements like ", whole, ", got ", tensor.numel());
}

// The pointers to a fragment's tensors. Each thread reuses one list for them, so that later calls
// allocate nothing.
class FragmentView {
  public:
    // `begin` is the index in the fragment of the first tensor's first element.
    FragmentView(c10::Device device, const char* name, TensorList tensors, int64_t begin = 0)
        : storage_(thread_storage()) {
        storage_.clear();
        for (const Tensor& tensor : tensors) {
            check_device(device, name, tensor);
            const DType dtype = parse_dtype(name, tensor);
            TORCH_CHECK_VALUE(tensor.is_contiguous() || tensor.is_non_overlapping_and_dense(), name,
                              " must fill their memory without gaps, got shape ", tensor.sizes(),
                              " with strides ", tensor.strides());
            storage_.push_back({tensor.data_ptr(), dtype, begin, tensor.numel()});
            begin += tensor.numel();
        }
        fragment_ = {storage_.data(), static_cast<int64_t>(storage_.size()), begin};
    }
    const codec::Fragment& get() const { return fragment_; }
    int64_t num_elements() const { return fragment_.num_elements; }

  private:
    static std::vector<codec::Segment>& thread_storage() {
        static thread_local std::vector<codec::Segment> storage;
        return storage;
    }
    std::vector<codec::Segment>& storage_;
    codec::Fragment fragment_;
};

void check_range(const codec::RunLayout& layout, int64_t begin, int64_t end, int64_t num_elements) {
    TORCH_CHECK_VALUE(0 <= begin && begin <= end && end <= num_elements, "[begin, end) = [", begin,
                      ", ", end, ") must lie in the fragment's [0, ", num_elements, ")");
    TORCH_CHECK_VALUE(
        begin % layout.run_elements == 0 && (end % layout.run_elements == 0 || end == num_elements),
        "[begin, end) = [", begin, ", ", end, ") must be whole runs of ", layout.run_elements,
        " elements, or end at the fragment's ", num_elements);
}

// `outer_begin`, limited to valid indices. check_window() reports later if it was not valid.
int64_t window_begin(int64_t outer_begin) {
    return std::clamp<int64_t>(outer_begin, 0, kMaxElements);
}

// Checks that `outer`, which has the fragment's elements from outer_begin on, contains [begin,
// end).
void check_window(c10::Device device, const codec::RunLayout& layout, const Tensor& outer,
                  int64_t outer_begin, int64_t begin, int64_t end, int64_t num_elements) {
    check_flat(device, "outer", outer, at::kFloat);
    const bool is_inside =
        0 <= outer_begin && outer_begin <= begin && outer_begin % layout.run_elements == 0 &&
        end - outer_begin <= outer.numel() && outer.numel() <= num_elements - outer_begin;
    const bool is_whole = outer_begin == 0 && begin == 0 && end == num_elements;
    TORCH_CHECK_VALUE(is_inside || !is_whole, "outer must have ", num_elements,
                      " elements like the fragment, got ", outer.numel());
    TORCH_CHECK_VALUE(is_inside, "outer of ", outer.numel(),
                      " elements from outer_begin=", outer_begin, " must hold [begin, end) = [",
                      begin, ", ", end, ") of the fragment's ", num_elements,
                      " elements, from a multiple of ", layout.run_elements);
}

int64_t run_bytes(const codec::RunLayout& layout) {
    return wire::run_bytes(layout.format, layout.run_elements, layout.block_size);
}

void check_payload(c10::Device device, const char* name, const Tensor& payload,
                   const codec::RunLayout& layout, int64_t num_runs) {
    check_flat(device, name, payload, at::kByte);
    const int64_t bytes = run_bytes(layout);
    TORCH_CHECK_VALUE(payload.numel() % bytes == 0 && payload.numel() / bytes >= num_runs, name,
                      " must hold at least ", num_runs, " whole runs of ", bytes, " bytes, got ",
                      payload.numel(), " bytes");
}

int64_t runs_up_to(const codec::RunLayout& layout, int64_t end) {
    return (end + layout.run_elements - 1) / layout.run_elements;
}

// Pointers to payloads, and their coefficients in fp32.
struct TermList {
    std::array<const uint8_t*, codec::kMaxTerms> payloads;
    std::array<float, codec::kMaxTerms> coefficients;
    int count = 0;

    void add(const uint8_t* payload, double coefficient) {
        payloads[count] = payload;
        coefficients[count++] = static_cast<float>(coefficient);
    }
};

TermList& thread_terms() {
    static thread_local TermList terms;
    terms.count = 0;
    return terms;
}

const TermList& check_terms(c10::Device device, TensorList payloads,
                            c10::ArrayRef<double> coefficients, const codec::RunLayout& layout,
                            int64_t end) {
    TORCH_CHECK_VALUE(!payloads.empty() && payloads.size() <= codec::kMaxTerms,
                      "payloads must hold 1 to ", codec::kMaxTerms, " tensors, got ",
                      payloads.size());
    TORCH_CHECK_VALUE(payloads.size() == coefficients.size(),
                      "payloads and coefficients must be equally many, got ", payloads.size(),
                      " and ", coefficients.size());
    TermList& terms = thread_terms();
    for (size_t i = 0; i < payloads.size(); ++i) {
        check_payload(device, "payloads", payloads[i], layout, runs_up_to(layout, end));
        terms.add(payloads[i].const_data_ptr<uint8_t>(), coefficients[i]);
    }
    return terms;
}

// Checks the arguments of `reduce`, and returns the runs that it sums as terms.
const TermList& check_runs(c10::Device device, const Tensor& received, const Tensor& result,
                           c10::ArrayRef<double> weights, int64_t num_elements,
                           const codec::RunLayout& layout, int64_t index_begin) {
    TORCH_CHECK_VALUE(0 <= num_elements && num_elements <= layout.run_elements,
                      "num_elements must lie in [0, run_elements = ", layout.run_elements,
                      "], got ", num_elements);
    TORCH_CHECK_VALUE(
        index_begin >= 0 && (num_elements == 0 || index_begin % layout.block_size == 0),
        "index_begin must be a multiple of block_size ", layout.block_size, ", got ", index_begin);
    TORCH_CHECK_VALUE(!weights.empty() && weights.size() <= codec::kMaxTerms,
                      "weights must hold 1 to ", codec::kMaxTerms, " numbers, got ",
                      weights.size());
    const auto num_runs = static_cast<int64_t>(weights.size());
    check_payload(device, "received", received, layout, num_runs);
    TORCH_CHECK_VALUE(received.numel() == num_runs * run_bytes(layout), "received must hold ",
                      num_runs, " runs, one for each weight, got ", received.numel(), " bytes");
    check_payload(device, "result", result, layout, 1);
    TermList& terms = thread_terms();
    const uint8_t* run = received.const_data_ptr<uint8_t>();
    for (int64_t i = 0; i < num_runs; ++i) terms.add(run + i * run_bytes(layout), weights[i]);
    return terms;
}

void check_count(c10::Device device, const char* name, const OptionalTensor& count) {
    if (!count.has_value()) return;
    check_flat(device, name, *count, at::kLong);
    TORCH_CHECK_VALUE(count->numel() == 1, name, " must have one element, got ", count->numel());
}

// Checks max_blocks, the most thread blocks of a kernel; 0 means no limit.
void check_max_blocks(int64_t max_blocks) {
    TORCH_CHECK_VALUE(max_blocks >= 0, "max_blocks must not be negative, got ", max_blocks);
}

// Both residuals share the dtype; either may be missing.
DType check_residuals(c10::Device device, const OptionalTensor& residual,
                      const OptionalTensor& new_residual, int64_t num_elements) {
    DType dtype = DType::kFp32;
    for (const OptionalTensor* each : {&residual, &new_residual}) {
        if (!each->has_value()) continue;
        const Tensor& tensor = **each;
        check_device(device, "residual", tensor);
        TORCH_CHECK_TYPE(
            tensor.scalar_type() == at::kFloat || tensor.scalar_type() == at::kBFloat16,
            "residual must be float32 or bfloat16, got ", tensor.scalar_type());
        TORCH_CHECK_VALUE(
            tensor.dim() == 1 && tensor.is_contiguous() && tensor.numel() == num_elements,
            "residual must be one-dimensional and contiguous with ", num_elements,
            " elements, got shape ", tensor.sizes());
        dtype = parse_dtype("residual", tensor);
    }
    if (residual.has_value() && new_residual.has_value()) {
        TORCH_CHECK_TYPE(residual->scalar_type() == new_residual->scalar_type(),
                         "residual and new_residual must have one dtype, got ",
                         residual->scalar_type(), " and ", new_residual->scalar_type());
    }
    return dtype;
}

// Checks the arguments of `digest`.
void check_digest(c10::Device device, const Tensor& tensor, const Tensor& sums,
                  int64_t first_word) {
    check_device(device, "tensor", tensor);
    TORCH_CHECK_VALUE(tensor.is_contiguous() || tensor.is_non_overlapping_and_dense(),
                      "tensor must fill its memory without gaps, got shape ", tensor.sizes(),
                      " with strides ", tensor.strides());
    check_flat(device, "sums", sums, at::kLong);
    TORCH_CHECK_VALUE(sums.numel() == 2, "sums must have two elements, got ", sums.numel());
    TORCH_CHECK_VALUE(first_word >= 0, "first_word must not be negative, got ", first_word);
}

void* data_or_null(const OptionalTensor& tensor) {
    return tensor.has_value() ? tensor->data_ptr() : nullptr;
}

// The address that element 0 of the fragment would have, if `window` has the elements from
// outer_begin on. Kernels take this address.
float* origin_or_null(const OptionalTensor& window, int64_t outer_begin) {
    return window.has_value() ? window->data_ptr<float>() - outer_begin : nullptr;
}

}  // namespace
}  // namespace diloco
