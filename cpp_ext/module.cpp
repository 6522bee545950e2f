// opkit._core: the Python module of the compiled core.
#include <pybind11/pybind11.h>

#include "attention/bind_decode.hpp"
#include "cpu_features.hpp"
#include "isa/bind.hpp"

namespace py = pybind11;

namespace opkit {
void bind_runtime(py::module_& m);
}
namespace opkit::attention {
void bind(py::module_& m);
}
namespace opkit::product {
void bind(py::module_& m);
}
namespace opkit::launch {
void bind(py::module_& m);
}

static py::dict cpu_features() {
    py::dict features;
    for (const auto& found : {opkit::detect_x86(), opkit::detect_arm()})
        for (const opkit::Feature& feature : found) features[feature.name] = feature.usable;
    return features;
}

PYBIND11_MODULE(_core, m, py::mod_gil_not_used()) {
    m.doc() = "The compiled core. It holds no torch code, so one build serves every torch release.";
    m.def("cpu_features", &cpu_features,
          "Which instruction sets this processor has and its operating system lets a program use, by name.");
    m.def("x86_vendor", &opkit::x86_vendor, "What CPUID says, as \"GenuineIntel\"; empty on other processors.");
    opkit::bind_runtime(m);
    opkit::launch::bind(m);
    opkit::isa::bind(m);
    opkit::attention::bind(m);
    opkit::attention::bind_decode(m);
    opkit::product::bind(m);
}
