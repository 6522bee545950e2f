#include <pybind11/pybind11.h>

#include <array>
#include <stdexcept>
#include <string>

#include "../isa/bind.hpp"
#include "../runtime/failure.hpp"
#include "torch.hpp"

namespace py = pybind11;

namespace opkit::product {
namespace {

using Address = uintptr_t;
using Pair = std::array<int64_t, 2>;

const float* floats(Address address) { return reinterpret_cast<const float*>(address); }
float* writable(Address address) { return reinterpret_cast<float*>(address); }

// Runs work(parallel, kernels) without the GIL.
template <class Work>
void compute(const Work& work) {
    const isa::Table& kernels = isa::environment_table();
    const Report report;
    {
        const py::gil_scoped_release released;
        work(torch_threads(), kernels);
    }
    if (report.failed()) throw std::runtime_error("opkit: a product failed: " + report.text());
}

Activation activation_of(const std::string& name) {
    if (name == "none") return kNone;
    if (name == "relu") return kRelu;
    throw py::value_error("opkit: there is no activation " + name);
}

void bind_linear(Address x, int64_t x_pitch, Address packed, Address bias, Address y, int64_t rows, int64_t columns, int64_t depth,
                 const std::string& activation) {
    const Linear call{floats(x), x_pitch, floats(packed), floats(bias), nullptr, 0, writable(y), columns, rows, columns, depth,
                      activation_of(activation)};
    compute([&](const Parallel& parallel, const isa::Table& kernels) { linear(call, parallel, kernels); });
}

using Sizes = std::array<int64_t, 7>;  // batch, in_channels, height, width, out_channels, out_height, out_width

bool bind_winograd(Address x, Address w, Address y, const Sizes& sizes, const std::array<int64_t, 4>& strides, const Pair& padding) {
    const auto& [batch, in_channels, height, width, out_channels, out_height, out_width] = sizes;
    const Convolution call{floats(x), writable(y), nullptr, nullptr, nullptr, batch, in_channels, height, width, out_channels,
                           out_height, out_width, {3, 3}, {1, 1}, {padding[0], padding[1]}, {1, 1}, 1, kNone, 2, true};
    bool computed = false;
    compute([&](const Parallel& parallel, const isa::Table& kernels) {
        computed = winograd(call, {floats(w), strides[0], strides[1], strides[2], strides[3]}, parallel, kernels);
    });
    return computed;
}

void bind_convolution(Address x, Address packed, Address bias, Address addend, Address y, const Sizes& sizes, const Pair& kernel,
                      const Pair& stride, const Pair& padding, const Pair& dilation, int64_t groups, const std::string& activation,
                      int64_t tile, bool channels_last) {
    const auto& [batch, in_channels, height, width, out_channels, out_height, out_width] = sizes;
    const Convolution call{floats(x), writable(y), floats(packed), floats(bias), floats(addend), batch, in_channels, height, width,
                           out_channels, out_height, out_width, {kernel[0], kernel[1]}, {stride[0], stride[1]},
                           {padding[0], padding[1]}, {dilation[0], dilation[1]}, groups, activation_of(activation), tile, channels_last};
    compute([&](const Parallel& parallel, const isa::Table& kernels) { convolution(call, parallel, kernels); });
}

}  // namespace

void bind(py::module_& m) {
    m.def("product_functions", [] {
        const Functions found = functions(isa::environment_table());
        return std::pair(reinterpret_cast<Address>(found.mm), reinterpret_cast<Address>(found.bmm));
    });
    m.def("packed_floats", &packed_floats, py::arg("columns"), py::arg("depth"));
    m.def(
        "pack",
        [](Address w, int64_t column_stride, int64_t depth_stride, int64_t columns, int64_t depth, Address packed) {
            pack(floats(w), column_stride, depth_stride, columns, depth, writable(packed));
        },
        py::arg("w"), py::arg("column_stride"), py::arg("depth_stride"), py::arg("columns"), py::arg("depth"), py::arg("packed"));
    m.def("packed_convolution_floats", &packed_convolution_floats, py::arg("out_channels"), py::arg("in_per_group"),
          py::arg("kernel_height"), py::arg("kernel_width"), py::arg("groups"));
    m.def(
        "pack_convolution",
        [](Address w, int64_t out_channels, int64_t in_per_group, int64_t height, int64_t width, int64_t groups, Address packed) {
            pack_convolution(floats(w), out_channels, in_per_group, height, width, groups, writable(packed));
        },
        py::arg("w"), py::arg("out_channels"), py::arg("in_per_group"), py::arg("kernel_height"), py::arg("kernel_width"),
        py::arg("groups"), py::arg("packed"));
    m.def("packed_winograd_floats", &packed_winograd_floats, py::arg("out_channels"), py::arg("in_channels"), py::arg("tile"));
    m.def(
        "pack_winograd",
        [](Address w, int64_t out_channels, int64_t in_channels, int64_t tile, Address packed) {
            pack_winograd(floats(w), out_channels, in_channels, tile, writable(packed));
        },
        py::arg("w"), py::arg("out_channels"), py::arg("in_channels"), py::arg("tile"), py::arg("packed"));
    m.def("linear", &bind_linear, py::arg("x"), py::arg("x_pitch"), py::arg("packed"), py::arg("bias"), py::arg("y"), py::arg("rows"),
          py::arg("columns"), py::arg("depth"), py::arg("activation"));
    m.def("winograd", &bind_winograd, py::arg("x"), py::arg("w"), py::arg("y"), py::arg("sizes"), py::arg("strides"),
          py::arg("padding"));
    m.def("convolution", &bind_convolution, py::arg("x"), py::arg("packed"), py::arg("bias"), py::arg("addend"), py::arg("y"),
          py::arg("sizes"), py::arg("kernel"), py::arg("stride"), py::arg("padding"), py::arg("dilation"), py::arg("groups"),
          py::arg("activation"), py::arg("tile"), py::arg("channels_last"));
}

}  // namespace opkit::product
