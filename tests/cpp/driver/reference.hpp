// Attention by its definition: plain loops in float64.
#pragma once

#include "mask_cases.hpp"
#include "numbers.hpp"

namespace opkit::driver {

struct Problem {
    Shape shape;
    double scale, softcap;
    Visible visible;
    Added added;                // or nothing
    std::vector<float> sinks;   // of each head, or none
};

using Doubles = std::vector<double>;

struct Results {
    Doubles out, lse;           // (batch, heads, queries, columns), (batch, heads, queries)
};

struct Slopes {
    Doubles q, k, v;            // dense
};

Results attend(const Problem& problem, Tensor& q, Tensor& k, Tensor& v);

// Given gradients of out and, dense, of the lse.
Slopes differentiate(const Problem& problem, const Results& results, Tensor& q, Tensor& k, Tensor& v, Tensor& gradient,
                     const std::vector<float>& of_lse);

}  // namespace opkit::driver
