#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "../isa/bind.hpp"
#include "../runtime/failure.hpp"
#include "backward_call.hpp"
#include "bind_programs.hpp"

namespace py = pybind11;

namespace opkit::attention {
namespace {

using Strides3 = std::array<int64_t, 3>;

// What calls of the same shapes have in common: all but where the tensors lie. `strides` are those of the first three dimensions,
// in elements; the last dimension is dense.
class Shape {
public:
    Shape(std::optional<std::string> isa, const std::string& dtype, const Sizes& sizes, const std::vector<Strides3>& strides,
          size_t tensors, Program mask, const std::vector<Strides>& mask_tensors, Program bias,
          const std::vector<std::pair<Strides, std::string>>& bias_tensors, double scale, double softcap,
          const std::vector<Described>& mask_functions, const std::vector<Described>& bias_functions)
        : isa_(std::move(isa)),
          type_(type_of(dtype)),
          strides_(strides),
          programs_(sizes, std::move(mask), mask_tensors, std::move(bias), bias_tensors, mask_functions, bias_functions),
          scale_(static_cast<float>(scale)),
          softcap_(static_cast<float>(softcap)) {
        if (type_ == Type::Double) throw py::value_error("opkit::attention: there is no kernel for float64");
        if (strides.size() != tensors) throw py::value_error("opkit::attention: strides of " + std::to_string(tensors) + " tensors");
    }

    // Runs work(call) without the GIL. Throws std::runtime_error with what failed in another thread, such as an allocation.
    template <class Work>
    void run(Address q, Address k, Address v, const Addresses& mask_tensors, const Addresses& bias_tensors, const Work& work) const {
        const isa::Table& kernels = isa::within(isa_).kernels;
        std::optional<Mask> mask;
        std::optional<Biases> biases;
        if (!programs_.mask) mask.emplace(programs_.make_mask(mask_tensors));
        if (!programs_.biases) biases.emplace(programs_.make_biases(bias_tensors));
        const auto& [batch, heads, kv_heads, queries, keys, head, columns] = programs_.sizes;
        Call call{batch, heads, kv_heads, queries, keys, head, columns, at(0, q), at(1, k), at(2, v), nullptr, {}, nullptr,
                  nullptr, scale_, softcap_, mask ? *mask : *programs_.mask, biases ? *biases : *programs_.biases, &kernels};
        const Report report;
        {
            const py::gil_scoped_release released;
            work(call);
        }
        if (report.failed()) throw std::runtime_error("opkit::attention: " + report.text());
    }

    // The State of each tile of kBackwardRows queries and kKeys keys, by batch, head, block of queries and tile of keys.
    py::bytes states(const Addresses& mask_tensors) const {
        const Mask mask = programs_.make_mask(mask_tensors);
        const auto& [batch, heads, kv_heads, queries, keys, head, columns] = programs_.sizes;
        std::vector<uint64_t> scratch(static_cast<size_t>(mask.scratch(kBackwardRows))), bits(kBackwardRows);
        std::string found;
        for (int64_t unit = 0; unit < batch * heads; ++unit)
            for (int64_t row = 0; row < queries; row += kBackwardRows)
                for (int64_t key = 0; key < keys; key += kKeys) {
                    const Tile tile{unit / heads, unit % heads, row, std::min(kBackwardRows, queries - row), key, std::min(kKeys, keys - key)};
                    found += static_cast<char>(mask.look(tile, scratch.data(), bits.data()));
                }
        return found;
    }

    Operand at(size_t tensor, Address data) const {
        const Strides3& s = strides_[tensor];
        return {reinterpret_cast<const void*>(data), {s[0], s[1], s[2]}, type_};
    }

private:
    std::optional<std::string> isa_;
    Type type_;
    std::vector<Strides3> strides_;
    Programs programs_;
    float scale_, softcap_;
};

class Forward : public Shape {
public:
    using Shape::Shape;
    void operator()(Address q, Address k, Address v, Address out, Address lse, Address sinks, const Addresses& mask_tensors,
                    const Addresses& bias_tensors) const {
        run(q, k, v, mask_tensors, bias_tensors, [&](Call& call) {
            const Operand to = at(3, out);
            call.out = const_cast<void*>(to.data);
            std::copy_n(to.stride, 3, call.out_stride);
            call.lse = reinterpret_cast<float*>(lse);
            call.sinks = reinterpret_cast<const float*>(sinks);
            forward(call);
        });
    }
};

using Wanted = std::tuple<Address, int64_t, std::array<int64_t, 4>, bool, bool, bool>;

std::vector<BiasGradient> gradients_of(const std::vector<Wanted>& wanted) {
    std::vector<BiasGradient> found;
    for (const auto& [data, elements, s, by_batch, by_head, by_key] : wanted)
        found.push_back({reinterpret_cast<double*>(data), elements, {s[0], s[1], s[2], s[3]}, by_batch, by_head, by_key});
    return found;
}

class Backward : public Shape {
public:
    using Shape::Shape;
    void operator()(Address gradient, Address of_lse, Address q, Address k, Address v, Address out, Address lse, Address to_q,
                    Address to_k, Address to_v, Address delta, Address sinks, const Addresses& mask_tensors,
                    const Addresses& bias_tensors, const std::vector<Wanted>& wanted) const {
        const std::vector<BiasGradient> of_biases = gradients_of(wanted);
        run(q, k, v, mask_tensors, bias_tensors, [&](Call& call) {
            call.sinks = reinterpret_cast<const float*>(sinks);
            backward(call, {at(3, out), at(4, gradient), reinterpret_cast<const float*>(lse), reinterpret_cast<const float*>(of_lse),
                            at(5, to_q), at(6, to_k), at(7, to_v), reinterpret_cast<float*>(delta)}, of_biases);
        });
    }
};

class BiasBackward : public Shape {
public:
    using Shape::Shape;
    void operator()(Address gradient, Address delta, Address q, Address k, Address v, Address lse, const Addresses& mask_tensors,
                    const Addresses& bias_tensors, Address sinks, const std::vector<Wanted>& wanted) const {
        const std::vector<BiasGradient> of_biases = gradients_of(wanted);
        run(q, k, v, mask_tensors, bias_tensors, [&](Call& call) {
            call.sinks = reinterpret_cast<const float*>(sinks);
            Gradients arrays{};
            arrays.gradient = at(3, gradient);
            arrays.lse = reinterpret_cast<const float*>(lse);
            arrays.delta = reinterpret_cast<float*>(delta);
            backward(call, arrays, of_biases);
        });
    }
};

template <class Kernel, size_t tensors>
py::class_<Kernel> bind_shape(py::module_& m, const char* name, const char* doc) {
    return py::class_<Kernel>(m, name, doc)
        .def(py::init([](std::optional<std::string> isa, const std::string& dtype, const Sizes& sizes,
                         const std::vector<Strides3>& strides, Program mask, const std::vector<Strides>& mask_tensors, Program bias,
                         const std::vector<std::pair<Strides, std::string>>& bias_tensors, double scale, double softcap,
                         const std::vector<Described>& mask_functions, const std::vector<Described>& bias_functions) {
                 return Kernel(std::move(isa), dtype, sizes, strides, tensors, std::move(mask), mask_tensors, std::move(bias),
                               bias_tensors, scale, softcap, mask_functions, bias_functions);
             }),
             py::arg("isa"), py::arg("dtype"), py::arg("sizes"), py::arg("strides"), py::arg("mask"), py::arg("mask_tensors"),
             py::arg("bias"), py::arg("bias_tensors"), py::arg("scale"), py::arg("softcap"),
             py::arg("mask_functions") = std::vector<Described>(), py::arg("bias_functions") = std::vector<Described>());
}

}  // namespace

void bind(py::module_& m) {
    bind_shape<Forward, 4>(m, "AttentionForward", "Attention of tensors of some shapes, by their addresses.")
        .def("__call__", &Forward::operator(), py::arg("q"), py::arg("k"), py::arg("v"), py::arg("out"), py::arg("lse"),
             py::arg("sinks") = 0, py::arg("mask_tensors") = Addresses(), py::arg("bias_tensors") = Addresses())
        .def("states", &Forward::states, py::arg("mask_tensors"),
             "What is seen of each tile of 96 queries and 64 keys, as bytes: 0 hidden, 1 full, 2 a part.");
    bind_shape<Backward, 8>(m, "AttentionBackward", "The gradients of attention of tensors of some shapes.")
        .def("__call__", &Backward::operator(), py::arg("gradient"), py::arg("of_lse"), py::arg("q"), py::arg("k"), py::arg("v"),
             py::arg("out"), py::arg("lse"), py::arg("to_q"), py::arg("to_k"), py::arg("to_v"), py::arg("delta"),
             py::arg("sinks") = 0, py::arg("mask_tensors") = Addresses(), py::arg("bias_tensors") = Addresses(),
             py::arg("wanted") = std::vector<Wanted>());
    bind_shape<BiasBackward, 4>(m, "AttentionBiasBackward", "The gradients of the tensors of biases.")
        .def("__call__", &BiasBackward::operator(), py::arg("gradient"), py::arg("delta"), py::arg("q"), py::arg("k"), py::arg("v"),
             py::arg("lse"), py::arg("mask_tensors"), py::arg("bias_tensors"), py::arg("sinks"), py::arg("wanted"));
}

}  // namespace opkit::attention
