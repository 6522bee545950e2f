// Users' functions in calls of attention, whose C is in a file's library: opkit/attn/functions/c/saved.py writes it and this table.
#pragma once

#include <cstdint>
#include <vector>

#include "../attention/function.hpp"

namespace opkit::model {

struct SavedFunction {
    const int64_t* text;  // of the expression, as programs have it
    int64_t text_count;
    const int64_t* layout;  // how many numbers, how many tensors; of each number 0 and its place among the integers, or 1 and
                            // that among the floats; of each tensor the word of its address, and its rank
    int64_t words;
    const void *entry, *tabulate;  // as attention::Code
    int64_t bytes;
};

struct SavedFunctions {
    const SavedFunction* functions = nullptr;
    int64_t count = 0;
};

}  // namespace opkit::model
