// Finds once which implementations the processor and the operating system support.
#include "codec/codec.h"

namespace diloco::codec {
namespace {

std::vector<const Kernels*> detect() {
    std::vector<const Kernels*> kernels{&kScalarKernels};
#if defined(DILOCO_X86)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) {
        kernels.push_back(&kAvx2Kernels);
    }
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
        kernels.push_back(&kAvx512Kernels);
    }
#endif
    return kernels;
}

}  // namespace

const std::vector<const Kernels*>& available_kernels() {
    static const std::vector<const Kernels*> kernels = detect();
    return kernels;
}

const Kernels* find_kernels(const std::string& name) {
    const auto& kernels = available_kernels();
    if (name.empty()) return kernels.back();
    for (const Kernels* candidate : kernels) {
        if (name == candidate->name) return candidate;
    }
    return nullptr;
}

}  // namespace diloco::codec
