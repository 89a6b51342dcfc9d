// The Python module: a list of what each area registers, nothing more.
#include <torch/extension.h>
#include <torch/version.h>

#include "exchange/bindings/bindings.h"
#include "operators/bindings.h"

namespace {

// extension.py looks for these words in the file before loading it: under another torch the load
// may fail.
[[gnu::used]] constexpr char kBuiltFor[] = "diloco_comm is built for torch " TORCH_VERSION;

}  // namespace

PYBIND11_MODULE(_C, m) {
    m.doc() = "C++ operators and exchange engine of diloco_comm.";
    m.attr("built_for") = kBuiltFor;
    diloco::register_codec(m);
    diloco::register_exchange(m);
}
