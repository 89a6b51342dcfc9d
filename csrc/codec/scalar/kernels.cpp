// The scalar implementation of every kernel, made directly of the functions in csrc/wire.
#include "codec/kernels.h"

#include "codec/bench/floors.h"
#include "codec/scalar/rotation.h"
#include "codec/scalar/sparse.h"
#include "codec/sparse.h"
#include "codec/step_rule.h"
#include "wire/codes.h"
#include "wire/digest.h"
#include "wire/stochastic.h"

namespace diloco::codec {
namespace {

using wire::Format;

float load(const void* data, DType dtype, int64_t i) {
    if (dtype == DType::kFp32) return static_cast<const float*>(data)[i];
    const uint32_t code = static_cast<const uint16_t*>(data)[i];
    return half_value(dtype, code);
}

void store(void* data, DType dtype, int64_t i, float value) {
    if (dtype == DType::kFp32) {
        static_cast<float*>(data)[i] = value;
    } else {
        static_cast<uint16_t*>(data)[i] = static_cast<uint16_t>(half_bits(dtype, value));
    }
}

template <Format kFormat>
uint32_t load_code(const uint8_t* codes, int64_t i) {
    constexpr int kBits = wire::code_bits(kFormat);
    if constexpr (kBits == 4) {
        return (codes[i / 2] >> (4 * (i % 2))) & 0xFu;
    } else {
        uint32_t code = 0;
        __builtin_memcpy(&code, codes + i * (kBits / 8), kBits / 8);
        return code;
    }
}

// Writes the code of element i. 4-bit codes must be written in order: the one in the low nibble
// also clears the high nibble.
template <Format kFormat>
void store_code(uint8_t* codes, int64_t i, uint32_t code) {
    constexpr int kBits = wire::code_bits(kFormat);
    if constexpr (kBits == 4) {
        codes[i / 2] = static_cast<uint8_t>(i % 2 == 0 ? code : codes[i / 2] | (code << 4));
    } else {
        __builtin_memcpy(codes + i * (kBits / 8), &code, kBits / 8);
    }
}

float scale_at(const uint8_t* scales, int64_t block) {
    uint16_t scale;
    __builtin_memcpy(&scale, scales + 2 * block, sizeof(scale));
    return wire::scale_value(scale);
}

template <Format kFormat>
float decoded(const Term& term, int64_t i, int block_size) {
    const float value = wire::code_value<kFormat>(load_code<kFormat>(term.codes, i));
    return wire::has_scales(kFormat) ? value * scale_at(term.scales, i / block_size) : value;
}

// The weighted sum of all terms' decoded values at element i. Each product is rounded to fp32, and
// the products are added in order.
template <Format kFormat>
float weighted_sum(const Term* terms, int num_terms, int64_t i, int block_size) {
    float sum = terms[0].coefficient * decoded<kFormat>(terms[0], i, block_size);
    for (int t = 1; t < num_terms; ++t) {
        sum += terms[t].coefficient * decoded<kFormat>(terms[t], i, block_size);
    }
    return sum;
}

// The weighted sum of block number `block` of all terms.
template <Format kFormat>
void sum_block(const Term* terms, int num_terms, int64_t block, int block_size, float* sum) {
    if constexpr (wire::is_sparse(kFormat)) {
        sum_sparse_block<kFormat>(terms, num_terms, block, sum);
    } else if constexpr (!wire::is_rotated(kFormat)) {
        for (int j = 0; j < block_size; ++j) {
            const int64_t i = block * block_size + j;
            sum[j] = weighted_sum<kFormat>(terms, num_terms, i, block_size);
        }
    } else {
        float value[wire::kLargestBlock];
        for (int t = 0; t < num_terms; ++t) {
            const Term& term = terms[t];
            decode_rotated<kFormat>(term.scales, term.codes, term.signs, block, value);
            for (int j = 0; j < block_size; ++j) {
                const float product = term.coefficient * value[j];
                sum[j] = t == 0 ? product : sum[j] + product;
            }
        }
    }
}

// Loads the values of block number `block` that are to be encoded; see EncodeSpan.
template <Format kFormat>
void load_block(const EncodeSpan& span, int64_t block, float* x) {
    if (span.num_terms > 0) {
        sum_block<kFormat>(span.terms, span.num_terms, block, span.block_size, x);
    }
    for (int j = 0; j < span.block_size; ++j) {
        const int64_t i = block * span.block_size + j;
        if (span.num_terms == 0) {
            const float param = load(span.params, span.param_dtype, i);
            x[j] =
                span.outer != nullptr ? as_written(span.param_dtype, span.outer[i]) - param : param;
        }
        if (span.residual != nullptr) x[j] += load(span.residual, span.residual_dtype, i);
    }
}

template <Format kFormat>
uint32_t code_of(const EncodeSpan& span, int64_t i, float y) {
    if (!span.is_stochastic) return wire::encode_nearest<kFormat>(y);
    const uint64_t element = span.element + static_cast<uint64_t>(i);
    return wire::encode_stochastic<kFormat>(y, wire::random16(element, span.key));
}

template <Format kFormat>
int64_t encode_unscaled_block(const EncodeSpan& span, int64_t begin, const float* x) {
    int64_t num_bad = 0;
    for (int j = 0; j < span.block_size; ++j) {
        const int64_t i = begin + j;
        uint32_t code = wire::is_bad(x[j]) ? 0 : code_of<kFormat>(span, i, x[j]);
        const bool is_bad = wire::is_bad(x[j]) || wire::is_code_bad<kFormat>(code);
        if (is_bad) code = 0;
        num_bad += is_bad;
        store_code<kFormat>(span.codes, i, code);
        if (span.new_residual != nullptr) {
            const float value = wire::code_value<kFormat>(code);
            store(span.new_residual, span.residual_dtype, i, x[j] - value);
        }
    }
    return num_bad;
}

template <Format kFormat>
int64_t encode_scaled_block(const EncodeSpan& span, int64_t begin, const float* x) {
    int64_t num_bad = 0;
    uint32_t absmax_bits = 0;
    for (int j = 0; j < span.block_size; ++j) {
        const uint32_t magnitude = wire::float_bits(x[j]) & wire::kMagnitudeMask;
        absmax_bits = magnitude > absmax_bits ? magnitude : absmax_bits;
        num_bad += wire::is_bad(x[j]);
    }
    const uint16_t scale = num_bad > 0
                               ? wire::kSmallestScale
                               : wire::scale_of(wire::bits_float(absmax_bits), wire::qmax(kFormat));
    __builtin_memcpy(span.scales + 2 * (begin / span.block_size), &scale, sizeof(scale));
    const float inverse = 1.0f / wire::scale_value(scale);
    for (int j = 0; j < span.block_size; ++j) {
        const int64_t i = begin + j;
        const uint32_t code = num_bad > 0 ? 0 : code_of<kFormat>(span, i, x[j] * inverse);
        store_code<kFormat>(span.codes, i, code);
        if (span.new_residual != nullptr) {
            const float value = wire::code_value<kFormat>(code) * wire::scale_value(scale);
            store(span.new_residual, span.residual_dtype, i, x[j] - value);
        }
    }
    return num_bad;
}

template <Format kFormat>
int64_t encode_rotated_block(const EncodeSpan& span, int64_t block, const float* x) {
    uint16_t scale;
    uint8_t* code = span.codes + block * wire::own_bytes(kFormat);
    const bool has_feedback = span.new_residual != nullptr;
    const int64_t num_bad = encode_rotated<kFormat>(x, span.signs, has_feedback, scale, code);
    __builtin_memcpy(span.scales + 2 * block, &scale, sizeof(scale));
    if (has_feedback) {
        float value[wire::kLargestBlock];
        decode_rotated<kFormat>(span.scales, span.codes, span.signs, block, value);
        for (int j = 0; j < span.block_size; ++j) {
            store(span.new_residual, span.residual_dtype, block * span.block_size + j,
                  x[j] - value[j]);
        }
    }
    return num_bad;
}

template <Format kFormat>
int64_t encode_kept_block(const EncodeSpan& span, int64_t block, float* x) {
    const int64_t num_bad = encode_sparse_block<kFormat>(span, block, x);
    for (int j = 0; span.new_residual != nullptr && j < span.block_size; ++j) {
        store(span.new_residual, span.residual_dtype, block * span.block_size + j, x[j]);
    }
    return num_bad;
}

template <Format kFormat>
int64_t encode_format(const EncodeSpan& span) {
    int64_t num_bad = 0;
    float x[wire::kLargestBlock];
    for (int64_t block = 0; block < span.num_blocks; ++block) {
        load_block<kFormat>(span, block, x);
        const int64_t begin = block * span.block_size;
        if constexpr (wire::is_rotated(kFormat)) {
            num_bad += encode_rotated_block<kFormat>(span, block, x);
        } else if constexpr (wire::is_sparse(kFormat)) {
            num_bad += encode_kept_block<kFormat>(span, block, x);
        } else if constexpr (wire::has_scales(kFormat)) {
            num_bad += encode_scaled_block<kFormat>(span, begin, x);
        } else {
            num_bad += encode_unscaled_block<kFormat>(span, begin, x);
        }
    }
    return num_bad;
}

template <Format kFormat>
void decode_format(const DecodeSpan& span) {
    float sum[wire::kLargestBlock];
    for (int64_t block = 0; block < span.num_blocks; ++block) {
        sum_block<kFormat>(span.terms, span.num_terms, block, span.block_size, sum);
        for (int j = 0; j < span.block_size; ++j) {
            store(span.out, span.out_dtype, block * span.block_size + j, sum[j]);
        }
    }
}

void merge_element(void* params, DType dtype, int64_t i, float outer, float alpha,
                   float one_minus_alpha) {
    if (alpha != 0.0f) outer = merged(dtype, load(params, dtype, i), outer, alpha, one_minus_alpha);
    store(params, dtype, i, outer);
}

// One element of kAccumulate or kCommit: g is added to the sum of arrivals, and kCommit takes the
// outer step.
void arrive(const StepSpan& span, int64_t i, float g) {
    const StepConstants& c = *span.constants;
    const float d = c.is_first ? g : span.second[i] + g;
    if (c.optimizer == Optimizer::kAccumulate) {
        span.second[i] = d;
        return;
    }
    float none = 0.0f;
    const bool has_momentum = span.momentum != nullptr;
    span.outer[i] -= commit_update(c, has_momentum, has_momentum ? span.momentum[i] : none, d);
}

template <Format kFormat>
void step_format(const StepSpan& span) {
    const StepConstants& c = *span.constants;
    float sum[wire::kLargestBlock];
    for (int64_t i = 0; i < span.num_blocks * span.block_size; ++i) {
        const int64_t block = i / span.block_size, j = i % span.block_size;
        if (j == 0) sum_block<kFormat>(span.terms, span.num_terms, block, span.block_size, sum);
        const float g = sum[j];
        if (is_arrival(c.optimizer)) {
            arrive(span, i, g);
            continue;
        }
        const float step = c.optimizer == Optimizer::kSgd ? c.lr * g
                           : c.optimizer == Optimizer::kAdam
                               ? adam_update(c, span.momentum[i], span.second[i], g)
                               : momentum_update(c, span.momentum[i], g);
        span.outer[i] -= step;
        merge_element(span.params, span.param_dtype, i, span.outer[i], c.alpha, c.one_minus_alpha);
    }
}

void merge(const MergeSpan& span) {
    for (int64_t i = 0; i < span.num_elements; ++i) {
        merge_element(span.params, span.param_dtype, i, span.outer[i], span.alpha,
                      span.one_minus_alpha);
    }
}

int64_t norms(const NormsSpan& span) {
    int64_t num_bad = 0;
    for (int64_t i = 0; i < span.num_elements; ++i) {
        const float param = load(span.params, span.param_dtype, i);
        const float x =
            span.outer != nullptr ? as_written(span.param_dtype, span.outer[i]) - param : param;
        const bool is_bad = wire::is_bad(x);
        num_bad += is_bad;
        const double value = is_bad ? 0.0 : static_cast<double>(x);
        span.lanes[i % kNormLanes] += value * value;
    }
    return num_bad;
}

void dot(const DotSpan& span) {
    for (int64_t i = 0; i < span.num_elements; ++i) {
        span.lanes[i % kNormLanes] += static_cast<double>(span.a[i]) * span.b[i];
    }
}

void dot_codes(const CodeDotSpan& span) {
    for (int k = 0; k < span.num_others; ++k) {
        const int8_t* other = span.others[k];
        int32_t sum = 0;
        for (int64_t i = 0; i < span.num_elements; ++i) sum += span.a[i] * other[i];
        span.sums[k] = sum;
    }
}

void digest(const DigestSpan& span) {
    DigestSums sums = *span.sums;
    uint64_t key = wire::digest_key(span.first_word);
    for (int64_t i = 0; i < span.num_words; ++i, key += wire::kDigestStep) {
        uint64_t word;
        __builtin_memcpy(&word, span.data + 8 * i, sizeof(word));
        sums.product += wire::digest_product(word, key);
        sums.sum += word;
    }
    *span.sums = sums;
}

// Calls f with the format as a compile-time constant.
template <template <Format> class Run, class Span>
auto by_format(const Span& span) {
    switch (span.format) {
        case Format::kFp32:
            return Run<Format::kFp32>::run(span);
        case Format::kBf16:
            return Run<Format::kBf16>::run(span);
        case Format::kFp16:
            return Run<Format::kFp16>::run(span);
        case Format::kFp8E4m3:
            return Run<Format::kFp8E4m3>::run(span);
        case Format::kFp8E5m2:
            return Run<Format::kFp8E5m2>::run(span);
        case Format::kInt8:
            return Run<Format::kInt8>::run(span);
        case Format::kInt4:
            return Run<Format::kInt4>::run(span);
        case Format::kE3m0:
            return Run<Format::kE3m0>::run(span);
        case Format::kInt2r:
            return Run<Format::kInt2r>::run(span);
        case Format::kInt1r:
            return Run<Format::kInt1r>::run(span);
        case Format::kSub2:
            return Run<Format::kSub2>::run(span);
        case Format::kSub4:
            return Run<Format::kSub4>::run(span);
        case Format::kSub8:
            return Run<Format::kSub8>::run(span);
        case Format::kSub16:
            return Run<Format::kSub16>::run(span);
        case Format::kTopk32:
            return Run<Format::kTopk32>::run(span);
        case Format::kTopk64:
            return Run<Format::kTopk64>::run(span);
        case Format::kTopk128:
            return Run<Format::kTopk128>::run(span);
        default:
            return Run<Format::kTopk256>::run(span);
    }
}

template <Format kFormat>
struct Encode {
    static int64_t run(const EncodeSpan& span) { return encode_format<kFormat>(span); }
};
template <Format kFormat>
struct Decode {
    static void run(const DecodeSpan& span) { decode_format<kFormat>(span); }
};
template <Format kFormat>
struct Step {
    static void run(const StepSpan& span) { step_format<kFormat>(span); }
};

int64_t encode(const EncodeSpan& span) { return by_format<Encode>(span); }
void decode(const DecodeSpan& span) { by_format<Decode>(span); }
void outer_step(const StepSpan& span) { by_format<Step>(span); }

}  // namespace

const Kernels kScalarKernels{"scalar", encode, decode, outer_step, merge,
                             norms,    dot,    digest, dot_codes,  kPlainFloors};

}  // namespace diloco::codec
