// Shared by the CPU operators: the division over the intra-op pool and the choice of the kernels.
// Included by cpu.cpp alone.
#pragma once

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <string>

#include "codec/codec.h"
#include "codec/serial.h"
#include "operators/checks.h"

namespace diloco {
namespace {

// From here on the data of an operator do not fit in a core's caches: results are stored past them.
constexpr int64_t kLargeElements = int64_t{1} << 20;
constexpr int64_t kParallelGrain = int64_t{1} << 18;  // elements: some 100 us of one thread

// Calls body(begin, end) for parts of [begin, end) that start at multiples of `unit`, on the
// intra-op pool.
template <class Body>
void parallel(int64_t begin, int64_t end, int64_t unit, const Body& body) {
    const int64_t units = (end - begin + unit - 1) / unit;
    if (units == 0) return;
    if (codec::SerialScope::is_active()) return body(begin, end);
    at::parallel_for(0, units, std::max<int64_t>(kParallelGrain / unit, 1),
                     [&](int64_t first, int64_t last) {
                         body(begin + first * unit, std::min(begin + last * unit, end));
                     });
}

const codec::Kernels* parse_impl(c10::string_view impl) {
    const codec::Kernels* kernels = codec::find_kernels(std::string(impl));
    if (kernels == nullptr) {
        std::string names;
        for (const auto* each : codec::available_kernels()) names += std::string(" ") + each->name;
        TORCH_CHECK_VALUE(false, "impl '", impl,
                          "' cannot run on this machine's CPU; available:", names);
    }
    return kernels;
}

}  // namespace
}  // namespace diloco
