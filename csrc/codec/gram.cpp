// The dot products of pairs of payloads. The products of each block are summed first, and then the
// blocks' sums are added in order, which makes the result independent of the implementation.
#include <algorithm>
#include <vector>

#include "codec/codec.h"
#include "codec/fp_environment.h"
#include "codec/terms.h"

namespace diloco::codec {
namespace {

// The number of elements of every payload that are decoded at a time, a multiple of every block
// size.
constexpr int64_t kGramStretch = wire::kLargestBlock;
// With scales below this bound, scale * code is finite in fp32.
constexpr float kLargestPlainScale = 0x1p120f;
// dot_codes() gives exact sums only of so many elements (codec/kernels.h).
static_assert(wire::kLargestBlock <= 1 << 16);

// The index of the pair (row, 0) among the products.
int first_pair(int row) { return num_pairs(row); }

// Decodes elements [begin, end) of one payload, and appends zeros up to kGramStretch values.
void decode_stretch(const GramArgs& args, int term, int64_t begin, int64_t end, float* values) {
    constexpr float kOne = 1.0f;
    Segment segment{values, DType::kFp32, begin, end - begin};
    DecodeArgs own{args.kernels, false, args.layout,       args.term_payloads + term,
                   &kOne,        1,     {&segment, 1, end}};
    decode(own, begin, end);
    std::fill(values + (end - begin), values + kGramStretch, 0.0f);
}

// Adds the products over [begin, end), at most kGramStretch elements, by decoding the payloads.
// Works for all formats.
void add_decoded(const GramArgs& args, int64_t begin, int64_t end, double* products) {
    static thread_local std::vector<float> scratch;
    scratch.resize(static_cast<size_t>(args.num_terms * kGramStretch));
    const int64_t block = args.layout.block_size, num_blocks = (end - begin + block - 1) / block;
    for (int i = 0; i < args.num_terms; ++i) {
        float* values = scratch.data() + i * kGramStretch;
        decode_stretch(args, i, begin, end, values);
        for (int j = 0; i >= args.first_row && j <= i; ++j) {
            const float* other = scratch.data() + j * kGramStretch;
            double total = products[first_pair(i) + j];
            for (int64_t at = 0; at < num_blocks * block; at += block) {
                double lanes[kNormLanes] = {};
                args.kernels->dot({block, values + at, other + at, lanes});
                total += sum_lanes(lanes);
            }
            products[first_pair(i) + j] = total;
        }
    }
}

// Adds the products of one block of int8 payloads, computed from the codes as integers. That equals
// the result of add_decoded(), because decoded values have at most 16 significant bits, so that
// their sums over a block are exact in fp64. Returns false, and adds nothing, if a scale is too
// large.
bool add_codes(const GramArgs& args, int64_t begin, int64_t end, double* products) {
    const PayloadPosition at = locate(args.layout, begin);
    const int8_t* codes[kMaxGramTerms];
    double scales[kMaxGramTerms];
    for (int i = 0; i < args.num_terms; ++i) {
        const uint8_t* payload = args.term_payloads[i];
        uint16_t bits;
        std::memcpy(&bits, payload + at.scales, sizeof(bits));
        const float scale = wire::scale_value(bits);
        if (!(scale > -kLargestPlainScale && scale < kLargestPlainScale)) return false;
        scales[i] = scale;
        codes[i] = reinterpret_cast<const int8_t*>(payload + at.codes);
    }
    int32_t sums[kMaxGramTerms];
    for (int i = args.first_row; i < args.num_terms; ++i) {
        args.kernels->dot_codes({end - begin, codes[i], codes, i + 1, sums});
        double* row = products + first_pair(i);
        for (int j = 0; j <= i; ++j) row[j] += scales[i] * scales[j] * sums[j];
    }
    return true;
}

}  // namespace

void gram(const GramArgs& args, int64_t begin, int64_t end, double* products) {
    const IeeeScope ieee;
    std::fill(products, products + num_pairs(args.num_terms), 0.0);
    const bool has_integers = args.layout.format == wire::Format::kInt8;
    const int64_t stretch = has_integers ? args.layout.block_size : kGramStretch;
    for (int64_t at = begin; at < end; at += stretch) {
        const int64_t last = std::min(at + stretch, end);
        if (!has_integers || !add_codes(args, at, last, products)) {
            add_decoded(args, at, last, products);
        }
    }
}

}  // namespace diloco::codec
