// Programs: how the sizes of a kernel's outputs follow from its arguments. The encoding is described in opkit.h.
#pragma once

#include <vector>

#include "tensor.hpp"

namespace opkit {

// The tensors of a call: for schema argument i, views[first[i]] and, in a list, those that follow.
struct Arguments {
    const opk_kernel* kernel;
    const opk_input* inputs;
    const View* views;
    const int32_t* first;
};

// The most words that a layout made by a program may have.
constexpr size_t kMostLayoutWords = 256;

// Writes the layout (opkit.h) of the first program that fits the call; false where none does.
bool lay_out(const Arguments& call, int64_t* layout);

// The outputs that are new tensors, no argument returned.
int32_t new_outputs(const opk_kernel& kernel);

// Appends a program to the kernel's. It is kept as long as the process lives.
// Throws std::invalid_argument where the words are no program.
void add_program(const opk_kernel& kernel, std::vector<int64_t> words);

}  // namespace opkit
