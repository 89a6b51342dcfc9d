// Functions that several files of the bindings use.
#pragma once

#include <pybind11/pybind11.h>
#include <unistd.h>

#include <chrono>

namespace diloco {

// Converts seconds to milliseconds, rounded up. Longer times are cut to ten years: far below the
// 292 years at which a signed 64-bit count of nanoseconds overflows.
std::chrono::milliseconds from_seconds(double seconds);

// Throws what the handler of a signal raised, such as KeyboardInterrupt.
void check_signals();

// Releases the GIL while an object of this class exists. If the interpreter has begun to end, the
// destructor never returns, and the thread ends with the process, as in Python 3.14 and newer.
// Older versions throw an exception through the thread, which must not leave the destructor: that
// would abort the process.
class WithoutGil {
  public:
    WithoutGil() : state_(PyEval_SaveThread()) {}
    ~WithoutGil() {
        try {
            PyEval_RestoreThread(state_);
        } catch (...) {
            while (true) pause();
        }
    }
    WithoutGil(const WithoutGil&) = delete;
    WithoutGil& operator=(const WithoutGil&) = delete;

  private:
    PyThreadState* const state_;
};

void register_messages(pybind11::module_& module);
void register_jobs(pybind11::module_& module);
void register_engine(pybind11::module_& module);

}  // namespace diloco
