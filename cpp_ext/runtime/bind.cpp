// opkit._core's part of the runtime.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "library.hpp"
#include "program.hpp"

namespace py = pybind11;

namespace opkit {

void bind_runtime(py::module_& m) {
    py::class_<Registration>(m, "Registration", "A kernel's place in torch's dispatcher.")
        .def("remove", &Registration::remove, "Take the kernel out of the dispatcher again.");
    py::class_<KernelLibrary>(m, "KernelLibrary", "A compiled kernel in its shared library.")
        .def(py::init(&load_kernel), py::arg("path"))
        .def_property_readonly("address", [](const KernelLibrary& self) { return reinterpret_cast<uintptr_t>(self.kernel); })
        .def_property_readonly("operator_name", [](const KernelLibrary& self) { return self.kernel->operator_name; })
        .def_property_readonly("instance_count", [](const KernelLibrary& self) { return self.kernel->instance_count; })
        .def(
            "register",
            [](const KernelLibrary& self, const std::string& op, const std::string& key, bool with_layout) {
                const BoxedKernel function = with_layout ? self.boxed_with_layout : self.boxed;
                return std::make_unique<Registration>(op, key, function, self.lease);
            },
            py::arg("op"), py::arg("key"), py::arg("with_layout"))
        .def(
            "add_program",
            [](const KernelLibrary& self, std::vector<int64_t> words) { add_program(*self.kernel, std::move(words)); },
            py::arg("words"))
        .def("forget_programs", [](const KernelLibrary& self) { forget_programs(*self.kernel); });
    m.def("runtime_address", [] { return reinterpret_cast<uintptr_t>(&runtime()); },
          "The address of the functions that every kernel is given (opk_runtime in opkit.h).");
}

}  // namespace opkit
