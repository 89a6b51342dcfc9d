#include "operators/bindings.h"

#include <pybind11/pybind11.h>

#include "wire/digest.h"

namespace py = pybind11;

namespace diloco {
namespace {

// The number mod 2^64: a sum from 2^63 on is negative if it comes from an int64 tensor.
uint64_t mod64(const py::int_& number) {
    const uint64_t value = PyLong_AsUnsignedLongLongMask(number.ptr());
    if (PyErr_Occurred() != nullptr) throw py::error_already_set();
    return value;
}

uint64_t finish_digest(const py::int_& product, const py::int_& sum, uint64_t num_bytes) {
    return wire::finish_digest(mod64(product), mod64(sum), num_bytes);
}

}  // namespace

void register_codec(py::module_& m) {
    m.def(
        "mix64", [](const py::int_& number) { return wire::mix64(mod64(number)); },
        py::arg("number"), "The finaliser of splitmix64, of a number mod 2^64.");
    m.def("finish_digest", &finish_digest, py::arg("product"), py::arg("sum"), py::arg("num_bytes"),
          "The 64-bit digest of num_bytes bytes from the two sums of the operator digest.");
}

}  // namespace diloco
