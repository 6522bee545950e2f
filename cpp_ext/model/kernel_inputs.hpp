// What a kernel takes, from the arguments of a call.
#pragma once

#include <deque>
#include <vector>

#include "../../opkit/kernels/include/opkit.h"
#include "../../opkit/kernels/include/opkit_program.h"
#include "tensor.hpp"

namespace opkit::model {

class KernelInputs {
public:
    // Adds what was passed for the next argument; null: nothing. Throws std::invalid_argument where the kernel cannot take it.
    void add(const opk_argument& argument, const opk_passed* passed);
    const opk_input* data() const { return inputs_.data(); }

private:
    void add_list(const opk_argument& argument, const opk_passed& passed, opk_input& input);
    void* handle(const opk_tensor& tensor);

    std::vector<opk_input> inputs_;
    // what they point to
    std::deque<Tensor> tensors_;
    std::deque<std::vector<void*>> handles_;
    std::deque<std::vector<int64_t>> ints_;
    std::deque<std::vector<double>> floats_;
    std::deque<std::vector<uint8_t>> bools_;
};

}  // namespace opkit::model
