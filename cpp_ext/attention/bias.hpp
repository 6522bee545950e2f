// What is added to scores: tensors, linear biases (Press et al., ALiBi, 2022), and decomposed relative positions (Li et al., MViTv2,
// 2022, as Segment Anything has them).
#pragma once

#include <cstdint>
#include <vector>

#include "mask.hpp"

namespace opkit::attention {

enum class Type : int64_t { Float, Double, Half, Brain };

struct Typed : Strided {
    Type type = Type::Float;
};

class Biases {
public:
    // A program of (0, tensor), (1, slopes) and (2, rel_h, rel_w, width). Throws std::invalid_argument where it is none.
    Biases(const std::vector<int64_t>& program, std::vector<Typed> tensors, int64_t queries, int64_t keys);

    bool empty() const { return steps_.empty(); }

    // Writes the biases of a tile, kKeys floats to a row.
    void write(const Tile& tile, float* out) const;

private:
    struct Step {
        int64_t kind, operands[3];
    };
    void dense(const Step& step, const Tile& tile, float* out) const;
    void linear(const Step& step, const Tile& tile, float* out) const;
    void relative(const Step& step, const Tile& tile, float* out) const;

    std::vector<Step> steps_;
    std::vector<Typed> tensors_;
    int64_t offset_;
};

// n elements of a tensor, `stride` apart, from `at` on, added to out.
void add_elements(const Typed& tensor, int64_t at, int64_t stride, int64_t n, float* out);

}  // namespace opkit::attention
