// What the files of the bindings share.
#pragma once

#include <pybind11/pybind11.h>

#include <chrono>

namespace diloco {

// Rounded up. At most ten years: a clock that counts nanoseconds ends after three hundred.
std::chrono::milliseconds from_seconds(double seconds);

// Throws what the handler of a signal raised, such as KeyboardInterrupt.
void check_signals();

void register_messages(pybind11::module_& module);
void register_jobs(pybind11::module_& module);
void register_engine(pybind11::module_& module);

}  // namespace diloco
