// The operators torch.ops.diloco_comm.* on the CPU, and the Meta registrations.
// Every argument is checked once, here; an error is one sentence with what was given and what is
// expected.
#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <string>
#include <vector>

#include "codec/bench/floors.h"
#include "codec/codec.h"
#include "codec/digest.h"
#include "operators/arguments.h"
#include "operators/checks.h"
#include "operators/cpu_call.h"
#include "operators/schemas.h"

namespace diloco {
namespace {

int64_t run_encode(const codec::EncodeArgs& args, int64_t begin, int64_t end) {
    std::atomic<int64_t> num_bad{0};
    parallel(begin, end, args.layout.block_size,
             [&](int64_t first, int64_t last) { num_bad += codec::encode(args, first, last); });
    return num_bad;
}

void add_count(const OptionalTensor& nonfinite, int64_t count) {
    if (nonfinite.has_value()) *nonfinite->data_ptr<int64_t>() += count;
}

void encode_cpu(const OptionalTensor& outer, TensorList params, const Tensor& payload,
                int64_t begin, int64_t end, int64_t run_elements, c10::string_view wire,
                int64_t block_size, bool stochastic, int64_t rng_key,
                const OptionalTensor& residual, const OptionalTensor& new_residual,
                const OptionalTensor& nonfinite, int64_t outer_begin, int64_t max_blocks,
                c10::string_view impl) {
    codec::EncodeArgs args{};
    args.kernels = parse_impl(impl);
    args.layout = parse_layout(wire, block_size, run_elements);
    check_max_blocks(max_blocks);
    const FragmentView view(c10::kCPU, "params", params);
    args.params = view.get();
    const int64_t num_elements = view.num_elements();
    check_range(args.layout, begin, end, num_elements);
    check_payload(c10::kCPU, "payload", payload, args.layout, runs_up_to(args.layout, end));
    args.payload = payload.data_ptr<uint8_t>();
    if (outer.has_value()) {
        check_window(c10::kCPU, args.layout, *outer, outer_begin, begin, end, num_elements);
        args.outer = outer->const_data_ptr<float>() - outer_begin;
    }
    args.residual_dtype = check_residuals(c10::kCPU, residual, new_residual, num_elements);
    args.residual = data_or_null(residual);
    args.new_residual = data_or_null(new_residual);
    check_count(c10::kCPU, "nonfinite", nonfinite);
    args.is_stochastic = stochastic;
    args.key = static_cast<uint64_t>(rng_key);
    args.is_large = end - begin >= kLargeElements;
    add_count(nonfinite, run_encode(args, begin, end));
}

void reduce_cpu(const Tensor& received, const Tensor& result, c10::ArrayRef<double> weights,
                int64_t num_elements, int64_t run_elements, c10::string_view wire,
                int64_t block_size, bool stochastic, int64_t rng_key, int64_t index_begin,
                const OptionalTensor& residual, const OptionalTensor& new_residual,
                const OptionalTensor& nonfinite, int64_t max_blocks, c10::string_view impl) {
    codec::EncodeArgs args{};
    args.kernels = parse_impl(impl);
    args.layout = parse_layout(wire, block_size, run_elements);
    check_max_blocks(max_blocks);
    const TermList& terms =
        check_runs(c10::kCPU, received, result, weights, num_elements, args.layout, index_begin);
    args.term_payloads = terms.payloads.data();
    args.coefficients = terms.coefficients.data();
    args.num_terms = terms.count;
    args.payload = result.data_ptr<uint8_t>();
    args.residual_dtype = check_residuals(c10::kCPU, residual, new_residual, num_elements);
    args.residual = data_or_null(residual);
    args.new_residual = data_or_null(new_residual);
    check_count(c10::kCPU, "nonfinite", nonfinite);
    args.is_stochastic = stochastic;
    args.key = static_cast<uint64_t>(rng_key);
    args.index_begin = static_cast<uint64_t>(index_begin);
    args.is_large = num_elements >= kLargeElements;
    add_count(nonfinite, run_encode(args, 0, num_elements));
}

void run_step(codec::StepArgs args, const Tensor& outer, const OptionalTensor& momentum,
              const OptionalTensor& second, TensorList params, TensorList payloads,
              c10::ArrayRef<double> coefficients, int64_t begin, int64_t end,
              const OptionalTensor& verdict, int64_t outer_begin,
              const char* second_name = "exp_avg_sq", int64_t params_begin = 0) {
    const FragmentView view(c10::kCPU, "params", params, params_begin);
    const int64_t num_elements = view.num_elements();
    check_range(args.layout, begin, end, num_elements);
    check_window(c10::kCPU, args.layout, outer, outer_begin, begin, end, num_elements);
    const int64_t size = outer.numel();
    if (momentum.has_value()) check_flat_of(c10::kCPU, "momentum", *momentum, size, "outer");
    if (second.has_value()) check_flat_of(c10::kCPU, second_name, *second, size, "outer");
    const TermList& terms = check_terms(c10::kCPU, payloads, coefficients, args.layout, end);
    check_count(c10::kCPU, "verdict", verdict);
    if (verdict.has_value() && *verdict->const_data_ptr<int64_t>() != 0) return;
    args.params = view.get();
    args.term_payloads = terms.payloads.data();
    args.coefficients = terms.coefficients.data();
    args.num_terms = terms.count;
    args.is_large = end - begin >= kLargeElements;
    args.outer = origin_or_null(outer, outer_begin);
    args.momentum = origin_or_null(momentum, outer_begin);
    args.second = origin_or_null(second, outer_begin);
    parallel(begin, end, args.layout.block_size,
             [&](int64_t first, int64_t last) { codec::outer_step(args, first, last); });
    mark_written(params);
}

void outer_step_cpu(const Tensor& outer, const OptionalTensor& momentum, TensorList params,
                    TensorList payloads, c10::ArrayRef<double> coefficients, int64_t begin,
                    int64_t end, int64_t run_elements, c10::string_view wire, int64_t block_size,
                    c10::string_view optimizer, double lr, double mu, double alpha, double clip,
                    const OptionalTensor& verdict, int64_t outer_begin, c10::string_view impl) {
    codec::StepArgs args{};
    args.kernels = parse_impl(impl);
    args.layout = parse_layout(wire, block_size, run_elements);
    args.constants = step_constants(optimizer, momentum.has_value(), lr, mu, alpha, clip);
    const bool needs_momentum = args.constants.optimizer != codec::Optimizer::kSgd;
    run_step(args, outer, needs_momentum ? momentum : OptionalTensor(), OptionalTensor(), params,
             payloads, coefficients, begin, end, verdict, outer_begin);
}

void outer_step_adam_cpu(const Tensor& outer, const Tensor& exp_avg, const Tensor& exp_avg_sq,
                         TensorList params, TensorList payloads, c10::ArrayRef<double> coefficients,
                         int64_t begin, int64_t end, int64_t run_elements, c10::string_view wire,
                         int64_t block_size, double lr, double beta1, double beta2, double eps,
                         int64_t step, double alpha, const OptionalTensor& verdict,
                         int64_t outer_begin, c10::string_view impl) {
    codec::StepArgs args{};
    args.kernels = parse_impl(impl);
    args.layout = parse_layout(wire, block_size, run_elements);
    args.constants = adam_constants(lr, beta1, beta2, eps, step, alpha);
    run_step(args, outer, exp_avg, exp_avg_sq, params, payloads, coefficients, begin, end, verdict,
             outer_begin);
}

void outer_step_delayed_cpu(const Tensor& outer, const OptionalTensor& momentum,
                            const OptionalTensor& pending, TensorList payloads,
                            c10::ArrayRef<double> coefficients, int64_t begin, int64_t end,
                            int64_t run_elements, c10::string_view wire, int64_t block_size,
                            double lr, double mu, double direct, double ahead, double behind,
                            bool first, bool last, const OptionalTensor& verdict,
                            int64_t outer_begin, c10::string_view impl) {
    codec::StepArgs args{};
    args.kernels = parse_impl(impl);
    args.layout = parse_layout(wire, block_size, run_elements);
    args.constants =
        arrival_constants(pending.has_value(), lr, mu, direct, ahead, behind, first, last);
    // The driver walks over outer, where the other operators walk over parameters. The fragment
    // ends where outer ends.
    run_step(args, outer, last ? momentum : OptionalTensor(), pending, outer, payloads,
             coefficients, begin, end, verdict, outer_begin, "pending", window_begin(outer_begin));
}

void decode_cpu(TensorList payloads, c10::ArrayRef<double> coefficients, TensorList outs,
                int64_t begin, int64_t end, int64_t run_elements, c10::string_view wire,
                int64_t block_size, int64_t max_blocks, c10::string_view impl) {
    codec::DecodeArgs args{};
    args.kernels = parse_impl(impl);
    args.layout = parse_layout(wire, block_size, run_elements);
    check_max_blocks(max_blocks);
    const FragmentView view(c10::kCPU, "outs", outs);
    args.outs = view.get();
    check_range(args.layout, begin, end, view.num_elements());
    const TermList& terms = check_terms(c10::kCPU, payloads, coefficients, args.layout, end);
    args.term_payloads = terms.payloads.data();
    args.coefficients = terms.coefficients.data();
    args.num_terms = terms.count;
    // Also when it is decoded part by part.
    args.is_large = view.num_elements() >= kLargeElements;
    parallel(begin, end, args.layout.block_size,
             [&](int64_t first, int64_t last) { codec::decode(args, first, last); });
    mark_written(outs);
}

void merge_cpu(const Tensor& outer, TensorList params, double alpha, c10::string_view impl) {
    codec::MergeArgs args{};
    args.kernels = parse_impl(impl);
    const FragmentView view(c10::kCPU, "params", params);
    args.params = view.get();
    check_flat_of(c10::kCPU, "outer", outer, view.num_elements());
    args.outer = outer.const_data_ptr<float>();
    args.alpha = static_cast<float>(alpha);
    args.one_minus_alpha = static_cast<float>(1.0 - alpha);
    args.is_large = view.num_elements() >= kLargeElements;
    parallel(0, view.num_elements(), codec::kPlainBlock,
             [&](int64_t first, int64_t last) { codec::merge(args, first, last); });
    mark_written(params);
}

// The sums of the chunks are added in order, whatever the number of threads.
void norms_cpu(const OptionalTensor& outer, TensorList params, const Tensor& out,
               c10::string_view impl) {
    codec::NormsArgs args{};
    args.kernels = parse_impl(impl);
    const FragmentView view(c10::kCPU, "params", params);
    args.params = view.get();
    const int64_t num_elements = view.num_elements();
    if (outer.has_value()) {
        check_flat_of(c10::kCPU, "outer", *outer, num_elements);
        args.outer = outer->const_data_ptr<float>();
    }
    check_flat(c10::kCPU, "out", out, at::kDouble);
    TORCH_CHECK_VALUE(out.numel() == 2, "out must have two elements, got ", out.numel());
    static thread_local std::vector<codec::Norms> chunk_storage;
    std::vector<codec::Norms>& chunks = chunk_storage;
    chunks.resize((num_elements + codec::kNormChunk - 1) / codec::kNormChunk);
    parallel(0, num_elements, codec::kNormChunk, [&](int64_t first, int64_t last) {
        for (int64_t at = first; at < last; at += codec::kNormChunk) {
            const int64_t chunk_end = std::min(at + codec::kNormChunk, last);
            chunks[at / codec::kNormChunk] = codec::norms(args, at, chunk_end);
        }
    });
    codec::Norms total{};
    for (const codec::Norms& chunk : chunks) {
        total.squared += chunk.squared;
        total.nonfinite += chunk.nonfinite;
    }
    out.data_ptr<double>()[0] = total.squared;
    out.data_ptr<double>()[1] = static_cast<double>(total.nonfinite);
}

// The products of the chunks are added in order, whatever the number of threads.
void gram_cpu(TensorList payloads, const Tensor& out, int64_t begin, int64_t end,
              int64_t num_elements, int64_t run_elements, c10::string_view wire, int64_t block_size,
              int64_t first_row, c10::string_view impl) {
    codec::GramArgs args{};
    args.kernels = parse_impl(impl);
    args.layout = parse_layout(wire, block_size, run_elements);
    check_range(args.layout, begin, end, num_elements);
    TORCH_CHECK_VALUE(!payloads.empty() && payloads.size() <= codec::kMaxGramTerms,
                      "payloads must hold 1 to ", codec::kMaxGramTerms, " tensors, got ",
                      payloads.size());
    const std::array<double, codec::kMaxGramTerms> ones{};
    const TermList& terms =
        check_terms(c10::kCPU, payloads, {ones.data(), payloads.size()}, args.layout, end);
    args.term_payloads = terms.payloads.data();
    args.num_terms = terms.count;
    TORCH_CHECK_VALUE(first_row >= 0 && first_row < terms.count, "first_row must lie in [0, ",
                      terms.count, "), got ", first_row);
    args.first_row = static_cast<int>(first_row);
    check_flat(c10::kCPU, "out", out, at::kDouble);
    TORCH_CHECK_VALUE(out.numel() == terms.count * terms.count, "out must have ",
                      terms.count * terms.count, " elements for ", terms.count, " payloads, got ",
                      out.numel());
    const int pairs = codec::num_pairs(terms.count);
    const int64_t num_chunks = (end - begin + codec::kNormChunk - 1) / codec::kNormChunk;
    std::vector<double> chunks(static_cast<size_t>(num_chunks * pairs));
    parallel(begin, end, codec::kNormChunk, [&](int64_t first, int64_t last) {
        for (int64_t at = first; at < last; at += codec::kNormChunk) {
            double* products = chunks.data() + (at - begin) / codec::kNormChunk * pairs;
            codec::gram(args, at, std::min(at + codec::kNormChunk, last), products);
        }
    });
    auto* matrix = out.data_ptr<double>();
    for (int i = args.first_row, pair = codec::num_pairs(i); i < terms.count; ++i) {
        for (int j = 0; j <= i; ++j, ++pair) {
            double total = 0.0;
            for (int64_t k = 0; k < num_chunks; ++k) total += chunks[k * pairs + pair];
            matrix[i * terms.count + j] = matrix[j * terms.count + i] = total;
        }
    }
}

// Sums mod 2^64 come out the same whatever the number of threads.
void digest_cpu(const Tensor& tensor, const Tensor& sums, int64_t first_word, int64_t max_blocks,
                c10::string_view impl) {
    const codec::Kernels* kernels = parse_impl(impl);
    check_max_blocks(max_blocks);
    check_digest(c10::kCPU, tensor, sums, first_word);
    const auto* data = static_cast<const uint8_t*>(tensor.const_data_ptr());
    const auto num_bytes = static_cast<int64_t>(tensor.nbytes());
    std::atomic<uint64_t> product{0}, sum{0};
    parallel(0, (num_bytes + 7) / 8, codec::kPlainBlock, [&](int64_t first, int64_t last) {
        const int64_t end = std::min(8 * last, num_bytes);
        codec::DigestSums part;
        codec::add_digest(data + 8 * first, static_cast<uint64_t>(end - 8 * first),
                          static_cast<uint64_t>(first_word + first), part, kernels);
        product += part.product;
        sum += part.sum;
    });
    auto* totals = static_cast<uint64_t*>(sums.data_ptr());
    totals[0] += product;
    totals[1] += sum;
}

std::vector<std::string> cpu_impls() {
    std::vector<std::string> names;
    for (const auto* kernels : codec::available_kernels()) names.emplace_back(kernels->name);
    return names;
}

// Runs one of the plain loops that the kernels are measured against.
void floor_cpu(c10::string_view kind, TensorList buffers) {
    std::array<codec::FloorBuffer, codec::kMaxFloorBuffers> pointers{};
    TORCH_CHECK_VALUE(buffers.size() <= pointers.size(), "at most ", pointers.size(),
                      " buffers, got ", buffers.size());
    for (size_t i = 0; i < buffers.size(); ++i) {
        check_device(c10::kCPU, "buffers", buffers[i]);
        TORCH_CHECK_VALUE(buffers[i].is_contiguous(), "buffers must be contiguous");
        pointers[i] = {static_cast<uint8_t*>(buffers[i].data_ptr()), buffers[i].nbytes()};
    }
    const codec::Floor* floor = codec::find_floor(std::string(kind));
    TORCH_CHECK_VALUE(floor != nullptr, "unknown floor '", kind,
                      "', known: ", codec::floor_names());
    TORCH_CHECK_VALUE(buffers.size() == static_cast<size_t>(floor->num_buffers), "floor ", kind,
                      " takes ", floor->num_buffers, " buffers (", floor->buffers, "), got ",
                      buffers.size());
    const size_t elements = buffers[0].nbytes() / floor->bytes_per_element[0];
    for (int i = 0; i < floor->num_buffers; ++i) {
        TORCH_CHECK_VALUE(pointers[i].num_bytes == elements * floor->bytes_per_element[i], "floor ",
                          kind, " buffer ", i, " must have ",
                          elements * floor->bytes_per_element[i], " bytes, got ",
                          pointers[i].num_bytes);
    }
    TORCH_CHECK_VALUE(elements % codec::kFloorUnit == 0,
                      "the number of elements must be a multiple of ", codec::kFloorUnit, ", got ",
                      elements);
    parallel(0, static_cast<int64_t>(elements), codec::kFloorUnit,
             [&](int64_t first, int64_t last) {
                 floor->run(pointers.data(), static_cast<size_t>(first), static_cast<size_t>(last));
             });
}

// Under torch.compile and on fake tensors there is nothing to compute: the operators only write
// their arguments.
template <class Function>
struct Fake;
template <class... Args>
struct Fake<void (*)(Args...)> {
    static void run(Args...) {}
};

}  // namespace
}  // namespace diloco

TORCH_LIBRARY(diloco_comm, m) {
    m.set_python_module("diloco_comm.ops");
    for (const char* schema : diloco::kSchemas) m.def(schema);
    for (const char* schema : diloco::kCpuSchemas) m.def(schema);
    m.def("_floor(str kind, Tensor(a!)[] buffers) -> ()");
    m.def("_cpu_impls() -> str[]", &diloco::cpu_impls);
    m.def("_floors() -> str[]", &diloco::codec::floor_names);
}

TORCH_LIBRARY_IMPL(diloco_comm, CPU, m) {
    m.impl("encode", &diloco::encode_cpu);
    m.impl("reduce", &diloco::reduce_cpu);
    m.impl("outer_step", &diloco::outer_step_cpu);
    m.impl("outer_step_adam", &diloco::outer_step_adam_cpu);
    m.impl("outer_step_delayed", &diloco::outer_step_delayed_cpu);
    m.impl("decode", &diloco::decode_cpu);
    m.impl("merge", &diloco::merge_cpu);
    m.impl("norms", &diloco::norms_cpu);
    m.impl("gram", &diloco::gram_cpu);
    m.impl("digest", &diloco::digest_cpu);
    m.impl("_floor", &diloco::floor_cpu);
}

TORCH_LIBRARY_IMPL(diloco_comm, Meta, m) {
    m.impl("encode", &diloco::Fake<decltype(&diloco::encode_cpu)>::run);
    m.impl("reduce", &diloco::Fake<decltype(&diloco::reduce_cpu)>::run);
    m.impl("outer_step", &diloco::Fake<decltype(&diloco::outer_step_cpu)>::run);
    m.impl("outer_step_adam", &diloco::Fake<decltype(&diloco::outer_step_adam_cpu)>::run);
    m.impl("outer_step_delayed", &diloco::Fake<decltype(&diloco::outer_step_delayed_cpu)>::run);
    m.impl("decode", &diloco::Fake<decltype(&diloco::decode_cpu)>::run);
    m.impl("merge", &diloco::Fake<decltype(&diloco::merge_cpu)>::run);
    m.impl("norms", &diloco::Fake<decltype(&diloco::norms_cpu)>::run);
    m.impl("gram", &diloco::Fake<decltype(&diloco::gram_cpu)>::run);
    m.impl("digest", &diloco::Fake<decltype(&diloco::digest_cpu)>::run);
}
