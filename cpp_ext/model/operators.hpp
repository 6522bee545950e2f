// The operators that programs call and that this library computes itself.
#pragma once

#include <string>
#include <vector>

#include "../../opkit/kernels/include/opkit.h"
#include "../../opkit/kernels/include/opkit_program.h"
#include "functions.hpp"

namespace opkit::model {

// The arguments of a call.
class Arguments {
public:
    Arguments(const opk_passed* values, int64_t count, SavedFunctions functions = {})
        : functions(functions), values_(values), count_(count) {}
    const SavedFunctions functions;  // that the file has
    // By position, or by name; null: it was not passed, or is None.
    const opk_passed* find(int64_t position, const char* name = nullptr) const;
    const opk_tensor* tensor(int64_t position, const char* name = nullptr) const;
    int64_t integer(int64_t position, int64_t otherwise, const char* name = nullptr) const;  // of an int or bool
    double number(int64_t position, double otherwise, const char* name = nullptr) const;
    const char* text(int64_t position, const char* otherwise, const char* name = nullptr) const;
    std::vector<int64_t> integers(int64_t position) const;
    void integers(int64_t position, int64_t* found, int64_t count) const;  // one stands for all

private:
    const opk_passed* values_;
    int64_t count_;
};

// Computes results, whose memory exists. Throws std::runtime_error.
using Operator = void (*)(const Arguments& arguments, const opk_result* results);

void opkit_attention(const Arguments& arguments, const opk_result* results);
void torch_attention(const Arguments& arguments, const opk_result* results);

// Null: this library does not compute it.
Operator find_operator(const std::string& name, const std::string& overload);

}  // namespace opkit::model
