#pragma once

#include <pybind11/pybind11.h>

namespace opkit::attention {
void bind_decode(pybind11::module_& m);
}
