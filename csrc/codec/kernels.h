// The interface of the kernels, which each implementation has (scalar, AVX2, AVX-512). A kernel
// works on complete blocks that are contiguous in memory. Its caller, codec.cpp, divides fragments
// into such spans, and has cleared flush-to-zero (fp_environment.h). Every implementation writes
// the same bytes.
#pragma once

#include <cstdint>

#include "wire/format.h"

namespace diloco::codec {

enum class DType : int { kFp32, kBf16, kFp16 };
// kAccumulate and kCommit are for arrivals at the asynchronous server: kAccumulate only adds an
// arrival to a sum, kCommit adds it and then takes the outer step.
enum class Optimizer : int { kSgd, kHeavyBall, kNesterov, kAdam, kAccumulate, kCommit };

// Blocks of a payload, and the factor by which their decoded values are multiplied.
struct Term {
    const uint8_t* scales;  // one bf16 per block; not used in formats without scales
    const uint8_t* codes;
    const uint8_t* signs;  // sign bits of a block (wire/rotation.h), in rotated formats only
    float coefficient;
};

// Encodes c(outer) - params + residual, where c() rounds to the dtype of the parameters. Without
// `outer` it encodes params + residual, and with terms their weighted sum + residual.
struct EncodeSpan {
    wire::Format format;
    int block_size;
    int64_t num_blocks;
    const float* outer;  // or null
    const void* params;  // or null when there are terms
    DType param_dtype;
    const Term* terms;
    int num_terms;
    const void* residual;   // or null
    void* new_residual;     // or null
    DType residual_dtype;   // fp32 or bf16
    bool streams_codes;     // write the codes by non-temporal stores; they are 16-byte aligned
    bool streams_residual;  // the same for the new residual, which is fp32 and 64-byte aligned
    uint8_t* scales;
    uint8_t* codes;
    bool is_stochastic;
    uint64_t element;  // index of the first element in the fragment
    uint64_t key;
    const uint8_t* signs;  // sign bits for this encoding, as in Term
};

// out = sum of coefficient * decoded value.
struct DecodeSpan {
    wire::Format format;
    int block_size;
    int64_t num_blocks;
    const Term* terms;
    int num_terms;
    void* out;
    DType out_dtype;
    bool streams;  // write `out` by non-temporal stores; it is fp32 and 64-byte aligned
};

struct StepConstants {
    Optimizer optimizer;
    float lr;     // Adam: lr / (1 - beta1^step)
    float mu;     // Adam: beta1
    float clip;   // +Inf: none
    float alpha;  // weight of the local value
    float one_minus_alpha;
    // The next five members are for Adam only.
    float one_minus_beta1;
    float beta2;
    float one_minus_beta2;
    float sqrt_correction;  // sqrt(1 - beta2^step)
    float eps;
    // The next three members are for kCommit only: the weights in step_rule.h's commit_update().
    float direct;   // weight of the sum of arrivals
    float ahead;    // weight of the new momentum
    float behind;   // weight of the old momentum
    bool is_first;  // kAccumulate, kCommit: this is the first arrival, `second` has no sum yet
};

// Takes an outer step with the weighted sum of terms as its gradient, then merges the new outer
// values into the parameters (not for kAccumulate and kCommit).
struct StepSpan {
    wire::Format format;
    int block_size;
    int64_t num_blocks;
    const Term* terms;
    int num_terms;
    float* outer;
    float* momentum;  // or null (SGD)
    float* second;    // Adam: exp_avg_sq; kAccumulate, kCommit: the sum of arrivals; else null
    void* params;
    DType param_dtype;
    bool streams_params;  // write params by non-temporal stores; they are fp32 and 64-byte aligned
    const StepConstants* constants;
};

// params = alpha * params + (1 - alpha) * outer, rounded to the parameters' dtype in the direction
// of outer. If alpha is 0, params = outer, rounded to nearest.
struct MergeSpan {
    int64_t num_elements;  // a multiple of 32
    const float* outer;
    void* params;
    DType param_dtype;
    float alpha;
    float one_minus_alpha;
    bool streams_params;
};

// Adds the squares of the elements of c(outer) - params, or without `outer` of params, that are not
// bad (wire/scale.h), in fp64, to 16 partial sums: element i to lanes[i mod 16].
struct NormsSpan {
    int64_t num_elements;  // a multiple of 32
    const float* outer;    // or null
    const void* params;
    DType param_dtype;
    double* lanes;
};

// Adds the products a[i] * b[i], which are exact in fp64, to 16 partial sums: product i to
// lanes[i mod 16].
struct DotSpan {
    int64_t num_elements;  // a multiple of 32
    const float* a;
    const float* b;
    double* lanes;
};

// sums[k] = the sum of a[i] * others[k][i] over int8 codes. The sums are exact in 32 bits, since
// there are at most 2^16 elements.
struct CodeDotSpan {
    int64_t num_elements;
    const int8_t* a;
    const int8_t* const* others;
    int num_others;
    int32_t* sums;
};

// Sums of squares are computed over chunks of this many elements, and the chunks' sums added in
// order, so that the number of threads does not change the result.
constexpr int64_t kNormChunk = 65536;
// Partial sums of a chunk; element i is added to sum i % kNormLanes.
constexpr int kNormLanes = 16;

// The sum of the lanes, in a fixed order: adds the upper half to the lower half until one is left.
inline double sum_lanes(double* lanes) {
    for (int half = kNormLanes / 2; half > 0; half /= 2) {
        for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
    }
    return lanes[0];
}

// The two sums of a digest, mod 2^64 (wire/digest.h).
struct DigestSums {
    uint64_t product = 0;
    uint64_t sum = 0;
};

// Adds 64-bit words to the sums; `data` needs no alignment.
struct DigestSpan {
    const uint8_t* data;
    int64_t num_words;
    uint64_t first_word;  // index of the first word among all words of the digest
    DigestSums* sums;
};

struct Floor;  // bench/floors.h

struct Kernels {
    const char* name;
    int64_t (*encode)(const EncodeSpan&);  // returns the number of bad elements
    void (*decode)(const DecodeSpan&);
    void (*outer_step)(const StepSpan&);
    void (*merge)(const MergeSpan&);
    int64_t (*norms)(const NormsSpan&);  // returns the number of bad elements
    void (*dot)(const DotSpan&);
    void (*digest)(const DigestSpan&);
    void (*dot_codes)(const CodeDotSpan&);
    const Floor* floors;  // loops for benchmarks with the same instruction set; ends without a name
};

extern const Kernels kScalarKernels;
#if defined(DILOCO_X86)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
#endif

}  // namespace diloco::codec
