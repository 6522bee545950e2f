// The kernels for Python, which tests use: every ISA by name, matrices by the buffer protocol.
#pragma once

#include <pybind11/pybind11.h>

#include <optional>
#include <string>

#include "dispatch.hpp"

namespace opkit::isa {

void bind(pybind11::module_& m);

// A cap of none is the environment's OPKIT_ISA, read now. Needs the GIL, under which Python changes it. Throws ValueError on an
// unknown name.
const Choice& within(const std::optional<std::string>& cap);

// The kernels within the environment's OPKIT_ISA, read now. Needs the GIL.
const Table& environment_table();

}  // namespace opkit::isa
