#include "exchange/transport/pages.h"

#include <ATen/ops/from_blob.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

namespace diloco {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;

size_t round_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

}  // namespace

at::Tensor empty_pages(int64_t num_bytes) {
    TORCH_CHECK_VALUE(num_bytes >= 0, "empty_pages: num_bytes must not be negative: ", num_bytes);
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const size_t wanted = std::max<size_t>(static_cast<size_t>(num_bytes), 1);
    const bool huge = wanted >= kHugePage;
    const size_t length = round_up(wanted, page);
    // A huge page must begin at a multiple of its size: map one page more, and unmap both ends.
    const size_t mapped = huge ? length + kHugePage : length;
    void* memory =
        mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK_WITH(OutOfMemoryError, memory != MAP_FAILED, "empty_pages: no memory for ",
                     num_bytes, " bytes");
    auto* base = static_cast<uint8_t*>(memory);
    if (huge) {
        auto* aligned =
            reinterpret_cast<uint8_t*>(round_up(reinterpret_cast<uintptr_t>(base), kHugePage));
        if (aligned != base) munmap(base, static_cast<size_t>(aligned - base));
        uint8_t* end = base + mapped;
        if (end != aligned + length)
            munmap(aligned + length, static_cast<size_t>(end - aligned) - length);
        base = aligned;
        madvise(base, length, MADV_HUGEPAGE);
    }
    std::memset(base, 0, length);
    return at::from_blob(
        base, {num_bytes}, [length](void* data) { munmap(data, length); },
        at::TensorOptions().dtype(at::kByte));
}

int64_t minor_faults() {
    rusage usage{};
    getrusage(RUSAGE_THREAD, &usage);
    return usage.ru_minflt;
}

}  // namespace diloco
