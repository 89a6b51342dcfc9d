// The division of an operator's work over the intra-op pool, and the choice of its kernels. Only
// cpu.cpp includes this file.
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

// From this number of elements on, an operator's data exceed a core's caches, and results are
// written by non-temporal stores.
constexpr int64_t kLargeElements = int64_t{1} << 20;
// The fewest elements for one thread, which take about 100 microseconds.
constexpr int64_t kParallelGrain = int64_t{1} << 18;

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
