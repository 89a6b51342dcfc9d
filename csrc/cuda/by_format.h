// Turns a format that is known at run time into a template argument.
#pragma once

#include <type_traits>

#include "wire/format.h"

namespace diloco::cuda {

template <wire::Format kFormat>
struct FormatConstant {
    static constexpr wire::Format value = kFormat;
};

// Calls f with the format as a compile-time constant; the sparse formats have kernels of their own.
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
        case Format::kE3m0:
            return f(FormatConstant<Format::kE3m0>{});
        case Format::kInt2r:
            return f(FormatConstant<Format::kInt2r>{});
        case Format::kInt1r:
            return f(FormatConstant<Format::kInt1r>{});
        case Format::kSub2:
            return f(FormatConstant<Format::kSub2>{});
        case Format::kSub4:
            return f(FormatConstant<Format::kSub4>{});
        case Format::kSub8:
            return f(FormatConstant<Format::kSub8>{});
        default:
            return f(FormatConstant<Format::kSub16>{});
    }
}

// As by_format(), with the rounding: calls f(format, is_stochastic). fp32 is exact, and rotated
// formats always round to nearest, so these have no stochastic kernels.
template <class F>
void by_rounding(wire::Format format, bool is_stochastic, F&& f) {
    by_format(format, [&](auto constant) {
        constexpr wire::Format kFormat = decltype(constant)::value;
        if constexpr (kFormat != wire::Format::kFp32 && wire::has_element_codes(kFormat)) {
            if (is_stochastic) return f(constant, std::true_type{});
        }
        f(constant, std::false_type{});
    });
}

}  // namespace diloco::cuda
