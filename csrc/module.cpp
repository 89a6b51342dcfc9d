// The Python module: a list of what each area registers, nothing more.
#include <torch/extension.h>

PYBIND11_MODULE(_C, m) { m.doc() = "C++ operators and exchange engine of diloco_comm."; }
