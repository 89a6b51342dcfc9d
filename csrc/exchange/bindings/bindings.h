// Registers the exchange engine with the Python module.
#pragma once

#include <pybind11/pybind11.h>

namespace diloco {

void register_exchange(pybind11::module_& module);

}  // namespace diloco
