// The operators torch.ops.diloco_comm.* on the CPU, and the Meta registrations.
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
#include "operators/checks.h"
#include "operators/cpu_call.h"
#include "operators/operators.h"
#include "operators/schemas.h"

namespace diloco {
namespace {

struct CpuEngine {
    CpuEngine(c10::string_view impl, const Tensor&) : kernels(parse_impl(impl)) {}

    void encode(codec::EncodeArgs& args, int64_t begin, int64_t end,
                const OptionalTensor& nonfinite, int64_t) {
        args.kernels = kernels;
        args.is_large = end - begin >= kLargeElements;
        std::atomic<int64_t> num_bad{0};
        parallel(begin, end, args.layout.block_size,
                 [&](int64_t first, int64_t last) { num_bad += codec::encode(args, first, last); });
        if (nonfinite.has_value()) *nonfinite->data_ptr<int64_t>() += num_bad;
    }

    void reduce(codec::EncodeArgs& args, const TermList&, int64_t num_elements,
                const OptionalTensor& nonfinite, int64_t max_blocks) {
        encode(args, 0, num_elements, nonfinite, max_blocks);
    }

    // Takes the step, unless `verdict` points to a number other than zero. Returns whether the step
    // was taken.
    bool outer_step(codec::StepArgs& args, const TermList&, int64_t begin, int64_t end,
                    const int64_t* verdict) {
        if (verdict != nullptr && *verdict != 0) return false;
        args.kernels = kernels;
        args.is_large = end - begin >= kLargeElements;
        parallel(begin, end, args.layout.block_size,
                 [&](int64_t first, int64_t last) { codec::outer_step(args, first, last); });
        return true;
    }

    void decode(codec::DecodeArgs& args, const TermList&, int64_t begin, int64_t end, int64_t) {
        args.kernels = kernels;
        // The size of the fragment decides, even if this call decodes only a part of it.
        args.is_large = args.outs.num_elements >= kLargeElements;
        parallel(begin, end, args.layout.block_size,
                 [&](int64_t first, int64_t last) { codec::decode(args, first, last); });
    }

    void merge(codec::MergeArgs& args) {
        args.kernels = kernels;
        args.is_large = args.params.num_elements >= kLargeElements;
        parallel(0, args.params.num_elements, codec::kPlainBlock,
                 [&](int64_t first, int64_t last) { codec::merge(args, first, last); });
    }

    // The chunks' sums are added in order, so that the result does not depend on the threads.
    void norms(codec::NormsArgs& args, double* out) {
        args.kernels = kernels;
        const int64_t num_elements = args.params.num_elements;
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
        out[0] = total.squared;
        out[1] = static_cast<double>(total.nonfinite);
    }

    // Each thread makes sums of its own. Sums mod 2^64 do not depend on the number of threads.
    void digest(const Tensor& tensor, uint64_t* totals, uint64_t first_word, int64_t) {
        const auto* data = static_cast<const uint8_t*>(tensor.const_data_ptr());
        const auto num_bytes = static_cast<int64_t>(tensor.nbytes());
        std::atomic<uint64_t> product{0}, sum{0};
        parallel(0, (num_bytes + 7) / 8, codec::kPlainBlock, [&](int64_t first, int64_t last) {
            const int64_t end = std::min(8 * last, num_bytes);
            codec::DigestSums part;
            codec::add_digest(data + 8 * first, static_cast<uint64_t>(end - 8 * first),
                              first_word + static_cast<uint64_t>(first), part, kernels);
            product += part.product;
            sum += part.sum;
        });
        totals[0] += product;
        totals[1] += sum;
    }

    const c10::Device device{c10::kCPU};
    const codec::Kernels* const kernels;
};

// The operator gram. The chunks' products are added in order, so that the result does not depend on
// the number of threads.
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

std::vector<std::string> cpu_impls() {
    std::vector<std::string> names;
    for (const auto* kernels : codec::available_kernels()) names.emplace_back(kernels->name);
    return names;
}

// Runs one of the plain loops of codec/bench/floors.h, to which benchmarks compare the kernels.
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

template <const char* kName, auto kFunction>
struct Plain;
template <const char* kName, class... Args, void (*kFunction)(Args...)>
struct Plain<kName, kFunction> {
    static void run(Args... args) { kFunction(args...); }
};

// The Meta registrations, for torch.compile and fake tensors. They do nothing: the operators return
// nothing and only write to their arguments.
template <const char* kName, auto kFunction>
struct Fake;
template <const char* kName, class... Args, void (*kFunction)(Args...)>
struct Fake<kName, kFunction> {
    static void run(Args...) {}
};

constexpr char kGram[] = "gram";

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
    diloco::register_operators<diloco::CpuEngine, diloco::Plain>(m);
    m.impl(diloco::kGram, &diloco::gram_cpu);
    m.impl("_floor", &diloco::floor_cpu);
}

TORCH_LIBRARY_IMPL(diloco_comm, Meta, m) {
    diloco::register_operators<diloco::CpuEngine, diloco::Fake>(m);
    m.impl(diloco::kGram, &diloco::Fake<diloco::kGram, &diloco::gram_cpu>::run);
}
