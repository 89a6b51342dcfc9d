// The plain loops (floors.h) for processors without AVX2, vectorised by the compiler alone, and
// without non-temporal stores. simd/floors.h has the same loops in AVX2 and AVX-512.
#include "codec/bench/floors.h"

#include <cstring>

#include "codec/codec.h"

namespace diloco::codec {
namespace {

float* floats(const FloorBuffer* b, int i) { return reinterpret_cast<float*>(b[i].data); }

// Keeps the compiler from dropping loads.
volatile uint32_t sink;

// Copies the source to the target by the C library's memcpy.
void copy(const FloorBuffer* b, size_t begin, size_t end) {
    std::memcpy(floats(b, 1) + begin, floats(b, 0) + begin, sizeof(float) * (end - begin));
}

// Reads both sources, and writes nothing.
void read2(const FloorBuffer* b, size_t begin, size_t end) {
    const auto* x = reinterpret_cast<const uint32_t*>(b[0].data);
    const auto* y = reinterpret_cast<const uint32_t*>(b[1].data);
    uint32_t sum = 0;
    for (size_t i = begin; i < end; ++i) sum += x[i] ^ y[i];
    sink = sum;
}

// Reads codes, and writes the target, as decoding does.
void decode(const FloorBuffer* b, size_t begin, size_t end) {
    const auto* codes = reinterpret_cast<const int8_t*>(b[0].data);
    for (size_t i = begin; i < end; ++i) floats(b, 1)[i] = codes[i];
}

// Reads outer and parameters, and writes codes, as encoding does.
void encode(const FloorBuffer* b, size_t begin, size_t end) {
    const auto* outer = reinterpret_cast<const uint32_t*>(b[0].data);
    const auto* params = reinterpret_cast<const uint32_t*>(b[1].data);
    uint8_t* codes = b[2].data;
    for (size_t i = begin; i < end; ++i) codes[i] = static_cast<uint8_t>(outer[i] + params[i]);
}

// Reads outer, momentum and codes, and writes outer, momentum and parameters, as an outer step
// does.
void step(const FloorBuffer* b, size_t begin, size_t end) {
    float *outer = floats(b, 0), *momentum = floats(b, 1), *params = floats(b, 2);
    const auto* codes = reinterpret_cast<const int8_t*>(b[3].data);
    for (size_t i = begin; i < end; ++i) {
        const float g = codes[i];
        momentum[i] += g;
        params[i] = outer[i] += g;
    }
}

// Reads outer, momentum and codes, and writes outer and momentum, as an arrival at the asynchronous
// server does.
void arrival(const FloorBuffer* b, size_t begin, size_t end) {
    float *outer = floats(b, 0), *momentum = floats(b, 1);
    const auto* codes = reinterpret_cast<const int8_t*>(b[2].data);
    for (size_t i = begin; i < end; ++i) {
        const float g = codes[i];
        momentum[i] += g;
        outer[i] += g;
    }
}

// Reads outer, parameters and residual, and writes codes and the new residual, as encoding with
// error feedback does.
void feedback(const FloorBuffer* b, size_t begin, size_t end) {
    const float *outer = floats(b, 0), *params = floats(b, 1), *residual = floats(b, 2);
    float* rest = floats(b, 3);
    uint8_t* codes = b[4].data;
    for (size_t i = begin; i < end; ++i) {
        rest[i] = outer[i] - params[i] + residual[i];
        codes[i] = 0;
    }
}

}  // namespace

const Floor kPlainFloors[] = {
    {"memcpy", kCopyBuffers, 2, {4, 4}, copy},
    {"read2", kReadBuffers, 2, {4, 4}, read2},
    {"decode", kDecodeBuffers, 2, {1, 4}, decode},
    {"encode", kEncodeBuffers, 3, {4, 4, 1}, encode},
    {"outer_step", kStepBuffers, 4, {4, 4, 4, 1}, step},
    {"arrival", kArrivalBuffers, 3, {4, 4, 1}, arrival},
    {"feedback", kFeedbackBuffers, 5, {4, 4, 4, 4, 1}, feedback},
    {},
};

const Floor* find_floor(const std::string& name) {
    for (const Floor* floor = available_kernels().back()->floors; floor->name != nullptr; ++floor) {
        if (name == floor->name) return floor;
    }
    return nullptr;
}

std::vector<std::string> floor_names() {
    std::vector<std::string> names;
    for (const Floor* floor = available_kernels().back()->floors; floor->name != nullptr; ++floor) {
        names.emplace_back(floor->name);
    }
    return names;
}

}  // namespace diloco::codec
