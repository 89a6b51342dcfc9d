// Sets the thread's floating-point state to IEEE defaults (round to nearest even, sub-normals kept)
// while an IeeeScope exists. torch.set_flush_denormal() and libraries built with -ffast-math change
// this state, and so would change the bytes that the codec writes.
#pragma once

#include <cstdint>

#if defined(__SSE__)
#include <immintrin.h>
#endif

namespace diloco::codec {

class IeeeScope {
  public:
#if defined(__SSE__)
    IeeeScope() : saved_(_mm_getcsr()) { _mm_setcsr(kDefault); }
    ~IeeeScope() { _mm_setcsr(saved_); }

  private:
    static constexpr unsigned kDefault = 0x1F80;  // all exceptions masked, no FTZ, no DAZ
    unsigned saved_;
#elif defined(__aarch64__)
    IeeeScope() {
        asm volatile("mrs %0, fpcr" : "=r"(saved_));
        asm volatile("msr fpcr, %0" : : "r"(uint64_t{0}));
    }
    ~IeeeScope() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }

  private:
    uint64_t saved_;
#else
    IeeeScope() {}
    ~IeeeScope() {}
#endif

  public:
    IeeeScope(const IeeeScope&) = delete;
    IeeeScope& operator=(const IeeeScope&) = delete;
};

}  // namespace diloco::codec
