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

const Floor* find_floor(const std::string& name);  // null when unknown
std::vector<std::string> floor_names();

}  // namespace diloco::codec
