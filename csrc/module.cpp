// The Python module: a list of what each area registers, nothing more.
#include <pybind11/pybind11.h>
#include <torch/version.h>

#include "exchange/bindings/bindings.h"
#include "operators/bindings.h"

namespace {

// extension.py searches the extension's file for this text before loading it: built for another
// version of torch, the extension may fail to load.
[[gnu::used]] constexpr char kBuiltFor[] = "diloco_comm is built for torch " TORCH_VERSION;

}  // namespace

PYBIND11_MODULE(_C, m) {
    m.doc() = "C++ operators and exchange engine of diloco_comm.";
    m.attr("built_for") = kBuiltFor;
    diloco::register_codec(m);
    diloco::register_exchange(m);
}
