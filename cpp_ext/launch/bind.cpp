// opkit._core's part of the launcher.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "kernel.hpp"
#include "problem.hpp"
#include "python.hpp"
#include "series.hpp"

namespace py = pybind11;

namespace opkit::launch {
namespace {

std::shared_ptr<Binary> make_binary(std::shared_ptr<Driver> driver, const py::bytes& image, const std::string& name,
                                    int64_t threads, int64_t shared, Extent cluster, bool cooperative, bool pdl, bool prefer_shared,
                                    int64_t scratch, int64_t scratch_align, int64_t profile_scratch,
                                    int64_t profile_scratch_align) {
    const Properties properties{
        threads, shared, cluster, cooperative, pdl, prefer_shared, {scratch, scratch_align}, {profile_scratch, profile_scratch_align}};
    return std::make_shared<Binary>(std::move(driver), std::string(image), name, properties);
}

py::dict attributes(const Binary& binary, int32_t device) {
    Attributes found;
    {
        const py::gil_scoped_release released;
        found = binary.attributes(device);
    }
    py::dict result;
    result["registers"] = found.registers;
    result["local_bytes"] = found.local_bytes;
    result["shared_bytes"] = found.shared_bytes;
    result["max_threads"] = found.max_threads;
    return result;
}

template <class T>
T item(const py::dict& row, const char* name, T otherwise) {
    return row.contains(name) ? row[name].cast<T>() : otherwise;
}

MapLayout map_layout(const py::dict& row) {
    return {row["source"].cast<int64_t>(),
            row["swizzle"].cast<int32_t>(),
            row["elem_type"].cast<int32_t>(),
            row["elem_size"].cast<int64_t>(),
            row["block"].cast<std::vector<uint32_t>>(),
            item(row, "padding_nan", false),
            item(row, "tf32", false),
            item(row, "fp4_padded", false),
            item(row, "sizes", std::vector<int64_t>{}),
            item(row, "strides", std::vector<int64_t>{})};
}

std::shared_ptr<Entry> make_entry(std::shared_ptr<Binary> binary, Extent grid,
                                  const std::vector<Entry::GivenParameter>& params, const std::vector<py::dict>& maps,
                                  std::vector<int64_t> zero, std::optional<Extent> chunk) {
    std::vector<MapLayout> layouts;
    for (const py::dict& row : maps) layouts.push_back(map_layout(row));
    return std::make_shared<Entry>(std::move(binary), grid, params, std::move(layouts), std::move(zero), chunk);
}

void bind_entries(py::module_& m) {
    py::class_<Driver, std::shared_ptr<Driver>>(m, "Driver", "The GPU's driver.")
        .def(py::init<const std::string&, const std::string&>(), py::arg("path"), py::arg("kind"));
    py::class_<Binary, std::shared_ptr<Binary>>(m, "Binary", "One compiled kernel.")
        .def(py::init(&make_binary), py::arg("driver"), py::arg("image"), py::arg("name"), py::kw_only(),
             py::arg("threads"), py::arg("shared"), py::arg("cluster") = Extent{1, 1, 1},
             py::arg("cooperative") = false, py::arg("pdl") = false, py::arg("prefer_shared") = true, py::arg("scratch") = 0,
             py::arg("scratch_align") = 1, py::arg("profile_scratch") = 0, py::arg("profile_scratch_align") = 1)
        .def("function", [](const Binary& self, int32_t device) {
                 return reinterpret_cast<uintptr_t>(self.function(device));
             },
             py::arg("device"), py::call_guard<py::gil_scoped_release>(),
             "The address of the function on a device.")
        .def("attributes", &attributes, py::arg("device"));
    py::class_<Entry, std::shared_ptr<Entry>>(m, "Entry", "How calls of one kind are launched.")
        .def(py::init(&make_entry), py::arg("binary"), py::arg("grid"), py::arg("params"), py::kw_only(),
             py::arg("maps") = std::vector<py::dict>(), py::arg("zero") = std::vector<int64_t>(),
             py::arg("chunk") = std::nullopt)
        .def("again", [](const Entry& self, const Extent& grid, const Entry::Constants& constants) {
                 return std::make_shared<Entry>(self, grid, constants);
             },
             py::arg("grid"), py::arg("constants"));
}

using GivenMap = std::tuple<int64_t, int32_t, int64_t, std::array<uint64_t, 5>, std::array<uint32_t, 5>>;

std::unique_ptr<ProblemLaunch> make_problem_launch(const std::vector<std::pair<std::shared_ptr<Binary>, Extent>>& steps,
                                                   const std::vector<GivenMap>& maps, int64_t bytes, int32_t device) {
    std::vector<ProblemLaunch::Step> kernels;
    for (const auto& [binary, grid] : steps) kernels.push_back({binary, grid});
    std::vector<ProblemMap> described;
    for (const auto& [place, type, size, sizes, box] : maps) described.push_back({place, type, size, sizes, box});
    return std::make_unique<ProblemLaunch>(std::move(kernels), std::move(described), bytes, device);
}

void bind_problems(py::module_& m) {
    py::class_<ProblemLaunch>(m, "ProblemLaunch", "Launches of kernels that take one structure.")
        .def(py::init(&make_problem_launch), py::arg("steps"), py::arg("maps"), py::arg("bytes"), py::arg("device"))
        .def("__call__",
             [](const ProblemLaunch& self, uintptr_t problem, uintptr_t stream) {
                 self.launch(reinterpret_cast<const void*>(problem), reinterpret_cast<void*>(stream));
             },
             py::arg("problem"), py::arg("stream"), py::call_guard<py::gil_scoped_release>());
}

std::shared_ptr<const Repeated> repeat(Launcher& launcher, const py::object& call) {
    const Remembering remembering(launcher);
    call();
    return remembering.found;
}

using GivenResult = std::tuple<std::vector<int64_t>, std::vector<int64_t>, int32_t>;  // sizes, strides, dtype

std::unique_ptr<Series> make_series(std::vector<Series::Step> steps, size_t addresses,
                                    const std::vector<GivenResult>& results, const std::vector<int64_t>& memory,
                                    int32_t device) {
    std::vector<ResultLayout> layouts;
    for (const auto& [sizes, strides, dtype] : results) layouts.push_back({sizes, strides, dtype});
    return std::make_unique<Series>(std::move(steps), addresses, std::move(layouts), memory, device);
}

void bind_launcher(py::module_& m) {
    py::class_<PythonCall, std::shared_ptr<PythonCall>>(m, "Call", "A call for which a launcher has no entry yet.")
        .def_property_readonly("values", &PythonCall::values)
        .def_property_readonly("device", &PythonCall::device)
        .def_property_readonly("capturing", &PythonCall::capturing)
        .def("launch", &PythonCall::launch, py::arg("entry"))
        .def("time", &PythonCall::time, py::arg("entry"), py::kw_only(), py::arg("warmup_ms") = 5.0,
             py::arg("run_ms") = 20.0, py::arg("written") = std::vector<int64_t>());
    py::class_<Repeated, std::shared_ptr<Repeated>>(m, "Repeated", "Calls like one that was made.")
        .def("__call__",
             [](const Repeated& self, const std::vector<uintptr_t>& addresses, uintptr_t stream) {
                 self.launch(addresses.data(), addresses.size(), stream);
             },
             py::arg("addresses"), py::arg("stream"), py::call_guard<py::gil_scoped_release>());
    py::class_<Series>(m, "Series", "Repeated calls one after another.")
        .def(py::init(&make_series), py::arg("steps"), py::kw_only(), py::arg("addresses"), py::arg("results"),
             py::arg("memory"), py::arg("device"))
        .def("__call__", &Series::launch, py::arg("addresses"), py::arg("stream"),
             py::call_guard<py::gil_scoped_release>());
    py::class_<Launcher, std::shared_ptr<Launcher>>(m, "Launcher", "What runs a kernel's calls.")
        .def(py::init([](const std::string& op, const std::string& kernel, const std::vector<std::string>& roles,
                         py::object miss, bool cuda) {
                 return std::make_shared<Launcher>(op, kernel, roles, ask_python(std::move(miss)), cuda);
             }),
             py::arg("operator"), py::arg("kernel"), py::arg("roles"), py::arg("miss"), py::kw_only(), py::arg("cuda"))
        .def("repeat", &repeat, py::arg("call"))
        .def("clear", &Launcher::clear, py::call_guard<py::gil_scoped_release>())
        .def_property_readonly("entries", &Launcher::entries);
}

}  // namespace

Description read_description(const py::dict& fields);  // description.cpp

void bind(py::module_& m) {
    bind_entries(m);
    bind_problems(m);
    bind_launcher(m);
    m.def(
        "launch_kernel",
        [](const py::dict& description, std::shared_ptr<Launcher> launcher) {
            return launch_kernel(read_description(description), std::move(launcher));
        },
        py::arg("description"), py::arg("launcher"), "The kernel whose calls a launcher runs, ready to be registered.");
}

}  // namespace opkit::launch
