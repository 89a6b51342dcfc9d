// The wire formats and the layout of a run of elements in a payload.
// A run of `run_elements` is [scales | codes]: one little-endian bf16 scale per block (none for
// fp32, bf16, fp16), then the codes; each region is rounded up to 16 bytes. 4-bit codes: two a
// byte, low nibble first, odd tail high nibble 0.
#pragma once

#include "wire/config.h"

namespace diloco::wire {

enum class Format : int { kFp32, kBf16, kFp16, kFp8E4m3, kFp8E5m2, kInt8, kInt4, kE3m0 };
constexpr int kNumFormats = 8;

constexpr int64_t kAlignment = 16;
constexpr int kMinBlockSize = 32;
constexpr int kMaxBlockSize = 1024;

DILOCO_HD constexpr int code_bits(Format format) {
    return format == Format::kFp32                              ? 32
           : format == Format::kBf16 || format == Format::kFp16 ? 16
           : format == Format::kInt4 || format == Format::kE3m0 ? 4
                                                                : 8;
}

DILOCO_HD constexpr bool has_scales(Format format) { return code_bits(format) <= 8; }

// The largest magnitude that a code stands for, before the scale.
DILOCO_HD constexpr float qmax(Format format) {
    return format == Format::kFp8E4m3   ? 448.0f
           : format == Format::kFp8E5m2 ? 57344.0f
           : format == Format::kInt8    ? 127.0f
           : format == Format::kInt4    ? 7.0f
           : format == Format::kE3m0    ? 16.0f
                                        : 1.0f;
}

DILOCO_HD constexpr int64_t align_up(int64_t bytes) {
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

DILOCO_HD constexpr int64_t code_bytes(Format format, int64_t elements) {
    return (elements * code_bits(format) + 7) / 8;
}

// Byte at which the codes of a run begin; depends on the run's nominal length alone.
DILOCO_HD constexpr int64_t code_offset(Format format, int64_t run_elements, int64_t block_size) {
    return has_scales(format) ? align_up(2 * ((run_elements + block_size - 1) / block_size)) : 0;
}

// Every run takes this many bytes of the payload, also when it is short or empty.
DILOCO_HD constexpr int64_t run_bytes(Format format, int64_t run_elements, int64_t block_size) {
    return code_offset(format, run_elements, block_size) +
           align_up(code_bytes(format, run_elements));
}

}  // namespace diloco::wire
