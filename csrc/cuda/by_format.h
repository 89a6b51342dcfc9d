// From a format that is known at run time to a template argument.
#pragma once

#include <type_traits>

#include "wire/format.h"

namespace diloco::cuda {

template <wire::Format kFormat>
struct FormatConstant {
    static constexpr wire::Format value = kFormat;
};

// Calls f with the format as a compile-time constant.
template <class F>
void by_format(wire::Format format, F&& f) {
    using wire::Format;
    switch (format) {
        case Format::kFp32:
            return f(FormatConstant<Format::kFp32>{});
        case Format::kBf16:
            return f(FormatConstant<Format::kBf16>{});
        case Format::kFp16:
            return f(FormatConstant<Format::kFp16>{});
        case Format::kFp8E4m3:
            return f(FormatConstant<Format::kFp8E4m3>{});
        case Format::kFp8E5m2:
            return f(FormatConstant<Format::kFp8E5m2>{});
        case Format::kInt8:
            return f(FormatConstant<Format::kInt8>{});
        case Format::kInt4:
            return f(FormatConstant<Format::kInt4>{});
        default:
            return f(FormatConstant<Format::kE3m0>{});
    }
}

// The same with the rounding: f(format, whether it is stochastic). fp32 is exact either way.
template <class F>
void by_rounding(wire::Format format, bool is_stochastic, F&& f) {
    by_format(format, [&](auto constant) {
        if constexpr (decltype(constant)::value != wire::Format::kFp32) {
            if (is_stochastic) return f(constant, std::true_type{});
        }
        f(constant, std::false_type{});
    });
}

}  // namespace diloco::cuda
