// The kernels of one implementation (scalar, AVX2, AVX-512), over whole blocks that lie
// contiguously in memory. Segments, short blocks, runs and threads are the driver's business
// (codec.cpp). Every implementation writes the same bytes; the caller has cleared flush-to-zero
// (fp_environment.h).
#pragma once

#include <cstdint>

#include "wire/format.h"

namespace diloco::codec {

enum class DType : int { kFp32, kBf16, kFp16 };
// kAccumulate and kCommit: an arrival that is only added up, and one that ends with a step.
enum class Optimizer : int { kSgd, kHeavyBall, kNesterov, kAdam, kAccumulate, kCommit };

// A payload's blocks and the factor of their decoded values.
struct Term {
    const uint8_t* scales;  // bf16, one a block; unused by the formats without scales
    const uint8_t* codes;
    const uint8_t* signs;  // bits, one an element of a block (wire/rotation.h); rotated formats
    float coefficient;
};

// Encodes x = c(outer) - params (or params, or the weighted sum of `terms`) + residual, where c(x)
// is x rounded to the dtype of the parameters.
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
    bool streams_codes;     // store past the caches; codes are 16-byte aligned
    bool streams_residual;  // likewise; the new residual is fp32 and 64-byte aligned
    uint8_t* scales;
    uint8_t* codes;
    bool is_stochastic;
    uint64_t element;  // index of the first element in the fragment
    uint64_t key;
    const uint8_t* signs;  // of this encoding, as in Term
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
    bool streams;  // store past the caches; out is fp32 and 64-byte aligned
};

struct StepConstants {
    Optimizer optimizer;
    float lr;     // Adam: lr / (1 - beta1^step)
    float mu;     // Adam: beta1
    float clip;   // +Inf: none
    float alpha;  // weight of the local value
    float one_minus_alpha;
    float one_minus_beta1;  // Adam only, as the next four
    float beta2;
    float one_minus_beta2;
    float sqrt_correction;  // sqrt(1 - beta2^step)
    float eps;
    float direct;   // kCommit only, as the next two: weights of what was added up,
    float ahead;    // of the new momentum,
    float behind;   // and of the old one
    bool is_first;  // kAccumulate, kCommit: nothing is pending yet
};

// Outer optimizer on g = sum of terms, then the merge into the parameters.
struct StepSpan {
    wire::Format format;
    int block_size;
    int64_t num_blocks;
    const Term* terms;
    int num_terms;
    float* outer;
    float* momentum;  // or null (SGD)
    float* second;    // Adam's exp_avg_sq; what is pending; else null
    void* params;
    DType param_dtype;
    bool streams_params;  // store past the caches; params are fp32 and 64-byte aligned
    const StepConstants* constants;
};

// params = alpha * params + (1 - alpha) * outer, rounded toward c(outer); outer, rounded to
// nearest, when alpha is 0.
struct MergeSpan {
    int64_t num_elements;  // a multiple of 32
    const float* outer;
    void* params;
    DType param_dtype;
    float alpha;
    float one_minus_alpha;
    bool streams_params;
};

// Adds the squares of the good elements of c(outer) - params, in fp64, to 16 lanes: element i goes
// to lane i mod 16.
struct NormsSpan {
    int64_t num_elements;  // a multiple of 32
    const float* outer;    // or null
    const void* params;
    DType param_dtype;
    double* lanes;
};

// Adds the products a * b, in fp64 and so exact, to 16 lanes: element i goes to lane i mod 16.
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

// Sums of squares are taken over chunks of this many elements and added in order.
constexpr int64_t kNormChunk = 65536;
// Partial sums of a chunk; element i is added to sum i % kNormLanes.
constexpr int kNormLanes = 16;

// Adds the upper half of the lanes to the lower half until one is left.
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

// Adds whole words to the sums; the data may lie at any address.
struct DigestSpan {
    const uint8_t* data;
    int64_t num_words;
    uint64_t first_word;  // index of the first one
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
    const Floor* floors;  // plain loops with the same instructions; the last one has no name
};

extern const Kernels kScalarKernels;
#if defined(DILOCO_X86)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
#endif

}  // namespace diloco::codec
