// The operators torch.ops.diloco_comm.* on CUDA tensors. Their arguments are checked as on the CPU
// and become kernel parameters; the kernels are enqueued on the current stream of the tensors'
// device. The host never waits for the device.
//
// This file does not need libtorch_cuda or libc10_cuda, so that the extension also loads under a
// torch without CUDA. The tests compile it with DILOCO_EMULATED: then it works on CPU tensors, with
// kernels that run the lanes of a warp one after the other.
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <string>
#include <tuple>
#include <vector>

#include "cuda/kernels.h"
#include "operators/checks.h"
#include "operators/cuda_call.h"
#include "operators/operators.h"
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

// Sets the arguments that encode and reduce have in common.
void set_target(cuda::EncodeTarget& target, const codec::EncodeArgs& args,
                const OptionalTensor& nonfinite) {
    target.payload = args.payload;
    target.residual_dtype = args.residual_dtype;
    target.residual = args.residual;
    target.new_residual = args.new_residual;
    target.nonfinite = static_cast<int64_t*>(data_or_null(nonfinite));
    target.key = args.key;
    target.index_begin = args.index_begin;
}

bool is_aligned(const void* data) {
    return data != nullptr && reinterpret_cast<uint64_t>(data) % wire::kAlignment == 0;
}

// Whether the layout has a kernel for whole tiles (cuda/tiles.h).
bool has_usual_blocks(const codec::RunLayout& layout) {
    return wire::has_element_codes(layout.format) && layout.block_size == cuda::kUsualBlock;
}

// Whether encode or reduce can use its kernel for whole tiles with this target.
bool has_whole_tiles(const cuda::EncodeTarget& target, const codec::RunLayout& layout) {
    return has_usual_blocks(layout) && target.residual == nullptr &&
           target.new_residual == nullptr && is_aligned(target.payload);
}

int tile_of(const codec::RunLayout& layout, int small) {
    return cuda::is_small_tile(small, layout.format, layout.block_size) ? small : cuda::kLargeTile;
}

struct CudaEngine : Call {
    using Call::Call;

    void encode(const codec::EncodeArgs& args, int64_t begin, int64_t end,
                const OptionalTensor& nonfinite, int64_t max_blocks) {
        cuda::EncodeArgs to;
        to.target = {};
        set_target(to.target, args, nonfinite);
        to.target.runs = runs_of(args.layout, begin, end, tile_of(args.layout, cuda::kEncodeTile),
                                 cuda::kEncodeTilesPerWarp);
        to.outer = args.outer;
        const SegmentList& tensors = set_segments(*this, to.params, args.params, begin, end);
        cuda::Rest rest;
        const bool has_whole = has_whole_tiles(to.target, args.layout) && is_aligned(to.outer);
        set_rest(*this, rest, to.target.runs, cuda::kEncodeTile, has_whole, tensors);
        cuda::encode(to, rest, args.layout.format, args.is_stochastic, queue(max_blocks));
    }

    void reduce(const codec::EncodeArgs& args, const TermList& terms, int64_t num_elements,
                const OptionalTensor& nonfinite, int64_t max_blocks) {
        cuda::ReduceArgs to;
        to.target = {};
        set_target(to.target, args, nonfinite);
        to.target.runs =
            runs_of(args.layout, 0, num_elements, tile_of(args.layout, cuda::kReduceTile),
                    cuda::kReduceTilesPerWarp);
        set_terms(*this, to.terms, terms);
        to.terms.dot_exponent = dot_exponent(terms);
        cuda::Rest rest;
        const bool has_whole = has_whole_tiles(to.target, args.layout) && to.terms.are_aligned;
        set_rest(*this, rest, to.target.runs, cuda::kReduceTile, has_whole);
        cuda::reduce(to, rest, args.layout.format, args.is_stochastic, queue(max_blocks));
    }

    // Always returns true: the step may have been taken. Only the device knows the verdict, a
    // number in its memory.
    bool outer_step(const codec::StepArgs& args, const TermList& terms, int64_t begin, int64_t end,
                    const int64_t* verdict) {
        cuda::StepArgs to;
        to.runs = runs_of(args.layout, begin, end, cuda::kStepTile);
        to.constants = args.constants;
        to.verdict = verdict;
        to.outer = args.outer;
        to.momentum = args.momentum;
        to.second = args.second;
        set_segments(*this, to.params, args.params, begin, end);
        set_terms(*this, to.terms, terms);
        cuda::outer_step(to, args.layout.format, queue());
        return true;
    }

    void decode(const codec::DecodeArgs& args, const TermList& terms, int64_t begin, int64_t end,
                int64_t max_blocks) {
        cuda::DecodeArgs to;
        const int tile = cuda::decode_tile_of(args.layout.format);
        to.runs = runs_of(args.layout, begin, end, tile, cuda::kDecodeTilesPerWarp);
        const SegmentList& tensors = set_segments(*this, to.outs, args.outs, begin, end);
        set_terms(*this, to.terms, terms);
        cuda::Rest rest;
        const bool has_whole = to.terms.are_aligned && has_usual_blocks(args.layout);
        set_rest(*this, rest, to.runs, tile, has_whole, tensors);
        cuda::decode(to, rest, args.layout.format, queue(max_blocks));
    }

    void merge(const codec::MergeArgs& args) {
        cuda::MergeArgs to;
        to.runs = one_run(args.params.num_elements);
        to.outer = args.outer;
        to.alpha = args.alpha;
        to.one_minus_alpha = args.one_minus_alpha;
        set_segments(*this, to.params, args.params, 0, args.params.num_elements);
        cuda::merge(to, queue());
    }

    void norms(const codec::NormsArgs& args, double* out) {
        const int64_t num_elements = args.params.num_elements;
        const int64_t num_chunks = (num_elements + codec::kNormChunk - 1) / codec::kNormChunk;
        cuda::NormsArgs to;
        to.num_elements = num_elements;
        to.outer = args.outer;
        to.squares = static_cast<double*>(scratch(num_chunks * 16));
        to.counts = reinterpret_cast<int64_t*>(to.squares + num_chunks);
        to.out = out;
        set_segments(*this, to.params, args.params, 0, num_elements);
        cuda::norms(to, queue());
    }

    void digest(const Tensor& tensor, uint64_t* sums, uint64_t first_word, int64_t max_blocks) {
        cuda::DigestArgs to;
        to.data = reinterpret_cast<uint64_t>(tensor.const_data_ptr());
        to.num_bytes = tensor.nbytes();
        to.first_word = first_word;
        to.sums = sums;
        cuda::digest(to, queue(max_blocks));
    }
};

// Runs Triton's operator of the same name, which Python registers, if `impl` is "triton" or the
// call throws Unserved, which it does before it has changed anything.
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
        static const std::string name = std::string("diloco_comm_triton::") + kName;
        c10::Dispatcher::singleton()
            .findSchemaOrThrow(name.c_str(), "")
            .typed<void(Args...)>()
            .call(args...);
    }
};

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
    diloco::register_operators<diloco::CudaEngine, diloco::OrTriton>(m);
}
