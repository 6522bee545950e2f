// Masks and biases as programs, and as what they mean for each query and key.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "../../../cpp_ext/attention/bias.hpp"
#include "../../../cpp_ext/attention/mask.hpp"
#include "checks.hpp"

namespace opkit::driver {

struct Shape {
    int64_t batch, heads, kv_heads, queries, keys, head, columns;
};

using Visible = std::function<bool(int64_t b, int64_t h, int64_t i, int64_t j)>;
using Added = std::function<double(int64_t b, int64_t h, int64_t i, int64_t j)>;

struct MaskCase {
    std::string name;
    std::vector<int64_t> program;
    std::vector<attention::Strided> tensors;
    Visible visible;
    std::vector<std::shared_ptr<void>> kept;  // the memory of the tensors
    attention::Functions functions = {};
};

struct BiasCase {
    std::string name;
    std::vector<int64_t> program;
    std::vector<attention::Typed> tensors;
    Added added;
    std::vector<std::shared_ptr<void>> kept;
    attention::Functions functions = {};
    double factor = 1;  // of the score, before what is added
};

std::vector<MaskCase> mask_cases(const Shape& shape);
std::vector<BiasCase> bias_cases(const Shape& shape);

}  // namespace opkit::driver
