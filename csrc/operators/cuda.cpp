// The operators torch.ops.diloco_comm.* on CUDA tensors: arguments are checked as on the CPU, put
// into kernel parameters, and enqueued on the current stream of the tensors' device. The host
// neither reads nor waits for anything on the device.
//
// Nothing here refers to libtorch_cuda or libc10_cuda, so the extension loads where they are not.
// The tests compile this file with DILOCO_EMULATED: the same code on CPU tensors, with kernels that
// run the lanes of a warp one after the other.
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <tuple>
#include <vector>

#include "cuda/kernels.h"
#include "operators/arguments.h"
#include "operators/checks.h"
#include "operators/cuda_call.h"
#include "operators/schemas.h"

#if defined(DILOCO_EMULATED)
#define DILOCO_LIBRARY diloco_comm_emulated
#define DILOCO_KEY CPU
#else
#define DILOCO_LIBRARY diloco_comm
#define DILOCO_KEY CUDA
#endif

namespace diloco {
namespace {

// The target arguments, which encode and reduce share.
void set_target(cuda::EncodeTarget& target, c10::Device device, const Tensor& payload,
                int64_t num_elements, int64_t rng_key, const OptionalTensor& residual,
                const OptionalTensor& new_residual, const OptionalTensor& nonfinite) {
    target.payload = payload.data_ptr<uint8_t>();
    target.residual_dtype = check_residuals(device, residual, new_residual, num_elements);
    target.residual = data_or_null(residual);
    target.new_residual = data_or_null(new_residual);
    check_count(device, "nonfinite", nonfinite);
    target.nonfinite = static_cast<int64_t*>(data_or_null(nonfinite));
    target.key = static_cast<uint64_t>(rng_key);
}

bool is_aligned(const void* data) {
    return data != nullptr && reinterpret_cast<uint64_t>(data) % wire::kAlignment == 0;
}

// Whether there are kernels of whole tiles for that wire.
bool has_usual_blocks(const codec::RunLayout& layout) {
    return wire::has_element_codes(layout.format) && layout.block_size == cuda::kUsualBlock;
}

// The same for these arrays of encode and reduce.
bool has_whole_tiles(const cuda::EncodeTarget& target, const codec::RunLayout& layout) {
    return has_usual_blocks(layout) && target.residual == nullptr &&
           target.new_residual == nullptr && is_aligned(target.payload);
}

int tile_of(const codec::RunLayout& layout, int small) {
    return cuda::is_small_tile(small, layout.format, layout.block_size) ? small : cuda::kLargeTile;
}

void encode_cuda(const OptionalTensor& outer, TensorList params, const Tensor& payload,
                 int64_t begin, int64_t end, int64_t run_elements, c10::string_view wire,
                 int64_t block_size, bool stochastic, int64_t rng_key,
                 const OptionalTensor& residual, const OptionalTensor& new_residual,
                 const OptionalTensor& nonfinite, int64_t outer_begin, int64_t max_blocks,
                 c10::string_view impl) {
    Call call(impl, payload);
    const codec::RunLayout layout = parse_layout(wire, block_size, run_elements);
    check_max_blocks(max_blocks);
    const FragmentView view(call.device, "params", params);
    const int64_t num_elements = view.num_elements();
    check_range(layout, begin, end, num_elements);
    check_payload(call.device, "payload", payload, layout, runs_up_to(layout, end));
    if (outer.has_value()) {
        check_window(call.device, layout, *outer, outer_begin, begin, end, num_elements);
    }
    cuda::EncodeArgs args;
    args.target = {};
    set_target(args.target, call.device, payload, num_elements, rng_key, residual, new_residual,
               nonfinite);
    args.target.runs =
        runs_of(layout, begin, end, tile_of(layout, cuda::kEncodeTile), cuda::kEncodeTilesPerWarp);
    args.outer = origin_or_null(outer, outer_begin);
    if (begin == end) return;
    const SegmentList& tensors = set_segments(call, args.params, view.get(), begin, end);
    cuda::Rest rest;
    const bool has_whole = has_whole_tiles(args.target, layout) && is_aligned(args.outer);
    set_rest(call, rest, args.target.runs, cuda::kEncodeTile, has_whole, tensors);
    cuda::encode(args, rest, layout.format, stochastic, call.queue(max_blocks));
}

void reduce_cuda(const Tensor& received, const Tensor& result, c10::ArrayRef<double> weights,
                 int64_t num_elements, int64_t run_elements, c10::string_view wire,
                 int64_t block_size, bool stochastic, int64_t rng_key, int64_t index_begin,
                 const OptionalTensor& residual, const OptionalTensor& new_residual,
                 const OptionalTensor& nonfinite, int64_t max_blocks, c10::string_view impl) {
    Call call(impl, received);
    const codec::RunLayout layout = parse_layout(wire, block_size, run_elements);
    check_max_blocks(max_blocks);
    const TermList& terms =
        check_runs(call.device, received, result, weights, num_elements, layout, index_begin);
    cuda::ReduceArgs args;
    args.target = {};
    set_target(args.target, call.device, result, num_elements, rng_key, residual, new_residual,
               nonfinite);
    args.target.runs = runs_of(layout, 0, num_elements, tile_of(layout, cuda::kReduceTile),
                               cuda::kReduceTilesPerWarp);
    args.target.index_begin = static_cast<uint64_t>(index_begin);
    if (num_elements == 0) return;
    set_terms(call, args.terms, terms);
    args.terms.dot_exponent = dot_exponent(terms);
    cuda::Rest rest;
    const bool has_whole = has_whole_tiles(args.target, layout) && args.terms.are_aligned;
    set_rest(call, rest, args.target.runs, cuda::kReduceTile, has_whole);
    cuda::reduce(args, rest, layout.format, stochastic, call.queue(max_blocks));
}

void run_step(Call& call, const codec::RunLayout& layout, const codec::StepConstants& constants,
              const Tensor& outer, const OptionalTensor& momentum, const OptionalTensor& second,
              TensorList params, TensorList payloads, c10::ArrayRef<double> coefficients,
              int64_t begin, int64_t end, const OptionalTensor& verdict, int64_t outer_begin,
              const char* second_name = "exp_avg_sq", int64_t params_begin = 0) {
    const FragmentView view(call.device, "params", params, params_begin);
    const int64_t num_elements = view.num_elements();
    check_range(layout, begin, end, num_elements);
    check_window(call.device, layout, outer, outer_begin, begin, end, num_elements);
    const int64_t size = outer.numel();
    if (momentum.has_value()) check_flat_of(call.device, "momentum", *momentum, size, "outer");
    if (second.has_value()) check_flat_of(call.device, second_name, *second, size, "outer");
    const TermList& terms = check_terms(call.device, payloads, coefficients, layout, end);
    check_count(call.device, "verdict", verdict);
    if (begin == end) return;
    cuda::StepArgs args;
    args.runs = runs_of(layout, begin, end, cuda::kStepTile);
    args.constants = constants;
    args.verdict = static_cast<const int64_t*>(data_or_null(verdict));
    args.outer = origin_or_null(outer, outer_begin);
    args.momentum = origin_or_null(momentum, outer_begin);
    args.second = origin_or_null(second, outer_begin);
    set_segments(call, args.params, view.get(), begin, end);
    set_terms(call, args.terms, terms);
    cuda::outer_step(args, layout.format, call.queue());
    mark_written(params);
}

void outer_step_cuda(const Tensor& outer, const OptionalTensor& momentum, TensorList params,
                     TensorList payloads, c10::ArrayRef<double> coefficients, int64_t begin,
                     int64_t end, int64_t run_elements, c10::string_view wire, int64_t block_size,
                     c10::string_view optimizer, double lr, double mu, double alpha, double clip,
                     const OptionalTensor& verdict, int64_t outer_begin, c10::string_view impl) {
    Call call(impl, outer);
    const codec::StepConstants constants =
        step_constants(optimizer, momentum.has_value(), lr, mu, alpha, clip);
    const bool needs_momentum = constants.optimizer != codec::Optimizer::kSgd;
    run_step(call, parse_layout(wire, block_size, run_elements), constants, outer,
             needs_momentum ? momentum : OptionalTensor(), OptionalTensor(), params, payloads,
             coefficients, begin, end, verdict, outer_begin);
}

void outer_step_adam_cuda(const Tensor& outer, const Tensor& exp_avg, const Tensor& exp_avg_sq,
                          TensorList params, TensorList payloads,
                          c10::ArrayRef<double> coefficients, int64_t begin, int64_t end,
                          int64_t run_elements, c10::string_view wire, int64_t block_size,
                          double lr, double beta1, double beta2, double eps, int64_t step,
                          double alpha, const OptionalTensor& verdict, int64_t outer_begin,
                          c10::string_view impl) {
    Call call(impl, outer);
    run_step(call, parse_layout(wire, block_size, run_elements),
             adam_constants(lr, beta1, beta2, eps, step, alpha), outer, exp_avg, exp_avg_sq, params,
             payloads, coefficients, begin, end, verdict, outer_begin);
}

void outer_step_delayed_cuda(const Tensor& outer, const OptionalTensor& momentum,
                             const OptionalTensor& pending, TensorList payloads,
                             c10::ArrayRef<double> coefficients, int64_t begin, int64_t end,
                             int64_t run_elements, c10::string_view wire, int64_t block_size,
                             double lr, double mu, double direct, double ahead, double behind,
                             bool first, bool last, const OptionalTensor& verdict,
                             int64_t outer_begin, c10::string_view impl) {
    Call call(impl, outer);
    const codec::StepConstants constants =
        arrival_constants(pending.has_value(), lr, mu, direct, ahead, behind, first, last);
    // The fragment is outer alone, and ends where outer ends: parameters are not written.
    run_step(call, parse_layout(wire, block_size, run_elements), constants, outer,
             last ? momentum : OptionalTensor(), pending, outer, payloads, coefficients, begin, end,
             verdict, outer_begin, "pending", window_begin(outer_begin));
}

void decode_cuda(TensorList payloads, c10::ArrayRef<double> coefficients, TensorList outs,
                 int64_t begin, int64_t end, int64_t run_elements, c10::string_view wire,
                 int64_t block_size, int64_t max_blocks, c10::string_view impl) {
    TORCH_CHECK_VALUE(!payloads.empty(), "payloads must hold 1 to ", codec::kMaxTerms,
                      " tensors, got 0");
    Call call(impl, payloads[0]);
    const codec::RunLayout layout = parse_layout(wire, block_size, run_elements);
    check_max_blocks(max_blocks);
    const FragmentView view(call.device, "outs", outs);
    check_range(layout, begin, end, view.num_elements());
    const TermList& terms = check_terms(call.device, payloads, coefficients, layout, end);
    if (begin == end) return;
    cuda::DecodeArgs args;
    const int tile = cuda::decode_tile_of(layout.format);
    args.runs = runs_of(layout, begin, end, tile, cuda::kDecodeTilesPerWarp);
    const SegmentList& tensors = set_segments(call, args.outs, view.get(), begin, end);
    set_terms(call, args.terms, terms);
    cuda::Rest rest;
    const bool has_whole = args.terms.are_aligned && has_usual_blocks(layout);
    set_rest(call, rest, args.runs, tile, has_whole, tensors);
    cuda::decode(args, rest, layout.format, call.queue(max_blocks));
    mark_written(outs);
}

void merge_cuda(const Tensor& outer, TensorList params, double alpha, c10::string_view impl) {
    Call call(impl, outer);
    const FragmentView view(call.device, "params", params);
    check_flat_of(call.device, "outer", outer, view.num_elements());
    if (view.num_elements() == 0) return;
    cuda::MergeArgs args;
    args.runs = one_run(view.num_elements());
    args.outer = outer.const_data_ptr<float>();
    args.alpha = static_cast<float>(alpha);
    args.one_minus_alpha = static_cast<float>(1.0 - alpha);
    set_segments(call, args.params, view.get(), 0, view.num_elements());
    cuda::merge(args, call.queue());
    mark_written(params);
}

void norms_cuda(const OptionalTensor& outer, TensorList params, const Tensor& out,
                c10::string_view impl) {
    Call call(impl, out);
    const FragmentView view(call.device, "params", params);
    const int64_t num_elements = view.num_elements();
    if (outer.has_value()) check_flat_of(call.device, "outer", *outer, num_elements);
    check_flat(call.device, "out", out, at::kDouble);
    TORCH_CHECK_VALUE(out.numel() == 2, "out must have two elements, got ", out.numel());
    const int64_t num_chunks = (num_elements + codec::kNormChunk - 1) / codec::kNormChunk;
    cuda::NormsArgs args;
    args.num_elements = num_elements;
    args.outer = static_cast<const float*>(data_or_null(outer));
    args.squares = static_cast<double*>(call.scratch(num_chunks * 16));
    args.counts = reinterpret_cast<int64_t*>(args.squares + num_chunks);
    args.out = out.data_ptr<double>();
    set_segments(call, args.params, view.get(), 0, num_elements);
    cuda::norms(args, call.queue());
}

void digest_cuda(const Tensor& tensor, const Tensor& sums, int64_t first_word, int64_t max_blocks,
                 c10::string_view impl) {
    Call call(impl, tensor);
    check_max_blocks(max_blocks);
    check_digest(call.device, tensor, sums, first_word);
    cuda::DigestArgs args;
    args.data = reinterpret_cast<uint64_t>(tensor.const_data_ptr());
    args.num_bytes = tensor.nbytes();
    args.first_word = static_cast<uint64_t>(first_word);
    args.sums = static_cast<uint64_t*>(sums.data_ptr());
    cuda::digest(args, call.queue(max_blocks));
}

// Runs Triton's operator of that name, which Python registers, when `impl` is "triton", and where
// the kernels do not run: a call finds that out before it does anything.
template <const char* kName, auto kKernel>
struct OrTriton;
template <const char* kName, class... Args, void (*kKernel)(Args...)>
struct OrTriton<kName, kKernel> {
    static void run(Args... args) {
        try {
            if (std::get<sizeof...(Args) - 1>(std::tie(args...)) != "triton") {
                return kKernel(args...);
            }
        } catch (const Unserved&) {
        }
        c10::Dispatcher::singleton().findSchemaOrThrow(kName, "").typed<void(Args...)>().call(
            args...);
    }
};

constexpr char kEncode[] = "diloco_comm_triton::encode";
constexpr char kReduce[] = "diloco_comm_triton::reduce";
constexpr char kOuterStep[] = "diloco_comm_triton::outer_step";
constexpr char kOuterStepAdam[] = "diloco_comm_triton::outer_step_adam";
constexpr char kOuterStepDelayed[] = "diloco_comm_triton::outer_step_delayed";
constexpr char kDecode[] = "diloco_comm_triton::decode";
constexpr char kMerge[] = "diloco_comm_triton::merge";
constexpr char kNorms[] = "diloco_comm_triton::norms";
constexpr char kDigest[] = "diloco_comm_triton::digest";

}  // namespace
}  // namespace diloco

#if defined(DILOCO_EMULATED)
TORCH_LIBRARY(DILOCO_LIBRARY, m) {
    for (const char* schema : diloco::kSchemas) m.def(schema);
}
#endif

TORCH_LIBRARY_FRAGMENT(DILOCO_LIBRARY, m) {
    m.def("_cuda_support(int device) -> int[]", &diloco::support_of);
}

TORCH_LIBRARY_IMPL(DILOCO_LIBRARY, DILOCO_KEY, m) {
    m.impl("encode", &diloco::OrTriton<diloco::kEncode, &diloco::encode_cuda>::run);
    m.impl("reduce", &diloco::OrTriton<diloco::kReduce, &diloco::reduce_cuda>::run);
    m.impl("outer_step", &diloco::OrTriton<diloco::kOuterStep, &diloco::outer_step_cuda>::run);
    m.impl("outer_step_adam",
           &diloco::OrTriton<diloco::kOuterStepAdam, &diloco::outer_step_adam_cuda>::run);
    m.impl("outer_step_delayed",
           &diloco::OrTriton<diloco::kOuterStepDelayed, &diloco::outer_step_delayed_cuda>::run);
    m.impl("decode", &diloco::OrTriton<diloco::kDecode, &diloco::decode_cuda>::run);
    m.impl("merge", &diloco::OrTriton<diloco::kMerge, &diloco::merge_cuda>::run);
    m.impl("norms", &diloco::OrTriton<diloco::kNorms, &diloco::norms_cuda>::run);
    m.impl("digest", &diloco::OrTriton<diloco::kDigest, &diloco::digest_cuda>::run);
}
