// The dot products of all pairs of payloads.
#include <algorithm>
#include <vector>

#include "codec/codec.h"
#include "codec/fp_environment.h"

namespace diloco::codec {
namespace {

// Elements of every payload that are decoded before their products are taken; all blocks divide it.
constexpr int64_t kGramStretch = wire::kLargestBlock;

// The decoded stretches of all payloads, and the lanes of all pairs; reused by every call.
struct GramScratch {
    std::vector<float> values;
    std::vector<double> lanes;
};

// Decodes elements [begin, end) of one payload and fills the stretch up with zeros.
void decode_stretch(const GramArgs& args, int term, int64_t begin, int64_t end, float* values) {
    constexpr float kOne = 1.0f;
    Segment segment{values, DType::kFp32, begin, end - begin};
    DecodeArgs own{args.kernels, false, args.layout,       args.term_payloads + term,
                   &kOne,        1,     {&segment, 1, end}};
    decode(own, begin, end);
    std::fill(values + (end - begin), values + kGramStretch, 0.0f);
}

}  // namespace

void gram(const GramArgs& args, int64_t begin, int64_t end, double* products) {
    const IeeeScope ieee;
    static thread_local GramScratch scratch;
    const int pairs = num_pairs(args.num_terms);
    scratch.values.resize(static_cast<size_t>(args.num_terms * kGramStretch));
    scratch.lanes.assign(static_cast<size_t>(pairs * kNormLanes), 0.0);
    for (int64_t at = begin; at < end; at += kGramStretch) {
        double* lanes = scratch.lanes.data();
        for (int i = 0; i < args.num_terms; ++i) {
            float* values = scratch.values.data() + i * kGramStretch;
            decode_stretch(args, i, at, std::min(at + kGramStretch, end), values);
            for (int j = 0; j <= i; ++j, lanes += kNormLanes) {
                const float* other = scratch.values.data() + j * kGramStretch;
                args.kernels->dot({kGramStretch, values, other, lanes});
            }
        }
    }
    for (int pair = 0; pair < pairs; ++pair) {
        products[pair] = sum_lanes(scratch.lanes.data() + pair * kNormLanes);
    }
}

}  // namespace diloco::codec
