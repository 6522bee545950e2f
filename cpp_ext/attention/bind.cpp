#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "../isa/bind.hpp"
#include "../runtime/failure.hpp"
#include "backward_call.hpp"

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

// A tensor: its address, and its strides in elements, of which the last is 1.
using Place = std::tuple<Address, Strides3>;

Operand operand(const Place& place, Type type) {
    const auto& [data, s] = place;
    return {reinterpret_cast<const void*>(data), {s[0], s[1], s[2]}, type};
}

// What both directions have in common.
struct Given {
    Given(const std::string& dtype, const std::array<int64_t, 7>& sizes, const std::vector<int64_t>& mask_program,
          const std::vector<MaskTensor>& mask_tensors, const std::vector<int64_t>& bias_program,
          const std::vector<BiasTensor>& bias_tensors)
        : type(type_of(dtype)),
          mask(mask_program, truths(mask_tensors), sizes[0], sizes[4]),
          biases(bias_program, added(bias_tensors), sizes[3], sizes[4]) {
        if (type == Type::Double) throw py::value_error("opkit::attention: there is no kernel for float64");
    }
    static std::vector<Strided> truths(const std::vector<MaskTensor>& tensors) {
        std::vector<Strided> found;
        for (const auto& [data, strides] : tensors) found.push_back(strided(data, strides));
        return found;
    }
    static std::vector<Typed> added(const std::vector<BiasTensor>& tensors) {
        std::vector<Typed> found;
        for (const auto& [data, strides, name] : tensors) found.push_back({strided(data, strides), type_of(name)});
        return found;
    }
    Call call(const isa::Table& kernels, const std::array<int64_t, 7>& sizes, const Place& q, const Place& k, const Place& v,
              double scale, double softcap) const {
        Call found{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6], operand(q, type), operand(k, type),
                   operand(v, type), nullptr, {}, nullptr, nullptr, static_cast<float>(scale), static_cast<float>(softcap),
                   mask, biases, &kernels};
        return found;
    }
    Type type;
    Mask mask;
    Biases biases;
};

// Runs it without the GIL. Throws std::runtime_error with what failed in another thread, such as an allocation.
template <class Work>
void checked(const Work& work) {
    const Report report;
    {
        py::gil_scoped_release released;
        work();
    }
    if (report.failed()) throw std::runtime_error("opkit::attention: " + report.text());
}

void run_forward(const std::optional<std::string>& isa, const std::string& dtype, const std::array<int64_t, 7>& sizes,
                 const Place& q, const Place& k, const Place& v, const Place& out, Address lse,
                 const std::vector<int64_t>& mask_program, const std::vector<MaskTensor>& mask_tensors,
                 const std::vector<int64_t>& bias_program, const std::vector<BiasTensor>& bias_tensors, Address sinks,
                 double scale, double softcap) {
    const Given given(dtype, sizes, mask_program, mask_tensors, bias_program, bias_tensors);
    Call call = given.call(isa::within(isa).kernels, sizes, q, k, v, scale, softcap);
    const Operand to = operand(out, given.type);
    call.out = const_cast<void*>(to.data);
    std::copy_n(to.stride, 3, call.out_stride);
    call.lse = reinterpret_cast<float*>(lse);
    call.sinks = reinterpret_cast<const float*>(sinks);
    checked([&] { forward(call); });
}

void run_backward(const std::optional<std::string>& isa, const std::string& dtype, const std::array<int64_t, 7>& sizes,
                  const Place& q, const Place& k, const Place& v, const Place& out, const Place& gradient, Address lse,
                  Address of_lse, const Place& to_q, const Place& to_k, const Place& to_v, Address delta,
                  const std::vector<int64_t>& mask_program, const std::vector<MaskTensor>& mask_tensors,
                  const std::vector<int64_t>& bias_program, const std::vector<BiasTensor>& bias_tensors, double scale,
                  double softcap) {
    const Given given(dtype, sizes, mask_program, mask_tensors, bias_program, bias_tensors);
    const Call call = given.call(isa::within(isa).kernels, sizes, q, k, v, scale, softcap);
    const Gradients gradients{operand(out, given.type), operand(gradient, given.type), reinterpret_cast<const float*>(lse),
                              reinterpret_cast<const float*>(of_lse), operand(to_q, given.type), operand(to_k, given.type),
                              operand(to_v, given.type), reinterpret_cast<float*>(delta)};
    checked([&] { backward(call, gradients); });
}

}  // namespace

void bind(py::module_& m) {
    m.def("attention_forward", &run_forward, py::arg("isa"), py::arg("dtype"), py::arg("sizes"), py::arg("q"), py::arg("k"),
          py::arg("v"), py::arg("out"), py::arg("lse"), py::arg("mask"), py::arg("mask_tensors"), py::arg("bias"),
          py::arg("bias_tensors"), py::arg("sinks"), py::arg("scale"), py::arg("softcap"),
          "Attention of tensors, by their addresses and strides. The caller sees to it that they are right.");
    m.def("attention_backward", &run_backward, py::arg("isa"), py::arg("dtype"), py::arg("sizes"), py::arg("q"), py::arg("k"),
          py::arg("v"), py::arg("out"), py::arg("gradient"), py::arg("lse"), py::arg("of_lse"), py::arg("to_q"), py::arg("to_k"),
          py::arg("to_v"), py::arg("delta"), py::arg("mask"), py::arg("mask_tensors"), py::arg("bias"), py::arg("bias_tensors"),
          py::arg("scale"), py::arg("softcap"), "Gradients of attention; where they go to is written.");
}

}  // namespace opkit::attention
