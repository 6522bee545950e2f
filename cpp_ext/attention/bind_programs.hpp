// The programs of masks and biases as Python describes them: what bind.cpp and bind_decode.cpp share.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bias.hpp"
#include "mask.hpp"

namespace py = pybind11;

namespace opkit::attention {
namespace {

using Address = uintptr_t;
using Addresses = std::vector<Address>;
using Program = std::vector<int64_t>;
using Strides = std::vector<int64_t>;
using Sizes = std::array<int64_t, 7>;  // batch, heads, heads of keys, queries, keys, elements of a key, of a value

Type type_of(const std::string& name) {
    const std::pair<const char*, Type> known[] = {
        {"float32", Type::Float}, {"float64", Type::Double}, {"float16", Type::Half}, {"bfloat16", Type::Brain}};
    for (const auto& [spelled, type] : known)
        if (name == spelled) return type;
    throw py::value_error("opkit::attention: there is no kernel for " + name);
}

Strided strided(const Strides& strides) {
    Strided found;
    if (strides.size() > 4) throw py::value_error("opkit::attention: a tensor has more than four dimensions");
    for (size_t i = 0; i < strides.size(); ++i) found.stride[i] = strides[i];
    return found;
}

template <class Tensor>
std::vector<Tensor> placed(std::vector<Tensor> tensors, const Addresses& addresses) {
    if (tensors.size() != addresses.size())
        throw py::value_error("opkit::attention: " + std::to_string(tensors.size()) + " tensors of a mask or bias were declared, " +
                              std::to_string(addresses.size()) + " are given");
    for (size_t i = 0; i < tensors.size(); ++i) tensors[i].data = reinterpret_cast<const void*>(addresses[i]);
    return tensors;
}

// A user's function as Python describes it: its code and that of its derivative, its words, and where in them addresses of tensors go.
using DescribedCode = std::tuple<Address, Address, int64_t>;
using Described = std::tuple<DescribedCode, DescribedCode, Program, std::vector<std::pair<int64_t, int64_t>>>;

Functions functions_of(const std::vector<Described>& described) {
    Functions functions;
    const auto code = [](const DescribedCode& of) { return Code{std::get<0>(of), std::get<1>(of), std::get<2>(of)}; };
    for (const auto& [entry, slope, words, tensors] : described) functions.push_back({code(entry), code(slope), words, tensors});
    return functions;
}

// What a mask and biases are in a call. Without tensors they are the same in every call, and made once.
struct Programs {
    Programs(const Sizes& sizes, Program mask_program, const std::vector<Strides>& mask_tensors, Program bias_program,
             const std::vector<std::pair<Strides, std::string>>& bias_tensors, const std::vector<Described>& mask_functions,
             const std::vector<Described>& bias_functions, bool few = false)
        : sizes(sizes),
          few(few),
          mask_words(std::move(mask_program)),
          bias_words(std::move(bias_program)),
          of_mask(functions_of(mask_functions)),
          of_bias(functions_of(bias_functions)) {
        for (const Strides& strides : mask_tensors) truths.push_back(strided(strides));
        for (const auto& [strides, name] : bias_tensors) added.push_back({strided(strides), type_of(name)});
        if (truths.empty()) mask.emplace(make_mask({}));
        if (added.empty()) biases.emplace(make_biases({}));
    }
    Mask make_mask(const Addresses& addresses) const { return {mask_words, placed(truths, addresses), sizes[0], sizes[4], of_mask}; }
    Biases make_biases(const Addresses& addresses) const {
        return {bias_words, placed(added, addresses), sizes[3], sizes[4], of_bias, few};
    }
    Sizes sizes;
    bool few;
    Program mask_words, bias_words;
    Functions of_mask, of_bias;
    std::vector<Strided> truths;
    std::vector<Typed> added;
    std::optional<Mask> mask;
    std::optional<Biases> biases;
};

}  // namespace
}  // namespace opkit::attention
