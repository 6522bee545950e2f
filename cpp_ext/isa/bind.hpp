// The kernels for Python, which tests use: every ISA by name, matrices by the buffer protocol.
#pragma once

#include <pybind11/pybind11.h>

namespace opkit::isa {
void bind(pybind11::module_& m);
}
