// Each loop exists with ordinary and, where it writes, with non-temporal stores ("_stream"): a
// benchmark takes the faster one. AVX-512 where the processor has it, else what the compiler makes
// of the plain loop.
#include "codec/bench/floors.h"

#include <cstring>

#if defined(DILOCO_X86)
#include <immintrin.h>
#define DILOCO_WIDE __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq")))
#endif

namespace diloco::codec {
namespace {

float* floats(const FloorBuffer* b, int i) { return reinterpret_cast<float*>(b[i].data); }

// Keeps the compiler from dropping loads.
volatile uint32_t sink;

void copy(const FloorBuffer* b, size_t begin, size_t end) {
    std::memcpy(floats(b, 1) + begin, floats(b, 0) + begin, sizeof(float) * (end - begin));
}

void read2(const FloorBuffer* b, size_t begin, size_t end) {
    const auto* x = reinterpret_cast<const uint32_t*>(b[0].data);
    const auto* y = reinterpret_cast<const uint32_t*>(b[1].data);
    uint32_t sum = 0;
    for (size_t i = begin; i < end; ++i) sum += x[i] ^ y[i];
    sink = sum;
}

// Outer, parameters -> codes.
void encode(const FloorBuffer* b, size_t begin, size_t end) {
    const auto* outer = reinterpret_cast<const uint32_t*>(b[0].data);
    const auto* params = reinterpret_cast<const uint32_t*>(b[1].data);
    uint8_t* codes = b[2].data;
    for (size_t i = begin; i < end; ++i) codes[i] = static_cast<uint8_t>(outer[i] + params[i]);
}

// Outer, momentum, codes -> outer, momentum, parameters.
void step(const FloorBuffer* b, size_t begin, size_t end) {
    float *outer = floats(b, 0), *momentum = floats(b, 1), *params = floats(b, 2);
    const auto* codes = reinterpret_cast<const int8_t*>(b[3].data);
    for (size_t i = begin; i < end; ++i) {
        const float g = codes[i];
        momentum[i] += g;
        params[i] = outer[i] += g;
    }
}

// Outer, momentum, codes -> outer, momentum.
void arrival(const FloorBuffer* b, size_t begin, size_t end) {
    float *outer = floats(b, 0), *momentum = floats(b, 1);
    const auto* codes = reinterpret_cast<const int8_t*>(b[2].data);
    for (size_t i = begin; i < end; ++i) {
        const float g = codes[i];
        momentum[i] += g;
        outer[i] += g;
    }
}

// Outer, parameters, residual -> codes, new residual.
void feedback(const FloorBuffer* b, size_t begin, size_t end) {
    const float *outer = floats(b, 0), *params = floats(b, 1), *residual = floats(b, 2);
    float* rest = floats(b, 3);
    uint8_t* codes = b[4].data;
    for (size_t i = begin; i < end; ++i) {
        rest[i] = outer[i] - params[i] + residual[i];
        codes[i] = 0;
    }
}

#if defined(DILOCO_X86)

bool has_wide() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

// What memcpy is where the C library does not store past the caches: the target is read, too.
DILOCO_WIDE void cached_copy(const FloorBuffer* b, size_t begin, size_t end) {
    const float* from = floats(b, 0);
    float* to = floats(b, 1);
    for (size_t i = begin; i < end; i += 16) _mm512_storeu_ps(to + i, _mm512_loadu_ps(from + i));
}

DILOCO_WIDE void stream_copy(const FloorBuffer* b, size_t begin, size_t end) {
    const float* from = floats(b, 0);
    float* to = floats(b, 1);
    for (size_t i = begin; i < end; i += 16) _mm512_stream_ps(to + i, _mm512_loadu_ps(from + i));
    _mm_sfence();
}

DILOCO_WIDE void read2_wide(const FloorBuffer* b, size_t begin, size_t end) {
    const float *x = floats(b, 0), *y = floats(b, 1);
    __m512i even = _mm512_setzero_si512(), odd = even;
    for (size_t i = begin; i < end; i += 32) {
        even = _mm512_add_epi32(
            even, _mm512_xor_si512(_mm512_loadu_si512(x + i), _mm512_loadu_si512(y + i)));
        odd = _mm512_add_epi32(
            odd, _mm512_xor_si512(_mm512_loadu_si512(x + i + 16), _mm512_loadu_si512(y + i + 16)));
    }
    sink = static_cast<uint32_t>(_mm512_reduce_add_epi32(_mm512_add_epi32(even, odd)));
}

template <bool kStreams>
DILOCO_WIDE void encode_wide(const FloorBuffer* b, size_t begin, size_t end) {
    const float *outer = floats(b, 0), *params = floats(b, 1);
    for (size_t i = begin; i < end; i += 16) {
        const __m512i x =
            _mm512_add_epi32(_mm512_loadu_si512(outer + i), _mm512_loadu_si512(params + i));
        auto* codes = reinterpret_cast<__m128i*>(b[2].data + i);
        if (kStreams) {
            _mm_stream_si128(codes, _mm512_castsi512_si128(x));
        } else {
            _mm_storeu_si128(codes, _mm512_castsi512_si128(x));
        }
    }
    _mm_sfence();
}

// Stores of the outer step: none, only the parameters', or all of them non-temporal.
template <int kStreams>
DILOCO_WIDE void step_wide(const FloorBuffer* b, size_t begin, size_t end) {
    float *outer = floats(b, 0), *momentum = floats(b, 1), *params = floats(b, 2);
    for (size_t i = begin; i < end; i += 16) {
        const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(b[3].data + i));
        const __m512 g = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes));
        const __m512 m = _mm512_add_ps(_mm512_loadu_ps(momentum + i), g);
        const __m512 o = _mm512_add_ps(_mm512_loadu_ps(outer + i), g);
        if (kStreams == 2) {
            _mm512_stream_ps(momentum + i, m);
            _mm512_stream_ps(outer + i, o);
        } else {
            _mm512_storeu_ps(momentum + i, m);
            _mm512_storeu_ps(outer + i, o);
        }
        if (kStreams >= 1) {
            _mm512_stream_ps(params + i, o);
        } else {
            _mm512_storeu_ps(params + i, o);
        }
    }
    _mm_sfence();
}

DILOCO_WIDE void arrival_wide(const FloorBuffer* b, size_t begin, size_t end) {
    float *outer = floats(b, 0), *momentum = floats(b, 1);
    for (size_t i = begin; i < end; i += 16) {
        const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(b[2].data + i));
        const __m512 g = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes));
        _mm512_storeu_ps(momentum + i, _mm512_add_ps(_mm512_loadu_ps(momentum + i), g));
        _mm512_storeu_ps(outer + i, _mm512_add_ps(_mm512_loadu_ps(outer + i), g));
    }
}

// The outer step in bursts of 256 elements, one stream of codes after the others.
DILOCO_WIDE void step_burst(const FloorBuffer* b, size_t begin, size_t end) {
    float *outer = floats(b, 0), *momentum = floats(b, 1), *params = floats(b, 2);
    alignas(64) float g[256];
    for (size_t first = begin; first < end; first += 256) {
        for (size_t i = 0; i < 256; i += 16) {
            const auto* codes = reinterpret_cast<const __m128i*>(b[3].data + first + i);
            _mm512_store_ps(g + i,
                            _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(codes))));
        }
        for (size_t i = 0; i < 256; i += 16) {
            const __m512 m =
                _mm512_add_ps(_mm512_loadu_ps(momentum + first + i), _mm512_load_ps(g + i));
            const __m512 o =
                _mm512_add_ps(_mm512_loadu_ps(outer + first + i), _mm512_load_ps(g + i));
            _mm512_storeu_ps(momentum + first + i, m);
            _mm512_storeu_ps(outer + first + i, o);
            _mm512_stream_ps(params + first + i, o);
        }
    }
    _mm_sfence();
}

template <bool kStreams>
DILOCO_WIDE void feedback_wide(const FloorBuffer* b, size_t begin, size_t end) {
    const float *outer = floats(b, 0), *params = floats(b, 1), *residual = floats(b, 2);
    float* rest = floats(b, 3);
    for (size_t i = begin; i < end; i += 16) {
        const __m512 x = _mm512_sub_ps(_mm512_loadu_ps(outer + i), _mm512_loadu_ps(params + i));
        const __m512 y = _mm512_add_ps(x, _mm512_loadu_ps(residual + i));
        auto* codes = reinterpret_cast<__m128i*>(b[4].data + i);
        const __m128i code = _mm_castps_si128(_mm512_castps512_ps128(y));
        if (kStreams) {
            _mm512_stream_ps(rest + i, y);
            _mm_stream_si128(codes, code);
        } else {
            _mm512_storeu_ps(rest + i, y);
            _mm_storeu_si128(codes, code);
        }
    }
    _mm_sfence();
}

#endif

constexpr const char* kCopyBuffers = "source, target: fp32";
constexpr const char* kReadBuffers = "two sources: fp32";
constexpr const char* kEncodeBuffers = "outer, parameters: fp32; codes: int8";
constexpr const char* kStepBuffers = "outer, momentum, parameters: fp32; codes: int8";
constexpr const char* kArrivalBuffers = "outer, momentum: fp32; codes: int8";
constexpr const char* kFeedbackBuffers =
    "outer, parameters, residual, new residual: fp32; codes: int8";

constexpr Floor kPlainFloors[] = {
    {"memcpy", kCopyBuffers, 2, {4, 4}, copy},
    {"read2", kReadBuffers, 2, {4, 4}, read2},
    {"encode", kEncodeBuffers, 3, {4, 4, 1}, encode},
    {"outer_step", kStepBuffers, 4, {4, 4, 4, 1}, step},
    {"arrival", kArrivalBuffers, 3, {4, 4, 1}, arrival},
    {"feedback", kFeedbackBuffers, 5, {4, 4, 4, 4, 1}, feedback},
};

#if defined(DILOCO_X86)
constexpr Floor kWideFloors[] = {
    {"memcpy", kCopyBuffers, 2, {4, 4}, copy},
    {"memcpy_cached", kCopyBuffers, 2, {4, 4}, cached_copy},
    {"memcpy_stream", kCopyBuffers, 2, {4, 4}, stream_copy},
    {"read2", kReadBuffers, 2, {4, 4}, read2_wide},
    {"encode", kEncodeBuffers, 3, {4, 4, 1}, encode_wide<false>},
    {"encode_stream", kEncodeBuffers, 3, {4, 4, 1}, encode_wide<true>},
    {"outer_step", kStepBuffers, 4, {4, 4, 4, 1}, step_wide<0>},
    {"outer_step_stream", kStepBuffers, 4, {4, 4, 4, 1}, step_wide<1>},
    {"outer_step_stream_all", kStepBuffers, 4, {4, 4, 4, 1}, step_wide<2>},
    {"outer_step_burst", kStepBuffers, 4, {4, 4, 4, 1}, step_burst},
    {"arrival", kArrivalBuffers, 3, {4, 4, 1}, arrival_wide},
    {"feedback", kFeedbackBuffers, 5, {4, 4, 4, 4, 1}, feedback_wide<false>},
    {"feedback_stream", kFeedbackBuffers, 5, {4, 4, 4, 4, 1}, feedback_wide<true>},
};
#endif

// Calls body for each floor that this machine runs.
template <class Body>
void for_each_floor(Body&& body) {
#if defined(DILOCO_X86)
    if (has_wide()) {
        for (const Floor& floor : kWideFloors) body(floor);
        return;
    }
#endif
    for (const Floor& floor : kPlainFloors) body(floor);
}

}  // namespace

const Floor* find_floor(const std::string& name) {
    const Floor* found = nullptr;
    for_each_floor([&](const Floor& floor) {
        if (name == floor.name) found = &floor;
    });
    return found;
}

std::vector<std::string> floor_names() {
    std::vector<std::string> names;
    for_each_floor([&](const Floor& floor) { names.emplace_back(floor.name); });
    return names;
}

}  // namespace diloco::codec
