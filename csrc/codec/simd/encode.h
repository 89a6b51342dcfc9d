// Encoding over the class Vec of vec_avx2.h or vec_avx512.h, whichever is included before. While
// a block's input is read into the first-level cache, its largest magnitude is found; then the
// block is scaled, rounded and packed from the cache.
#pragma once

#include "codec/simd/inputs.h"
#include "codec/simd/round.h"

namespace diloco::codec {
namespace {

// Stores the codes of kUnroll elements.
template <Format kFormat>
DILOCO_INLINE void store_codes(uint8_t* codes, const Vec::I* code) {
    constexpr int kBits = wire::code_bits(kFormat);
    if constexpr (kBits == 8) return Vec::store_bytes(codes, code);
    if constexpr (kBits == 4) return Vec::store_nibbles(codes, code);
    for (int k = 0; k < kUnroll; k += Vec::kWidth) {
        if constexpr (kBits == 32) {
            Vec::store(reinterpret_cast<float*>(codes) + k, Vec::as_float(*code++));
        } else {
            Vec::store_u16(reinterpret_cast<uint16_t*>(codes) + k, *code++);
        }
    }
}

DILOCO_INLINE void store_residual(const EncodeSpan& span, int64_t i, Vec::F value) {
    if (span.residual_dtype != DType::kFp32) {
        Vec::store_bf16(static_cast<uint16_t*>(span.new_residual) + i, value);
    } else if (span.streams_residual) {
        Vec::stream(static_cast<float*>(span.new_residual) + i, value);
    } else {
        Vec::store(static_cast<float*>(span.new_residual) + i, value);
    }
}

// Writes packed codes to the payload; `bytes` is a multiple of 16.
DILOCO_INLINE void write_codes(const EncodeSpan& span, uint8_t* target, const uint8_t* packed,
                               int64_t bytes) {
    constexpr int64_t kLine = 64;
    if (!span.streams_codes) {
        __builtin_memcpy(target, packed, static_cast<size_t>(bytes));
    } else if (bytes % kLine == 0 && reinterpret_cast<uintptr_t>(target) % kLine == 0) {
        for (int64_t i = 0; i < bytes; i += kLine) Vec::stream_line(target + i, packed + i);
    } else {
        for (int64_t i = 0; i < bytes; i += 16) {
            _mm_stream_si128(reinterpret_cast<__m128i*>(target + i),
                             _mm_load_si128(reinterpret_cast<const __m128i*>(packed + i)));
        }
    }
}

// A block is encoded in units of kLongUnit elements, or kShortUnit if it has fewer. Random bits are
// made one unit ahead, so that the processor computes the long chain of Philox rounds beside the
// rounding.
constexpr int kLongUnit = 128;
constexpr int kShortUnit = 32;

// The encoder's buffers in the first-level cache: the values x of two blocks, codes and random
// bytes.
//
// A processor delays a load if an earlier store has the same 12 low address bits, until it knows
// that the addresses differ. So the buffers are placed by the inputs' addresses: the store of an
// element has the same 12 low bits as its load from the input, and no load reaches these bits again
// for 4 KiB. With buffers at arbitrary addresses an encoder can lose a third of its speed.
class Scratch {
  public:
    explicit Scratch(const EncodeSpan& span) : block_bytes_(4 * span.block_size) {
        // With two inputs, follow the one whose low address bits come first, modulo 4 KiB.
        const uintptr_t params = low_bits(span.params), outer = low_bits(span.outer);
        const bool is_outer_behind =
            span.outer != nullptr && ((params - outer) & kMask) < kPage / 2;
        begin_ = (is_outer_behind ? outer : params) & ~uintptr_t{63};
    }
    float* x(int64_t block) {
        const uintptr_t at = (begin_ + static_cast<uintptr_t>(block * block_bytes_)) & kMask;
        return reinterpret_cast<float*>(x_[block & 1] + at);
    }
    uint8_t* packed() { return packed_ + ((begin_ - 512) & kMask); }
    // The random bytes of even and of odd units; fill_random() may write kLongUnit bytes.
    uint8_t* random(int parity) { return random_ + ((begin_ - 1024) & kMask) + parity * kLongUnit; }

  private:
    static constexpr uintptr_t kPage = 4096, kMask = kPage - 1;
    static constexpr size_t kBlockBytes = wire::kMaxBlockSize * sizeof(float);
    static uintptr_t low_bits(const void* pointer) {
        return reinterpret_cast<uintptr_t>(pointer) & kMask;
    }

    const int64_t block_bytes_;
    uintptr_t begin_;
    alignas(kPage) uint8_t x_[2][kPage + kBlockBytes];
    alignas(kPage) uint8_t packed_[kPage + kBlockBytes];
    alignas(kPage) uint8_t random_[kPage + 2 * kLongUnit];
};

struct BlockScale {
    Vec::F scale;
    Vec::F inverse;
};

// How many bytes ahead of its reads an encoder prefetches its inputs, found by measurement. If
// codes take few instructions, loads run ahead by themselves, and less is needed.
template <Format kFormat, bool kIsStochastic>
constexpr int kBytesAhead =
    (kFormat == Format::kInt8 || kFormat == Format::kInt4) && !kIsStochastic ? 512 : 2048;

// Turns kUnroll elements of x into codes, and writes their errors to the new residual from element
// i on.
template <Format kFormat, bool kIsStochastic, bool kHasNewResidual>
DILOCO_INLINE void quantise(const EncodeSpan& span, const BlockScale& factors, const float* x,
                            const uint8_t* random, uint8_t* packed, int64_t i) {
    using Round = Rounding<kFormat, kIsStochastic>;
    constexpr int kVectors = kUnroll / Vec::kWidth;
    Vec::I code[kVectors];
    for (int k = 0; k < kVectors; ++k) {
        const int n = k * Vec::kWidth;
        const Vec::F v = Vec::load(x + n);
        const Vec::F y = wire::has_scales(kFormat) ? Vec::mul(v, factors.inverse) : v;
        code[k] = Round::code(y, kIsStochastic ? Vec::load_random(random + n) : Vec::set(0));
        if constexpr (kHasNewResidual) {
            Vec::F decoded = Round::value(code[k]);
            if constexpr (wire::has_scales(kFormat)) decoded = Vec::mul(decoded, factors.scale);
            store_residual(span, i + n, Vec::sub(v, decoded));
        }
    }
    store_codes<kFormat>(packed, code);
}

// Encodes a block that may have a bad element, since its largest magnitude is above good_limit().
// Such blocks are rare, so this function goes element by element.
template <Format kFormat, bool kIsStochastic>
[[gnu::noinline, gnu::cold]] int64_t encode_bad_block(const EncodeSpan& span, int64_t block,
                                                      const float* x) {
    const int64_t begin = block * span.block_size;
    int64_t num_bad = 0;
    _mm_sfence();  // orders non-temporal stores of this block before the stores that overwrite them
    for (int j = 0; j < span.block_size; ++j) {
        uint32_t code = 0;
        bool is_bad = wire::is_bad(x[j]);
        if constexpr (!wire::has_scales(kFormat)) {
            constexpr int kBytes = wire::code_bits(kFormat) / 8;
            const uint64_t element = span.element + static_cast<uint64_t>(begin + j);
            if (!is_bad) {
                code = kIsStochastic ? wire::encode_stochastic<kFormat>(
                                           x[j], wire::random16(element, span.key))
                                     : wire::encode_nearest<kFormat>(x[j]);
            }
            is_bad = is_bad || wire::is_code_bad<kFormat>(code);
            if (is_bad) code = 0;
            __builtin_memcpy(span.codes + (begin + j) * kBytes, &code, kBytes);
        }
        num_bad += is_bad;
        if (span.new_residual == nullptr) continue;
        const float rest = x[j] - wire::code_value<kFormat>(code);
        if (span.residual_dtype == DType::kFp32) {
            static_cast<float*>(span.new_residual)[begin + j] = rest;
        } else {
            static_cast<uint16_t*>(span.new_residual)[begin + j] = wire::bf16_nearest(rest);
        }
    }
    if constexpr (wire::has_scales(kFormat)) {
        __builtin_memset(span.codes + wire::code_bytes(kFormat, begin), 0,
                         static_cast<size_t>(wire::code_bytes(kFormat, span.block_size)));
    }
    return num_bad;
}

// The magnitude, as fp32 bits, up to which no element is bad. In fp16, larger elements that round
// to 65504 are not bad either.
constexpr uint32_t good_limit(Format format) {
    return format == Format::kFp16 ? 0x477FE000u /* 65504 */ : wire::kLargestGoodBits;
}

// Writes the block's scale to the payload, and returns it with its inverse.
template <Format kFormat>
DILOCO_INLINE BlockScale write_scale(const EncodeSpan& span, int64_t block, uint32_t largest,
                                     bool is_good) {
    if constexpr (!wire::has_scales(kFormat)) return {Vec::set(1.0f), Vec::set(1.0f)};
    const uint16_t bits = is_good ? wire::scale_of(wire::bits_float(largest), wire::qmax(kFormat))
                                  : wire::kSmallestScale;
    __builtin_memcpy(span.scales + 2 * block, &bits, sizeof(bits));
    const float scale = wire::scale_value(bits);
    return {Vec::set(scale), Vec::set(1.0f / scale)};
}

template <Format kFormat, bool kIsStochastic, bool kHasNewResidual, class Input, int kUnit>
int64_t encode_units(const EncodeSpan& argument) {
    // A local copy: the compiler knows that stores of bytes cannot change it, and keeps its members
    // in registers.
    const EncodeSpan span = argument;
    Scratch scratch(span);
    uint8_t* const packed = scratch.packed();
    uint8_t* const random[2] = {scratch.random(0), scratch.random(1)};
    const PhiloxKeys keys(span.key);
    const int size = span.block_size;
    if constexpr (kIsStochastic) fill_random(span.element, keys, kUnit, random[0]);
    constexpr int64_t kUnitBytes = wire::code_bytes(kFormat, kUnit);
    int parity = 0;
    int64_t num_bad = 0;
    uint32_t largest = load_block<Input>(argument, 0, scratch.x(0));
    for (int64_t block = 0; block < span.num_blocks; ++block) {
        const int64_t begin = block * size;
        // After the last block there is no next one: the last block is loaded again, and not used.
        const Input next(span, block + 1 < span.num_blocks ? block + 1 : block);
        const float* current = scratch.x(block);
        float* following = scratch.x(block + 1);
        const bool is_good = largest <= good_limit(kFormat);
        const BlockScale factors = write_scale<kFormat>(span, block, largest, is_good);
        uint8_t* codes = span.codes + wire::code_bytes(kFormat, begin);
        Vec::I maxima = Vec::set(0);
        for (int j = 0; j < size; j += kUnit) {
            if constexpr (kIsStochastic) {
                fill_random(span.element + static_cast<uint64_t>(begin + j + kUnit), keys, kUnit,
                            random[parity ^ 1]);
            }
            maxima = Vec::max(maxima, load_unit<kUnit>(next, j, following));
            for (int n = j; n < j + kUnit; n += kUnroll) {
                next.template prefetch<kBytesAhead<kFormat, kIsStochastic>>(n);
                quantise<kFormat, kIsStochastic, kHasNewResidual>(
                    span, factors, current + n, random[parity] + n - j,
                    packed + wire::code_bytes(kFormat, n), begin + n);
            }
            // Writing each unit's codes at once spreads the memory traffic, which is faster than
            // writing all of them after the block.
            if (span.streams_codes && is_good) {
                const int64_t done = wire::code_bytes(kFormat, j);
                write_codes(span, codes + done, packed + done, kUnitBytes);
            }
            parity ^= 1;
        }
        if (!is_good) {
            num_bad += encode_bad_block<kFormat, kIsStochastic>(argument, block, current);
        } else if (!span.streams_codes) {
            write_codes(span, codes, packed, wire::code_bytes(kFormat, size));
        }
        largest = Vec::largest(maxima);
    }
    return num_bad;
}

template <Format kFormat, bool kIsStochastic, bool kHasNewResidual, class Input>
int64_t encode_blocks(const EncodeSpan& span) {
    return span.block_size < kLongUnit
               ? encode_units<kFormat, kIsStochastic, kHasNewResidual, Input, kShortUnit>(span)
               : encode_units<kFormat, kIsStochastic, kHasNewResidual, Input, kLongUnit>(span);
}

// Encodes the weighted sum of any number of payloads, one block after the other.
template <Format kFormat, bool kIsStochastic, bool kHasNewResidual>
int64_t encode_sum(const EncodeSpan& argument) {
    const EncodeSpan span = argument;
    alignas(64) float x[wire::kMaxBlockSize];
    alignas(64) uint8_t packed[wire::kMaxBlockSize * sizeof(float)];
    alignas(64) uint8_t random[kIsStochastic ? kLongUnit : 1];
    const PhiloxKeys keys(span.key);
    const int size = span.block_size, unit = size < kLongUnit ? kShortUnit : kLongUnit;
    int64_t num_bad = 0;
    for (int64_t block = 0; block < span.num_blocks; ++block) {
        const int64_t begin = block * size;
        const uint32_t largest = load_sum<kFormat>(argument, block, x);
        const bool is_good = largest <= good_limit(kFormat);
        const BlockScale factors = write_scale<kFormat>(span, block, largest, is_good);
        uint8_t* codes = span.codes + wire::code_bytes(kFormat, begin);
        for (int j = 0; j < size; j += unit) {
            if constexpr (kIsStochastic) {
                fill_random(span.element + static_cast<uint64_t>(begin + j), keys, unit, random);
            }
            for (int n = j; n < j + unit; n += kUnroll) {
                quantise<kFormat, kIsStochastic, kHasNewResidual>(
                    span, factors, x + n, random + (kIsStochastic ? n - j : 0),
                    packed + wire::code_bytes(kFormat, n), begin + n);
            }
        }
        if (is_good) {
            write_codes(span, codes, packed, wire::code_bytes(kFormat, size));
        } else {
            num_bad += encode_bad_block<kFormat, kIsStochastic>(argument, block, x);
        }
    }
    return num_bad;
}

template <Format kFormat, bool kIsStochastic>
int64_t encode_format(const EncodeSpan& span) {
    const bool has_new = span.new_residual != nullptr;
    if (span.num_terms == 3 && !has_new) {
        return encode_blocks<kFormat, kIsStochastic, false, SumInput<kFormat, 3>>(span);
    }
    if (span.num_terms == 4 && !has_new) {
        return encode_blocks<kFormat, kIsStochastic, false, SumInput<kFormat, 4>>(span);
    }
    if (span.num_terms > 0) {
        return has_new ? encode_sum<kFormat, kIsStochastic, true>(span)
                       : encode_sum<kFormat, kIsStochastic, false>(span);
    }
    if (span.outer == nullptr && span.param_dtype == DType::kFp32 && span.residual == nullptr &&
        !has_new) {
        return encode_blocks<kFormat, kIsStochastic, false, TensorInput>(span);
    }
    if (span.outer != nullptr && span.param_dtype == DType::kFp32) {
        if (span.residual == nullptr && !has_new) {
            return encode_blocks<kFormat, kIsStochastic, false,
                                 DifferenceInput<DType::kFp32, false>>(span);
        }
        if (span.residual != nullptr && has_new && span.residual_dtype == DType::kFp32) {
            return encode_blocks<kFormat, kIsStochastic, true, DifferenceInput<DType::kFp32, true>>(
                span);
        }
    }
    if (span.outer != nullptr && span.param_dtype == DType::kBf16) {
        if (span.residual == nullptr && !has_new) {
            return encode_blocks<kFormat, kIsStochastic, false,
                                 DifferenceInput<DType::kBf16, false>>(span);
        }
        if (span.residual != nullptr && has_new && span.residual_dtype == DType::kFp32) {
            return encode_blocks<kFormat, kIsStochastic, true, DifferenceInput<DType::kBf16, true>>(
                span);
        }
    }
    return has_new ? encode_blocks<kFormat, kIsStochastic, true, AnyInput>(span)
                   : encode_blocks<kFormat, kIsStochastic, false, AnyInput>(span);
}

}  // namespace
}  // namespace diloco::codec
