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

// A layout (opkit.h) that a program makes.
class Layout {
public:
    const int64_t* words() const { return words_; }
    // Room for so many words, in place of those that there were.
    int64_t* room(size_t words) {
        if (words > kFew) many_.resize(words);
        return words_ = words > kFew ? many_.data() : few_;
    }

private:
    static constexpr size_t kFew = 128;
    int64_t few_[kFew];
    std::vector<int64_t> many_;
    int64_t* words_ = nullptr;
};

// Makes the layout of the first program that fits the call; false where none does.
bool lay_out(const Arguments& call, Layout& layout);

// The outputs that are new tensors, no argument returned.
int32_t new_outputs(const opk_kernel& kernel);

// Appends a program to the kernel's. It lives as long as the process.
// Throws std::invalid_argument where the words are no program.
void add_program(const opk_kernel& kernel, std::vector<int64_t> words);

// From now on calls of the kernel find no program. Other threads may still be reading the old ones: they stay.
void forget_programs(const opk_kernel& kernel);

}  // namespace opkit
