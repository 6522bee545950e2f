// The kernels for Python, which tests use: every ISA by name, matrices by the buffer protocol.
#pragma once

#include <pybind11/pybind11.h>

#include "table.hpp"

namespace opkit::isa {
void bind(pybind11::module_& m);

// The kernels within the environment's OPKIT_ISA, read as Python holds it now. Needs the GIL.
const Table& environment_table();
}
