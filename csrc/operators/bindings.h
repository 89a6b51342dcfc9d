// Registers the codec's digest functions, which are no operators, with the Python module.
#pragma once

#include <pybind11/pybind11.h>

namespace diloco {

void register_codec(pybind11::module_& module);

}  // namespace diloco
