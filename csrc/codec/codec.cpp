#include "codec/codec.h"

#include <algorithm>
#include <cstring>

#include "codec/fp_environment.h"
#include "codec/step_rule.h"
#include "codec/terms.h"
#include "wire/codes.h"

namespace diloco::codec {
namespace {

using wire::Format;

int64_t element_bytes(DType dtype) { return dtype == DType::kFp32 ? 4 : 2; }

uint8_t* offset(void* data, DType dtype, int64_t elements) {
    return static_cast<uint8_t*>(data) + elements * element_bytes(dtype);
}

const uint8_t* offset(const void* data, DType dtype, int64_t elements) {
    return static_cast<const uint8_t*>(data) + elements * element_bytes(dtype);
}

bool is_aligned(const void* pointer, uintptr_t bytes) {
    return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

// A range of a fragment inside one run. It has complete blocks of one segment, at `data`; or if
// data is null, one block that has elements of several segments or is cut short by the end.
struct Piece {
    int64_t begin;
    int64_t size;
    uint8_t* data;
    DType dtype;
    int64_t segment_idx;
};

template <class Body>
void for_each_piece(const Fragment& fragment, const RunLayout& layout, int64_t begin, int64_t end,
                    Body&& body) {
    const Segment* segments = fragment.segments;
    int64_t idx = 0;
    if (fragment.num_segments > 0) {
        const Segment* next = std::upper_bound(
            segments, segments + fragment.num_segments, begin,
            [](int64_t position, const Segment& segment) { return position < segment.begin; });
        idx = next - segments - 1;
    }
    const int64_t block = layout.block_size;
    for (int64_t at = begin; at < end;) {
        const int64_t run_end = std::min((at / layout.run_elements + 1) * layout.run_elements, end);
        while (segments[idx].begin + segments[idx].size <= at) ++idx;
        const Segment& segment = segments[idx];
        const int64_t whole =
            (std::min(segment.begin + segment.size, run_end) - at) / block * block;
        Piece piece{at, whole, nullptr, segment.dtype, idx};
        if (whole > 0) {
            piece.data = offset(segment.data, segment.dtype, at - segment.begin);
        } else {
            piece.size = std::min(block, run_end - at);
        }
        body(piece);
        at += piece.size;
    }
}

float load(const uint8_t* data, DType dtype) {
    if (dtype == DType::kFp32) {
        float value;
        std::memcpy(&value, data, sizeof(value));
        return value;
    }
    uint16_t code;
    std::memcpy(&code, data, sizeof(code));
    return half_value(dtype, code);
}

void store(uint8_t* data, DType dtype, float value) {
    if (dtype == DType::kFp32) {
        std::memcpy(data, &value, sizeof(value));
        return;
    }
    const auto code = static_cast<uint16_t>(half_bits(dtype, value));
    std::memcpy(data, &code, sizeof(code));
}

// Calls body(data, dtype, index in the piece) for each element of a piece whose `data` is null.
template <class Body>
void for_each_element(const Fragment& fragment, const Piece& piece, Body&& body) {
    int64_t idx = piece.segment_idx;
    for (int64_t i = 0; i < piece.size; ++i) {
        const int64_t at = piece.begin + i;
        while (fragment.segments[idx].begin + fragment.segments[idx].size <= at) ++idx;
        const Segment& segment = fragment.segments[idx];
        body(offset(segment.data, segment.dtype, at - segment.begin), segment.dtype, i);
    }
}

// A block copied to the stack. If it is short, zeros follow its elements.
struct alignas(64) StackBlock {
    float value[wire::kLargestBlock];
    const int64_t block_size;

    explicit StackBlock(int64_t block_size) : block_size(block_size) {}

    void gather(const Fragment& fragment, const Piece& piece) {
        for_each_element(fragment, piece, [&](const uint8_t* data, DType dtype, int64_t i) {
            value[i] = load(data, dtype);
        });
        clear_from(piece.size);
    }
    // Copies the outer values of the piece, each rounded to the dtype of its parameter.
    void gather_outer(const Fragment& fragment, const Piece& piece, const float* outer) {
        for_each_element(fragment, piece, [&](const uint8_t*, DType dtype, int64_t i) {
            value[i] = as_written(dtype, outer[piece.begin + i]);
        });
        clear_from(piece.size);
    }
    void scatter(const Fragment& fragment, const Piece& piece) const {
        for_each_element(fragment, piece, [&](uint8_t* data, DType dtype, int64_t i) {
            store(data, dtype, value[i]);
        });
    }
    // Writes the values to the parameters, each rounded toward its outer value. outer[0] belongs to
    // the first element of the piece.
    void scatter_toward(const Fragment& fragment, const Piece& piece, const float* outer) const {
        for_each_element(fragment, piece, [&](uint8_t* data, DType dtype, int64_t i) {
            store(data, dtype, rounded_toward(dtype, value[i], as_written(dtype, outer[i])));
        });
    }
    void copy_in(const void* source, DType dtype, int64_t begin, int64_t size) {
        std::memcpy(value, offset(source, dtype, begin), size * element_bytes(dtype));
        std::memset(reinterpret_cast<uint8_t*>(value) + size * element_bytes(dtype), 0,
                    (block_size - size) * element_bytes(dtype));
    }
    void copy_out(void* target, DType dtype, int64_t begin, int64_t size) const {
        std::memcpy(offset(target, dtype, begin), value, size * element_bytes(dtype));
    }
    void clear_from(int64_t size) {
        std::memset(value + size, 0, (block_size - size) * sizeof(float));
    }
};

int64_t blocks_of(int64_t elements, int block_size) {
    return (elements + block_size - 1) / block_size;
}

// Encodes a block that is cut short into a buffer on the stack, and copies only the bytes of its
// elements to the payload.
int64_t encode_short(const EncodeArgs& args, EncodeSpan span, const Piece& piece) {
    const int64_t size = span.block_size;
    StackBlock sum(size), residual(size), new_residual(size);
    alignas(64) uint8_t codes[wire::kMaxBlockSize * sizeof(float)];
    uint8_t* target = span.codes;
    span.codes = codes;
    span.streams_codes = span.streams_residual = false;
    if (span.num_terms > 0) {
        // The bytes after the last code of a received run are arbitrary, so zero what they decode
        // to.
        args.kernels->decode({span.format, span.block_size, 1, span.terms, span.num_terms,
                              sum.value, DType::kFp32, false});
        sum.clear_from(piece.size);
        span.params = sum.value;
        span.param_dtype = DType::kFp32;
        span.num_terms = 0;
    }
    if (args.residual != nullptr) {
        residual.copy_in(args.residual, args.residual_dtype, piece.begin, piece.size);
        span.residual = residual.value;
    }
    if (args.new_residual != nullptr) span.new_residual = new_residual.value;
    const int64_t bad = args.kernels->encode(span);
    std::memcpy(target, codes, wire::code_bytes(args.layout.format, piece.size));
    if (args.new_residual != nullptr) {
        new_residual.copy_out(args.new_residual, args.residual_dtype, piece.begin, piece.size);
    }
    return bad;
}

int64_t encode_piece(const EncodeArgs& args, Terms& terms, const uint8_t* signs,
                     const Piece& piece) {
    const RunLayout& layout = args.layout;
    const PayloadPosition position = locate(layout, piece.begin);
    EncodeSpan span{};
    span.format = layout.format;
    span.block_size = layout.block_size;
    span.num_blocks = blocks_of(piece.size, layout.block_size);
    span.outer = args.outer != nullptr ? args.outer + piece.begin : nullptr;
    span.params = piece.data;
    span.param_dtype = piece.dtype;
    span.num_terms = terms.count();
    span.terms = span.num_terms > 0 ? terms.at(position) : nullptr;
    span.residual_dtype = args.residual_dtype;
    if (args.residual != nullptr) {
        span.residual = offset(args.residual, args.residual_dtype, piece.begin);
    }
    if (args.new_residual != nullptr) {
        span.new_residual = offset(args.new_residual, args.residual_dtype, piece.begin);
    }
    span.scales = args.payload + position.scales;
    span.codes = args.payload + position.codes;
    span.streams_codes = args.is_large && is_aligned(span.codes, 16);
    span.streams_residual =
        args.is_large && args.residual_dtype == DType::kFp32 && is_aligned(span.new_residual, 64);
    span.is_stochastic = args.is_stochastic;
    span.element = args.index_begin + static_cast<uint64_t>(piece.begin);
    span.key = args.key;
    span.signs = signs;
    if (wire::is_rotated(layout.format) && piece.begin % layout.run_elements == 0) {
        std::memcpy(args.payload + position.run, &args.key, sizeof(args.key));
    }
    StackBlock params(layout.block_size), outer(layout.block_size);
    if (piece.data == nullptr && span.num_terms == 0) {
        params.gather(args.params, piece);
        span.params = params.value;
        span.param_dtype = DType::kFp32;
        if (args.outer != nullptr) {
            outer.gather_outer(args.params, piece, args.outer);
            span.outer = outer.value;
        }
    }
    return piece.size % layout.block_size == 0 ? args.kernels->encode(span)
                                               : encode_short(args, span, piece);
}

}  // namespace

int64_t encode(const EncodeArgs& args, int64_t begin, int64_t end) {
    const IeeeScope ieee;
    Terms terms(args.layout, args.term_payloads, args.coefficients, args.num_terms);
    Signs own;
    if (wire::is_rotated(args.layout.format)) own.fill(args.key, args.layout.block_size);
    int64_t bad = 0;
    if (args.num_terms > 0) {
        // A weighted sum is encoded for a single run: complete blocks, then perhaps a short block.
        const int64_t whole = (end - begin) / args.layout.block_size * args.layout.block_size;
        if (whole > 0)
            bad += encode_piece(args, terms, own.bits, {begin, whole, nullptr, DType::kFp32, 0});
        if (begin + whole < end) {
            bad += encode_piece(args, terms, own.bits,
                                {begin + whole, end - begin - whole, nullptr, DType::kFp32, 0});
        }
        return bad;
    }
    for_each_piece(args.params, args.layout, begin, end,
                   [&](const Piece& piece) { bad += encode_piece(args, terms, own.bits, piece); });
    return bad;
}

void decode(const DecodeArgs& args, int64_t begin, int64_t end) {
    const IeeeScope ieee;
    Terms terms(args.layout, args.term_payloads, args.coefficients, args.num_terms);
    for_each_piece(args.outs, args.layout, begin, end, [&](const Piece& piece) {
        StackBlock block(args.layout.block_size);
        DecodeSpan span{};
        span.format = args.layout.format;
        span.block_size = args.layout.block_size;
        span.num_blocks = blocks_of(piece.size, args.layout.block_size);
        span.terms = terms.at(locate(args.layout, piece.begin));
        span.num_terms = terms.count();
        span.out = piece.data != nullptr ? piece.data : reinterpret_cast<uint8_t*>(block.value);
        span.out_dtype = piece.data != nullptr ? piece.dtype : DType::kFp32;
        span.streams = args.is_large && piece.data != nullptr && piece.dtype == DType::kFp32 &&
                       is_aligned(span.out, 64);
        args.kernels->decode(span);
        if (piece.data == nullptr) block.scatter(args.outs, piece);
    });
}

namespace {

// Takes the step of one block of several segments: copies its parameters to the stack and back. If
// the block is cut short, its outer state is copied, too.
void step_block(const StepArgs& args, StepSpan span, const Piece& piece) {
    const int64_t size = args.layout.block_size;
    StackBlock params(size), outer(size), momentum(size), second(size);
    params.gather(args.params, piece);
    span.params = params.value;
    span.param_dtype = DType::kFp32;
    const bool is_short = piece.size < args.layout.block_size;
    if (is_short) {
        outer.copy_in(args.outer, DType::kFp32, piece.begin, piece.size);
        span.outer = outer.value;
        if (args.momentum != nullptr) {
            momentum.copy_in(args.momentum, DType::kFp32, piece.begin, piece.size);
            span.momentum = momentum.value;
        }
        if (args.second != nullptr) {
            second.copy_in(args.second, DType::kFp32, piece.begin, piece.size);
            span.second = second.value;
        }
    }
    args.kernels->outer_step(span);
    params.scatter_toward(args.params, piece, span.outer);
    if (!is_short) return;
    outer.copy_out(args.outer, DType::kFp32, piece.begin, piece.size);
    if (args.momentum != nullptr) {
        momentum.copy_out(args.momentum, DType::kFp32, piece.begin, piece.size);
    }
    if (args.second != nullptr) second.copy_out(args.second, DType::kFp32, piece.begin, piece.size);
}

}  // namespace

void outer_step(const StepArgs& args, int64_t begin, int64_t end) {
    const IeeeScope ieee;
    Terms terms(args.layout, args.term_payloads, args.coefficients, args.num_terms);
    for_each_piece(args.params, args.layout, begin, end, [&](const Piece& piece) {
        StepSpan span{};
        span.format = args.layout.format;
        span.block_size = args.layout.block_size;
        span.num_blocks = blocks_of(piece.size, args.layout.block_size);
        span.terms = terms.at(locate(args.layout, piece.begin));
        span.num_terms = terms.count();
        span.outer = args.outer + piece.begin;
        span.momentum = args.momentum != nullptr ? args.momentum + piece.begin : nullptr;
        span.second = args.second != nullptr ? args.second + piece.begin : nullptr;
        span.params = piece.data;
        span.param_dtype = piece.dtype;
        span.streams_params = args.is_large && piece.data != nullptr &&
                              piece.dtype == DType::kFp32 && is_aligned(piece.data, 64);
        span.constants = &args.constants;
        if (piece.data != nullptr) {
            args.kernels->outer_step(span);
        } else {
            step_block(args, span, piece);
        }
    });
}

void merge(const MergeArgs& args, int64_t begin, int64_t end) {
    const IeeeScope ieee;
    const RunLayout layout{Format::kFp32, kPlainBlock, INT64_MAX / 2};
    for_each_piece(args.params, layout, begin, end, [&](const Piece& piece) {
        MergeSpan span{piece.size, args.outer + piece.begin, piece.data, piece.dtype,
                       args.alpha, args.one_minus_alpha,     false};
        if (piece.data != nullptr) {
            span.streams_params =
                args.is_large && piece.dtype == DType::kFp32 && is_aligned(piece.data, 64);
            args.kernels->merge(span);
            return;
        }
        StackBlock params(kPlainBlock), outer(kPlainBlock);
        params.gather(args.params, piece);
        outer.copy_in(args.outer, DType::kFp32, piece.begin, piece.size);
        span.num_elements = kPlainBlock;
        span.outer = outer.value;
        span.params = params.value;
        span.param_dtype = DType::kFp32;
        args.kernels->merge(span);
        params.scatter_toward(args.params, piece, outer.value);
    });
}

Norms norms(const NormsArgs& args, int64_t begin, int64_t end) {
    const IeeeScope ieee;
    const RunLayout layout{Format::kFp32, kPlainBlock, INT64_MAX / 2};
    double lanes[kNormLanes] = {};
    int64_t bad = 0;
    for_each_piece(args.params, layout, begin, end, [&](const Piece& piece) {
        NormsSpan span{piece.size, args.outer != nullptr ? args.outer + piece.begin : nullptr,
                       piece.data, piece.dtype, lanes};
        StackBlock params(kPlainBlock), outer(kPlainBlock);
        if (piece.data == nullptr) {
            params.gather(args.params, piece);
            span.num_elements = kPlainBlock;
            span.params = params.value;
            span.param_dtype = DType::kFp32;
            if (args.outer != nullptr) {
                outer.gather_outer(args.params, piece, args.outer);
                span.outer = outer.value;
            }
        }
        bad += args.kernels->norms(span);
    });
    return {sum_lanes(lanes), bad};
}

}  // namespace diloco::codec
