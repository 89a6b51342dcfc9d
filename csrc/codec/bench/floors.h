// The plain loops that kernels are measured against: they move the bytes of an operator and do next
// to nothing else, as well vectorised as we can. For benchmarks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace diloco::codec {

constexpr int kMaxFloorBuffers = 6;
constexpr size_t kFloorUnit = 1024;  // elements; ranges are multiples of it

struct FloorBuffer {
    uint8_t* data;
    size_t num_bytes;
};

struct Floor {
    const char* name;
    const char* buffers;  // what the buffers are, for error texts
    int num_buffers;
    int bytes_per_element[kMaxFloorBuffers];
    void (*run)(const FloorBuffer* buffers, size_t begin, size_t end);  // elements
};

constexpr const char* kCopyBuffers = "source, target: fp32";
constexpr const char* kReadBuffers = "two sources: fp32";
constexpr const char* kDecodeBuffers = "codes: int8; target: fp32";
constexpr const char* kEncodeBuffers = "outer, parameters: fp32; codes: int8";
constexpr const char* kStepBuffers = "outer, momentum, parameters: fp32; codes: int8";
constexpr const char* kArrivalBuffers = "outer, momentum: fp32; codes: int8";
constexpr const char* kFeedbackBuffers =
    "outer, parameters, residual, new residual: fp32; codes: int8";

extern const Floor kPlainFloors[];  // the last one has no name

// The loops beside the fastest kernels that this machine runs.
const Floor* find_floor(const std::string& name);  // null when unknown
std::vector<std::string> floor_names();

}  // namespace diloco::codec
