// What the files of the bindings share.
#pragma once

#include <pybind11/pybind11.h>
#include <unistd.h>

#include <chrono>

namespace diloco {

// Rounded up. At most ten years: a clock that counts nanoseconds ends after three hundred.
std::chrono::milliseconds from_seconds(double seconds);

// Throws what the handler of a signal raised, such as KeyboardInterrupt.
void check_signals();

// While one exists, this thread runs without the GIL. A thread of Python that wants the GIL back
// after the interpreter has begun to end does not come back, and ends with the process, as from
// Python 3.14 on. Before, Python throws an exception of its own through the thread, which ends the
// process by SIGABRT where the exception leaves a destructor.
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
