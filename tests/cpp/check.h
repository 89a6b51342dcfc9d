// A check that survives NDEBUG, and prints what failed where.
#pragma once

#include <unistd.h>

#include <cstdio>
#include <cstdlib>

#define EXPECT(condition)                                                                  \
    do {                                                                                   \
        if (!(condition)) {                                                                \
            std::fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition); \
            std::exit(1);                                                                  \
        }                                                                                  \
    } while (false)

// The end of main(). libtorch unregisters our operators at exit, under a mutex that
// ThreadSanitizer half sees; leaks are looked for there, so the other sanitizers take that way.
inline int passed(const char* what) {
    std::printf("%s: ok\n", what);
    std::fflush(stdout);
#if defined(__SANITIZE_THREAD__)
    _exit(0);
#endif
    return 0;
}
