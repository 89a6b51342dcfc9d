// A quad is four consecutive elements, 16 bytes of fp32. A lane reads or writes one at a time.
#pragma once

#include "codec/step_rule.h"
#include "cuda/arguments.h"
#include "wire/codes.h"

namespace diloco::cuda {

using codec::half_bits, codec::half_value;
using wire::Format;

constexpr int kQuad = 4;

struct Quad {
    float v[kQuad];
};

// Reads and writes of the device's memory, at addresses that are multiples of the type's size.
#if defined(__CUDACC__)
template <class T>
DILOCO_DEVICE T load_global(uint64_t address) {
    return __ldca(reinterpret_cast<const T*>(address));
}
// The stores are assembly: the compiler does not know that the addresses are in global memory, and
// would use slower generic stores.
DILOCO_DEVICE void store_global(uint64_t address, uint8_t value) {
    asm volatile("st.global.u8 [%0], %1;" ::"l"(address), "r"(static_cast<uint32_t>(value)));
}
DILOCO_DEVICE void store_global(uint64_t address, uint16_t value) {
    asm volatile("st.global.u16 [%0], %1;" ::"l"(address), "h"(value));
}
DILOCO_DEVICE void store_global(uint64_t address, uint32_t value) {
    asm volatile("st.global.u32 [%0], %1;" ::"l"(address), "r"(value));
}
DILOCO_DEVICE void store_global(uint64_t address, float value) {
    asm volatile("st.global.f32 [%0], %1;" ::"l"(address), "f"(value));
}
DILOCO_DEVICE void store_global(uint64_t address, uint2 value) {
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(address), "r"(value.x), "r"(value.y));
}
DILOCO_DEVICE void store_global(uint64_t address, uint4 value) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(value.x),
                 "r"(value.y), "r"(value.z), "r"(value.w));
}
#else
struct uint2 {
    uint32_t x, y;
};
struct uint4 {
    uint32_t x, y, z, w;
};
template <class T>
T load_global(uint64_t address) {
    T value;
    __builtin_memcpy(&value, reinterpret_cast<const void*>(address), sizeof(T));
    return value;
}
template <class T>
void store_global(uint64_t address, T value) {
    __builtin_memcpy(reinterpret_cast<void*>(address), &value, sizeof(T));
}
#endif

// Read and write one element of an array of `dtype`, at an address that is a multiple of its size.
DILOCO_DEVICE float load_element(uint64_t address, DType dtype) {
    if (dtype == DType::kFp32) return load_global<float>(address);
    return half_value(dtype, load_global<uint16_t>(address));
}

DILOCO_DEVICE void store_element(uint64_t address, DType dtype, float value) {
    if (dtype == DType::kFp32) {
        store_global(address, value);
    } else {
        store_global(address, static_cast<uint16_t>(half_bits(dtype, value)));
    }
}

// Read and write a quad at an address that is a multiple of its size: 16 bytes, or 8 bytes for a
// 16-bit type.
DILOCO_DEVICE Quad load_quad(uint64_t address, DType dtype) {
    if (dtype == DType::kFp32) {
        const uint4 w = load_global<uint4>(address);
        return {{wire::bits_float(w.x), wire::bits_float(w.y), wire::bits_float(w.z),
                 wire::bits_float(w.w)}};
    }
    const uint2 w = load_global<uint2>(address);
    return {{half_value(dtype, w.x & 0xFFFFu), half_value(dtype, w.x >> 16),
             half_value(dtype, w.y & 0xFFFFu), half_value(dtype, w.y >> 16)}};
}

DILOCO_DEVICE void store_quad(uint64_t address, DType dtype, const Quad& q) {
    if (dtype == DType::kFp32) {
        store_global(address, uint4{wire::float_bits(q.v[0]), wire::float_bits(q.v[1]),
                                    wire::float_bits(q.v[2]), wire::float_bits(q.v[3])});
    } else {
        store_global(address, uint2{half_bits(dtype, q.v[0]) | (half_bits(dtype, q.v[1]) << 16),
                                    half_bits(dtype, q.v[2]) | (half_bits(dtype, q.v[3]) << 16)});
    }
}

// Read and write a quad of the stage, which is shared memory.
DILOCO_DEVICE Quad load_staged(const float* p) {
#if defined(__CUDACC__)
    const float4 v = *reinterpret_cast<const float4*>(p);
    return {{v.x, v.y, v.z, v.w}};
#else
    return {{p[0], p[1], p[2], p[3]}};
#endif
}

DILOCO_DEVICE void store_staged(float* p, const Quad& q) {
#if defined(__CUDACC__)
    *reinterpret_cast<float4*>(p) = make_float4(q.v[0], q.v[1], q.v[2], q.v[3]);
#else
    for (int i = 0; i < kQuad; ++i) p[i] = q.v[i];
#endif
}

// The codes of a quad, packed as they are in a payload.
template <Format kFormat>
struct CodeQuad {
    static constexpr int kBits = wire::code_bits(kFormat);
    static constexpr int kBytes = kBits * kQuad / 8;
    static constexpr int kWords = (kBytes + 3) / 4;
    uint32_t w[kWords];

    DILOCO_DEVICE uint32_t get(int i) const {
        if constexpr (kBits == 32) {
            return w[i];
        } else {
            constexpr int kPerWord = 32 / kBits;
            return (w[i / kPerWord] >> (kBits * (i % kPerWord))) & ((1u << kBits) - 1);
        }
    }
    DILOCO_DEVICE void put(int i, uint32_t code) {
        if constexpr (kBits == 32) {
            w[i] = code;
        } else {
            constexpr int kPerWord = 32 / kBits;
            w[i / kPerWord] |= code << (kBits * (i % kPerWord));
        }
    }
};

template <Format kFormat>
DILOCO_DEVICE CodeQuad<kFormat> load_codes(const uint8_t* p, bool is_aligned) {
    using Codes = CodeQuad<kFormat>;
    const auto address = reinterpret_cast<uint64_t>(p);
    Codes codes{};
    if (!is_aligned) {
        DILOCO_UNROLL
        for (int b = 0; b < Codes::kBytes; ++b) {
            codes.w[b / 4] |= static_cast<uint32_t>(load_global<uint8_t>(address + b))
                              << (8 * (b % 4));
        }
    } else if constexpr (Codes::kBytes == 16) {
        const uint4 w = load_global<uint4>(address);
        codes = {{w.x, w.y, w.z, w.w}};
    } else if constexpr (Codes::kBytes == 8) {
        const uint2 w = load_global<uint2>(address);
        codes = {{w.x, w.y}};
    } else if constexpr (Codes::kBytes == 4) {
        codes.w[0] = load_global<uint32_t>(address);
    } else {
        codes.w[0] = load_global<uint16_t>(address);
    }
    return codes;
}

// Writes the bytes of the first `count` codes and no others. The codes after them must be zero,
// because two 4-bit codes share a byte.
template <Format kFormat>
DILOCO_DEVICE void store_codes(uint8_t* p, const CodeQuad<kFormat>& codes, int count,
                               bool is_aligned) {
    using Codes = CodeQuad<kFormat>;
    const auto address = reinterpret_cast<uint64_t>(p);
    if (!is_aligned || count < kQuad) {
        const int num_bytes = (count * Codes::kBits + 7) / 8;
        DILOCO_UNROLL
        for (int b = 0; b < Codes::kBytes; ++b) {
            const auto byte = static_cast<uint8_t>(codes.w[b / 4] >> (8 * (b % 4)));
            if (b < num_bytes) store_global(address + b, byte);
        }
    } else if constexpr (Codes::kBytes == 16) {
        store_global(address, uint4{codes.w[0], codes.w[1], codes.w[2], codes.w[3]});
    } else if constexpr (Codes::kBytes == 8) {
        store_global(address, uint2{codes.w[0], codes.w[1]});
    } else if constexpr (Codes::kBytes == 4) {
        store_global(address, codes.w[0]);
    } else {
        store_global(address, static_cast<uint16_t>(codes.w[0]));
    }
}

DILOCO_DEVICE uint16_t load_scale_bits(const uint8_t* p, bool is_aligned) {
    const auto address = reinterpret_cast<uint64_t>(p);
    if (is_aligned) return load_global<uint16_t>(address);
    return static_cast<uint16_t>(load_global<uint8_t>(address) |
                                 (load_global<uint8_t>(address + 1) << 8));
}

DILOCO_DEVICE float load_scale(const uint8_t* p, bool is_aligned) {
    return wire::scale_value(load_scale_bits(p, is_aligned));
}

DILOCO_DEVICE void store_scale(uint8_t* p, uint16_t scale, bool is_aligned) {
    const auto address = reinterpret_cast<uint64_t>(p);
    if (is_aligned) {
        store_global(address, scale);
    } else {
        store_global(address, static_cast<uint8_t>(scale));
        store_global(address + 1, static_cast<uint8_t>(scale >> 8));
    }
}

}  // namespace diloco::cuda
