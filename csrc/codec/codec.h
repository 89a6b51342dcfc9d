// The CPU codec: operators over ranges of a fragment, without torch.
// A fragment is a list of tensors, taken as one concatenated tensor. Each function works on
// elements [begin, end) on the calling thread; begin is a multiple of the block size, and so is end
// unless it is the fragment's end. Different threads may work on ranges that do not overlap at the
// same time.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "codec/kernels.h"

namespace diloco::codec {

// One tensor of a fragment: elements [begin, begin + size) of the concatenation.
struct Segment {
    void* data;
    DType dtype;
    int64_t begin;
    int64_t size;
};

struct Fragment {
    const Segment* segments;  // in order, without gaps; empty ones are allowed
    int64_t num_segments;
    int64_t num_elements;
};

// How runs lie in a payload.
struct RunLayout {
    wire::Format format;
    int block_size;
    int64_t run_elements;
};

struct EncodeArgs {
    const Kernels* kernels;
    bool is_large;  // the data exceeds the caches: results are written by non-temporal stores
    RunLayout layout;
    const float* outer;  // or null
    Fragment params;     // if num_terms > 0, the weighted sum of the payloads is encoded instead
    const uint8_t* const* term_payloads;
    const float* coefficients;
    int num_terms;
    uint8_t* payload;
    const void* residual;  // or null
    void* new_residual;    // or null
    DType residual_dtype;
    bool is_stochastic;
    uint64_t index_begin;  // the index of element 0 in the fragment, for random bits
    uint64_t key;          // for random bits or random signs
};

struct DecodeArgs {
    const Kernels* kernels;
    bool is_large;  // the data exceeds the caches: results are written by non-temporal stores
    RunLayout layout;
    const uint8_t* const* term_payloads;
    const float* coefficients;
    int num_terms;
    Fragment outs;
};

struct StepArgs {
    const Kernels* kernels;
    bool is_large;  // the data exceeds the caches: results are written by non-temporal stores
    RunLayout layout;
    const uint8_t* const* term_payloads;
    const float* coefficients;
    int num_terms;
    float* outer;
    float* momentum;  // or null
    float* second;    // or null
    Fragment params;
    StepConstants constants;
};

struct MergeArgs {
    const Kernels* kernels;
    bool is_large;  // the data exceeds the caches: results are written by non-temporal stores
    const float* outer;
    Fragment params;
    float alpha;
    float one_minus_alpha;
};

struct NormsArgs {
    const Kernels* kernels;
    const float* outer;  // or null
    Fragment params;
};

struct GramArgs {
    const Kernels* kernels;
    RunLayout layout;
    const uint8_t* const* term_payloads;
    int num_terms;  // at most kMaxGramTerms
    int first_row;  // products whose both payloads come before this one are left out
};

struct Norms {
    double squared;
    int64_t nonfinite;
};

constexpr int kMaxTerms = 1024;
constexpr int kMaxGramTerms = 64;
// The number of pairs (i, j) with j <= i, the entries of a symmetric matrix.
constexpr int num_pairs(int num_terms) { return num_terms * (num_terms + 1) / 2; }
// The block size of merge() and norms(), which have no wire format.
constexpr int kPlainBlock = 256;

// Returns the number of bad elements (wire/scale.h).
int64_t encode(const EncodeArgs& args, int64_t begin, int64_t end);
void decode(const DecodeArgs& args, int64_t begin, int64_t end);
void outer_step(const StepArgs& args, int64_t begin, int64_t end);
void merge(const MergeArgs& args, int64_t begin, int64_t end);
// The squared norm of c(outer) - params, or of params, over one chunk: begin is a multiple of
// kNormChunk, and end at most begin + kNormChunk. c() is as_written() of step_rule.h.
Norms norms(const NormsArgs& args, int64_t begin, int64_t end);
// The dot products of pairs of payloads over one chunk. `products` gets the pairs (0, 0), (1, 0),
// (1, 1), (2, 0) and so on; the rows before `first_row` become zeros. begin is a multiple of the
// block size, and end at most begin + kNormChunk.
void gram(const GramArgs& args, int64_t begin, int64_t end, double* products);

// The implementation called `name` ("": the fastest that this machine runs), or null when it is
// unknown or cannot run.
const Kernels* find_kernels(const std::string& name);
// The implementations that run on this machine, slowest first.
const std::vector<const Kernels*>& available_kernels();

}  // namespace diloco::codec
