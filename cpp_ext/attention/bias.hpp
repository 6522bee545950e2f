// What is added to scores: tensors, linear biases (Press et al., ALiBi, 2022), and decomposed relative positions (Li et al., MViTv2,
// 2022, as Segment Anything has them); and functions that are applied to them.
#pragma once

#include <cstdint>
#include <vector>

#include "mask.hpp"

namespace opkit::attention {

enum class Type : int64_t { Float, Double, Half, Brain };

struct Typed : Strided {
    Type type = Type::Float;
};

constexpr int64_t kBiasOperands[] = {1, 1, 3, 1}, kBiasFunction = 3;  // of each kind of step

class Biases {
public:
    // A program of (0, tensor), (1, slopes), (2, rel_h, rel_w, width) and (3, function). Throws std::invalid_argument where it is none.
    // `few`: of so few rows that what depends on a distance is computed for each tile, rather than once for a head.
    Biases(const std::vector<int64_t>& program, std::vector<Typed> tensors, int64_t queries, int64_t keys, Functions functions = {},
           bool few = false);

    // Whether anything is added before the first function, and whether there are functions.
    bool adds() const { return added_ > 0; }
    bool applies() const { return added_ < steps_.size(); }

    // Writes what is added to a tile before the first function, kKeys floats to a row.
    void write(const Tile& tile, float* out) const;

    // Applies what follows to scores, kKeys of them to a row, rows `pitch` apart.
    void apply(const Tile& tile, float* scores, int64_t pitch) const;

    // Does both, to scores to which nothing was added.
    void add_and_apply(const Tile& tile, float* scores, int64_t pitch) const;

    // From the scores before `apply`, kKeys to a row, their gradients, in place of those after it, and what is seen of them, a word to
    // a row. They are added to the gradients of tensors too: those of this list, of `strides`, that are not null. It may be empty.
    struct Sum {
        double* data;
        int64_t stride[4];
    };
    void differentiate(const Tile& tile, const float* before, float* gradients, const uint64_t* seen, const std::vector<Sum>& sums) const;

private:
    struct Step {
        int64_t kind, operands[3];
    };
    void run(const Step& step, const Tile& tile, float* out, int64_t pitch) const;
    const Distances* distances(int64_t function, bool slope, const Tile& tile) const;
    void dense(const Step& step, const Tile& tile, float* out, int64_t pitch) const;
    void linear(const Step& step, const Tile& tile, float* out, int64_t pitch) const;
    void relative(const Step& step, const Tile& tile, float* out, int64_t pitch) const;

    std::vector<Step> steps_;
    std::vector<Typed> tensors_;
    Functions functions_;
    int64_t queries_, keys_, offset_;
    bool few_;
    uint64_t id_;  // of these biases, of all that there were in the process
    size_t added_ = 0;  // steps before the first function
};

// n elements of a tensor, `stride` apart, from `at` on, added to out.
void add_elements(const Typed& tensor, int64_t at, int64_t stride, int64_t n, float* out);

}  // namespace opkit::attention
