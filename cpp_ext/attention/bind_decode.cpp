#include "bind_decode.hpp"

#include <pybind11/stl.h>

#include <optional>
#include <string>

#include "../isa/bind.hpp"
#include "../runtime/failure.hpp"
#include "decode_call.hpp"

namespace py = pybind11;

namespace opkit::attention {
namespace {

// `name` is interned, so that a lookup is a hash that Python has.
template <class T>
T taken(const py::kwargs& fields, PyObject* name) {
    PyObject* value = PyDict_GetItem(fields.ptr(), name);
    if (!value) throw py::type_error("decode_attention() needs " + py::handle(name).cast<std::string>());
    return py::handle(value).cast<T>();
}

void decode_attention(const py::kwargs& fields) {
    DecodeCall call;
#define OPKIT_DECODE_TAKE(type, name)                                   \
    static PyObject* const name = PyUnicode_InternFromString(#name);    \
    call.name = taken<type>(fields, name);
    OPKIT_DECODE_FIELDS(OPKIT_DECODE_TAKE)
#undef OPKIT_DECODE_TAKE
    const isa::Table& kernels = isa::environment_table();
    const py::gil_scoped_release released;
    const Report report;
    decode(call, kernels);
    if (report.failed()) throw std::runtime_error(report.text());
}

}  // namespace

void bind_decode(py::module_& m) {
    m.def("decode_attention", &decode_attention,
          "Attention of few queries to many keys; the fields are those of cpp_ext/attention/decode_call.hpp.");
}

}  // namespace opkit::attention
