#include <pybind11/stl.h>

#include <cstring>

#include "exchange/bindings/shared.h"
#include "exchange/engine/engine.h"
#include "exchange/engine/words.h"

namespace py = pybind11;

namespace diloco {

void register_messages(py::module_& m) {
    py::class_<Header> header(m, "Header");
    header
        .def(py::init([](const std::string& kind) {
                 Header header;
                 header.kind = static_cast<uint8_t>(kind_from_name(kind));
                 return header;
             }),
             py::arg("kind"))
        .def_property_readonly("kind", [](const Header& h) { return kind_name(Kind(h.kind)); })
        .def_property(
            "wire",
            [](const Header& h) { return std::string(h.wire, strnlen(h.wire, sizeof(h.wire))); },
            [](Header& h, const std::string& wire) {
                TORCH_CHECK_VALUE(wire.size() <= sizeof(h.wire), "wire name too long: ", wire);
                std::memset(h.wire, 0, sizeof(h.wire));
                std::memcpy(h.wire, wire.data(), wire.size());
            })
        .def_readwrite("flags", &Header::flags)
        .def_property_readonly("is_reset", [](const Header& h) { return (h.flags & kReset) != 0; })
        .def_property_readonly("is_change_due",
                               [](const Header& h) { return (h.flags & kChange) != 0; })
        .def_readonly("replica", &Header::replica)
        .def_readonly("epoch", &Header::epoch);
    visit_numbers(
        [&](const char* name, auto member, const char*) { header.def_readwrite(name, member); });
    m.attr("RESET") = int{kReset};
    m.attr("CHANGE") = int{kChange};
    m.def("find_mismatch", &find_mismatch, py::arg("headers"));
    m.def("nothing_to_average", &nothing_to_average, py::arg("reset_replicas"));
    m.def(
        "find_bad_elements",
        [](const std::vector<std::pair<int64_t, int64_t>>& numbers,
           const std::vector<int64_t>& replicas) {
            std::vector<Vote> votes(numbers.size());
            for (size_t rank = 0; rank < numbers.size(); ++rank) {
                std::tie(votes[rank].num_bad, votes[rank].num_bad_mean) = numbers[rank];
            }
            const BadElements bad = find_bad_elements(votes, replicas);
            return std::make_pair(bad.text, bad.replicas);
        },
        py::arg("numbers"), py::arg("replicas"),
        "Say what votes (own, of the mean) in rank order tell: (sentence or \"\", whose).");
}

}  // namespace diloco
