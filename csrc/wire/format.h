// The wire formats and the layout of a run of elements in a payload.
// A run of `run_elements` elements has first one little-endian bf16 scale per block (none in fp32,
// bf16 and fp16), then the codes; both regions are rounded up to 16 bytes. Two 4-bit codes share a
// byte, the first one in the low nibble; after an odd number of codes the last high nibble is 0.
// The rotated (rotation.h) and sparse formats (sparse.h) have one code of fixed size for each
// block, even for a short block. A run of a rotated format begins with the 8 bytes of the key from
// which its random signs are made.
#pragma once

#include "wire/config.h"

namespace diloco::wire {

enum class Format : int {
    kFp32,
    kBf16,
    kFp16,
    kFp8E4m3,
    kFp8E5m2,
    kInt8,
    kInt4,
    kE3m0,
    // Rotated.
    kInt2r,
    kInt1r,
    kSub2,
    kSub4,
    kSub8,
    kSub16,
    // Sparse.
    kTopk32,
    kTopk64,
    kTopk128,
    kTopk256
};
constexpr int kNumFormats = 18;

constexpr int64_t kAlignment = 16;
constexpr int kMinBlockSize = 32;
constexpr int kMaxBlockSize = 1024;  // of all formats but the sparse ones
constexpr int kLargestBlock = 4096;  // of all formats

DILOCO_HD constexpr bool is_rotated(Format format) {
    return format >= Format::kInt2r && format <= Format::kSub16;
}
DILOCO_HD constexpr bool is_sparse(Format format) { return format >= Format::kTopk32; }
// Whether each element has a code of its own. In the other formats a block has a single code.
DILOCO_HD constexpr bool has_element_codes(Format format) { return format <= Format::kE3m0; }

// Bits of the code of one element. Rotated and sparse formats have no such codes, and get 8 here,
// so that has_scales() is true.
DILOCO_HD constexpr int code_bits(Format format) {
    return format == Format::kFp32                              ? 32
           : format == Format::kBf16 || format == Format::kFp16 ? 16
           : format == Format::kInt4 || format == Format::kE3m0 ? 4
                                                                : 8;
}

// Elements that a sparse format keeps of a block.
DILOCO_HD constexpr int num_kept(Format format) {
    return 32 << (static_cast<int>(format) - static_cast<int>(Format::kTopk32));
}

// own_block(): the block size of a rotated or sparse format; own_bytes(): the bytes of the code of
// such a block.
DILOCO_HD constexpr int own_block(Format format) {
    return is_sparse(format)                                      ? 4096
           : format == Format::kInt2r || format == Format::kInt1r ? 256
                                                                  : 1024;
}

DILOCO_HD constexpr int own_bytes(Format format) {
    return format == Format::kTopk32                             ? 40
           : format == Format::kTopk64                           ? 72
           : format == Format::kTopk128                          ? 128
           : format == Format::kTopk256                          ? 224
           : format == Format::kInt2r || format == Format::kSub2 ? 64
           : format == Format::kInt1r || format == Format::kSub4 ? 32
           : format == Format::kSub8                             ? 16
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
    if (!has_element_codes(format)) {
        const int block = own_block(format);
        return (elements + block - 1) / block * own_bytes(format);
    }
    return (elements * code_bits(format) + 7) / 8;
}

// Byte of a run at which its scales begin: rotated formats have the key before them.
DILOCO_HD constexpr int64_t scale_offset(Format format) { return is_rotated(format) ? 8 : 0; }

// Byte of a run at which its codes begin. It depends on `run_elements`, not on how many elements
// the last run really has.
DILOCO_HD constexpr int64_t code_offset(Format format, int64_t run_elements, int64_t block_size) {
    return has_scales(format)
               ? align_up(scale_offset(format) + 2 * ((run_elements + block_size - 1) / block_size))
               : 0;
}

// Every run takes this many bytes of the payload, also when it is short or empty.
DILOCO_HD constexpr int64_t run_bytes(Format format, int64_t run_elements, int64_t block_size) {
    return code_offset(format, run_elements, block_size) +
           align_up(code_bytes(format, run_elements));
}

}  // namespace diloco::wire
