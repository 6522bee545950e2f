// The description of a kernel, from the dict that Python gives.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>

#include "kernel.hpp"

namespace py = pybind11;

namespace opkit::launch {
namespace {

// The ends of the names of enumerations in opkit.h, by number.
constexpr const char* kSources[] = {
    "DATA",   "TENSOR", "DATA_LIST", "TENSOR_LIST",  "SCALAR",         "SCALAR_POINTER",
    "STRING", "VALUES", "LENGTH",    "NAMED_SIZE",   "NUMEL",          "RANK",
    "SIZE",   "STRIDE", "STREAM",    "INT_CONSTANT", "FLOAT_CONSTANT", "PACKED_TENSOR"};
constexpr const char* kKinds[] = {"tensor", "tensors", "int",    "float", "bool",   "str",
                                  "dtype",  "ints",    "floats", "bools", "ignored"};

template <size_t N>
int32_t number_of(const std::string& name, const char* const (&names)[N], const char* what) {
    for (size_t i = 0; i < N; i++)
        if (name == names[i]) return static_cast<int32_t>(i);
    throw std::invalid_argument("\"" + name + "\" is no " + what);
}

ShapeDescription shape(const py::dict& fields, const std::vector<std::string>& names) {
    const auto number = [&](const py::handle& size) {  // as opk_shape has it
        if (size.is_none()) return int32_t{OPK_ANY};
        if (py::isinstance<py::int_>(size)) return OPK_LITERAL(size.cast<int32_t>());
        const std::string name = size.cast<std::string>();
        for (size_t i = 0; i < names.size(); i++)
            if (names[i] == name) return static_cast<int32_t>(i);
        throw std::invalid_argument("\"" + name + "\" is not among the names of sizes");
    };
    ShapeDescription result{{}, {}, OPK_NO_NAME};
    for (const py::handle size : fields["before"]) result.before.push_back(number(size));
    for (const py::handle size : fields["after"]) result.after.push_back(number(size));
    const py::object variadic = fields["variadic"];
    if (!variadic.is_none())
        result.variadic = variadic.cast<std::string>().empty() ? int32_t{OPK_UNNAMED} : number(variadic);
    return result;
}

ArgumentDescription argument(const py::dict& fields, const std::vector<std::string>& names) {
    ArgumentDescription result{fields["name"].cast<std::string>(),
                         number_of(fields["kind"].cast<std::string>(), kKinds, "kind of an argument"),
                         fields["optional"].cast<bool>(), fields["written"].cast<bool>(), std::nullopt};
    const py::object annotated = fields["shape"];
    if (!annotated.is_none()) result.shape = shape(annotated, names);
    return result;
}

OutputDescription output(const py::dict& fields) {
    const py::object alias = fields["alias"];
    return {fields["name"].cast<std::string>(), alias.is_none() ? -1 : alias.cast<int32_t>()};
}

SourceDescription source(const py::sequence& fields) {
    SourceDescription result{number_of(fields[0].cast<std::string>(), kSources, "source"),
                       fields[1].cast<int32_t>(),
                       fields[2].cast<int32_t>(),
                       fields[3].cast<int32_t>(),
                       {}};
    const py::object constant = fields[4];
    result.constant.i = 0;
    if (py::isinstance<py::float_>(constant))
        result.constant.f = constant.cast<double>();
    else if (!constant.is_none())
        result.constant.i = constant.cast<int64_t>();
    return result;
}

}  // namespace

Description read_description(const py::dict& fields) {
    Description result{fields["operator"].cast<std::string>(),
                       fields["kernel"].cast<std::string>(),
                       fields["schema"].cast<std::string>(),
                       fields["cuda"].cast<bool>(),
                       {},
                       {},
                       fields["size_names"].cast<std::vector<std::string>>(),
                       {}};
    for (const py::handle each : fields["arguments"])
        result.arguments.push_back(argument(each.cast<py::dict>(), result.size_names));
    for (const py::handle each : fields["outputs"]) result.outputs.push_back(output(each.cast<py::dict>()));
    for (const py::handle each : fields["sources"]) result.sources.push_back(source(each.cast<py::sequence>()));
    return result;
}

}  // namespace opkit::launch
