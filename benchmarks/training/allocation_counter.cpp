// Counts large heap allocations of a process: c++ -O2 -shared -fPIC, then LD_PRELOAD.
//
// Replaces the allocation functions of glibc, forwards to them, and counts every request of at
// least kLargeBytes by any thread. large_allocations() and last_large_bytes() are read by ctypes.

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>

extern "C" {

void* __libc_malloc(size_t bytes);
void* __libc_calloc(size_t count, size_t bytes);
void* __libc_realloc(void* pointer, size_t bytes);
void* __libc_memalign(size_t alignment, size_t bytes);

constexpr size_t kLargeBytes = 64 * 1024;
static std::atomic<uint64_t> large_count{0};
static std::atomic<uint64_t> last_bytes{0};

static void count(size_t bytes) {
    if (bytes > kLargeBytes) {
        large_count.fetch_add(1, std::memory_order_relaxed);
        last_bytes.store(bytes, std::memory_order_relaxed);
    }
}

uint64_t large_allocations() { return large_count.load(); }
uint64_t last_large_bytes() { return last_bytes.load(); }

void* malloc(size_t bytes) {
    count(bytes);
    return __libc_malloc(bytes);
}

void* calloc(size_t number, size_t bytes) {
    count(number * bytes);
    return __libc_calloc(number, bytes);
}

void* realloc(void* pointer, size_t bytes) {
    count(bytes);
    return __libc_realloc(pointer, bytes);
}

void* memalign(size_t alignment, size_t bytes) {
    count(bytes);
    return __libc_memalign(alignment, bytes);
}

void* aligned_alloc(size_t alignment, size_t bytes) { return memalign(alignment, bytes); }

int posix_memalign(void** pointer, size_t alignment, size_t bytes) {
    void* result = memalign(alignment, bytes);
    if (result == nullptr) {
        return ENOMEM;
    }
    *pointer = result;
    return 0;
}

}  // extern "C"
