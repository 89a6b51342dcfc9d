// The positions of elements in payloads, and the payloads of an operator at one position; for
// codec.cpp and gram.cpp.
#pragma once

#include <cstring>
#include <vector>

#include "codec/codec.h"
#include "wire/rotation.h"

namespace diloco::codec {
namespace {

// Offsets in bytes from the start of a payload: of the run that holds an element, of the scale and
// of the code of the element.
struct PayloadPosition {
    int64_t run;
    int64_t scales;
    int64_t codes;
};

inline PayloadPosition locate(const RunLayout& layout, int64_t element) {
    const int64_t run = element / layout.run_elements, within = element % layout.run_elements;
    const int64_t start =
        run * wire::run_bytes(layout.format, layout.run_elements, layout.block_size);
    return {start, start + wire::scale_offset(layout.format) + 2 * (within / layout.block_size),
            start + wire::code_offset(layout.format, layout.run_elements, layout.block_size) +
                wire::code_bytes(layout.format, within)};
}

// The sign bits of a rotated format that belong to one key.
struct Signs {
    uint64_t key = 0;
    int size = 0;  // 0: no bits were made yet
    uint8_t bits[wire::kMaxSignBytes];

    void fill(uint64_t new_key, int block_size) {
        if (key == new_key && size == block_size) return;
        key = new_key;
        size = block_size;
        wire::fill_signs(key, size, bits);
    }
};

// Storage for `count` Signs, which all operators on a thread reuse: no operator calls another one
// that needs it.
inline Signs* thread_signs(int count) {
    static thread_local std::vector<Signs> storage;
    if (storage.size() < static_cast<size_t>(count)) storage.resize(static_cast<size_t>(count));
    return storage.data();
}

// The payloads of an operator. at() returns them as Terms that point to one position.
class Terms {
  public:
    Terms(const RunLayout& layout, const uint8_t* const* payloads, const float* coefficients,
          int count)
        : block_size_(layout.block_size),
          payloads_(payloads),
          count_(count),
          signs_(wire::is_rotated(layout.format) ? thread_signs(count) : nullptr) {
        for (int i = 0; i < count; ++i) terms_[i].coefficient = coefficients[i];
    }
    const Term* at(const PayloadPosition& position) {
        for (int i = 0; i < count_; ++i) {
            terms_[i].scales = payloads_[i] + position.scales;
            terms_[i].codes = payloads_[i] + position.codes;
        }
        if (signs_ != nullptr && position.run != run_) read_keys(position.run);
        return terms_;
    }
    int count() const { return count_; }

  private:
    void read_keys(int64_t run) {
        run_ = run;
        for (int i = 0; i < count_; ++i) {
            uint64_t key;
            std::memcpy(&key, payloads_[i] + run, sizeof(key));
            signs_[i].fill(key, block_size_);
            terms_[i].signs = signs_[i].bits;
        }
    }

    const int block_size_;
    const uint8_t* const* payloads_;
    int count_;
    Signs* const signs_;
    int64_t run_ = -1;
    Term terms_[kMaxTerms];
};

}  // namespace
}  // namespace diloco::codec
