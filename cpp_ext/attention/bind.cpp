#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "../isa/bind.hpp"
#include "forward_call.hpp"

namespace py = pybind11;

namespace opkit::attention {
namespace {

using Address = uintptr_t;
using Strides3 = std::array<int64_t, 3>;
using MaskTensor = std::pair<Address, std::vector<int64_t>>;
using BiasTensor = std::tuple<Address, std::vector<int64_t>, std::string>;

Type type_of(const std::string& name) {
    const std::pair<const char*, Type> known[] = {
        {"float32", Type::Float}, {"float64", Type::Double}, {"float16", Type::Half}, {"bfloat16", Type::Brain}};
    for (const auto& [spelled, type] : known)
        if (name == spelled) return type;
    throw py::value_error("opkit::attention: there is no kernel for " + name);
}

Strided strided(Address data, const std::vector<int64_t>& strides) {
    Strided found{reinterpret_cast<const void*>(data), {}};
    if (strides.size() > 4) throw py::value_error("opkit::attention: a tensor has more than four dimensions");
    for (size_t i = 0; i < strides.size(); ++i) found.stride[i] = strides[i];
    return found;
}

Operand operand(Address data, const Strides3& strides, Type type) {
    return {reinterpret_cast<const void*>(data), {strides[0], strides[1], strides[2]}, type};
}

void run(const std::optional<std::string>& isa, const std::string& dtype, const std::array<int64_t, 7>& sizes, Address q,
         const Strides3& q_stride, Address k, const Strides3& k_stride, Address v, const Strides3& v_stride, Address out,
         const Strides3& out_stride, Address lse, const std::vector<int64_t>& mask_program,
         const std::vector<MaskTensor>& mask_tensors, const std::vector<int64_t>& bias_program,
         const std::vector<BiasTensor>& bias_tensors, Address sinks, double scale, double softcap) {
    const isa::Choice& choice = isa::within(isa);
    const Type type = type_of(dtype);
    std::vector<Strided> truths;
    for (const auto& [data, strides] : mask_tensors) truths.push_back(strided(data, strides));
    std::vector<Typed> added;
    for (const auto& [data, strides, name] : bias_tensors) added.push_back({strided(data, strides), type_of(name)});
    const Mask mask(mask_program, std::move(truths), sizes[0], sizes[4]);
    const Biases biases(bias_program, std::move(added), sizes[3], sizes[4]);
    const Call call{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6],
                    operand(q, q_stride, type), operand(k, k_stride, type), operand(v, v_stride, type),
                    reinterpret_cast<void*>(out), {out_stride[0], out_stride[1], out_stride[2]},
                    reinterpret_cast<float*>(lse), reinterpret_cast<const float*>(sinks), static_cast<float>(scale),
                    static_cast<float>(softcap), mask, biases, &choice.kernels};
    py::gil_scoped_release released;
    forward(call);
}

}  // namespace

void bind(py::module_& m) {
    m.def("attention_forward", &run, py::arg("isa"), py::arg("dtype"), py::arg("sizes"), py::arg("q"), py::arg("q_stride"),
          py::arg("k"), py::arg("k_stride"), py::arg("v"), py::arg("v_stride"), py::arg("out"), py::arg("out_stride"),
          py::arg("lse"), py::arg("mask"), py::arg("mask_tensors"), py::arg("bias"), py::arg("bias_tensors"), py::arg("sinks"),
          py::arg("scale"), py::arg("softcap"),
          "Attention of tensors, by their addresses and strides in elements. Sizes: batch, heads, heads of keys, queries, keys, "
          "elements of a key, of a value. The caller sees to it that they are right.");
}

}  // namespace opkit::attention
