// "Floors": plain loops for benchmarks that move the same bytes as an operator and compute next to
// nothing. Their time shows how fast the operator could be at best.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace diloco::codec {

constexpr int kMaxFloorBuffers = 6;
constexpr size_t kFloorUnit = 1024;  // ranges are multiples of so many elements

struct FloorBuffer {
    uint8_t* data;
    size_t num_bytes;
};

struct Floor {
    const char* name;
    const char* buffers;  // names and dtypes of the buffers, for error texts
    int num_buffers;
    int bytes_per_element[kMaxFloorBuffers];
    void (*run)(const FloorBuffer* buffers, size_t begin, size_t end);  // of elements [begin, end)
};

constexpr const char* kCopyBuffers = "source, target: fp32";
constexpr const char* kReadBuffers = "two sources: fp32";
constexpr const char* kDecodeBuffers = "codes: int8; target: fp32";
constexpr const char* kEncodeBuffers = "outer, parameters: fp32; codes: int8";
constexpr const char* kStepBuffers = "outer, momentum, parameters: fp32; codes: int8";
constexpr const char* kArrivalBuffers = "outer, momentum: fp32; codes: int8";
constexpr const char* kFeedbackBuffers =
    "outer, parameters, residual, new residual: fp32; codes: int8";

extern const Floor kPlainFloors[];  // the array ends with a Floor without a name

// The floors of the fastest implementation that this machine runs.
const Floor* find_floor(const std::string& name);  // null when unknown
std::vector<std::string> floor_names();

}  // namespace diloco::codec
