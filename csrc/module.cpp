// The Python module: a list of what each area registers, nothing more.
#include <torch/extension.h>

#include "exchange/bindings.h"

PYBIND11_MODULE(_C, m) {
    m.doc() = "C++ operators and exchange engine of diloco_comm.";
    diloco::register_exchange(m);
}
