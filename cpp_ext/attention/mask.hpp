// Which keys a query sees: a program in postfix over bands, segments, lengths, boolean tensors and functions, tile by tile.
//
// A leaf says of a whole tile that it is hidden or full without looking at its elements, where it can; only where a tile is
// partly seen are there bits, a word for each row. So a mask costs what it has of live and partly seen tiles.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "block.hpp"
#include "function.hpp"

namespace opkit::attention {

struct Strided {
    const void* data = nullptr;
    int64_t stride[4] = {};  // elements; of what is shorter than four dimensions the last are 0
};

// Rows [row, row + rows) of head `head` of sequence `batch`, against keys [key, key + keys), keys <= kKeys.
struct Tile {
    int64_t batch, head, row, rows, key, keys;
};

enum class Opcode : int64_t { And, Or, Not, Band, Segments, Length, Dense, BandAt, Function };
constexpr int64_t kMaskOperands[] = {0, 0, 0, 2, 2, 1, 1, 3, 1};  // of each

class Mask {
public:
    // Throws std::invalid_argument where the program is none.
    Mask(const std::vector<int64_t>& program, std::vector<Strided> tensors, int64_t batch, int64_t keys, Functions functions = {});

    bool empty() const { return steps_.empty(); }

    // The words of scratch that `look` needs for so many rows.
    int64_t scratch(int64_t rows) const { return depth_ * rows; }

    // What of the tile is seen; its bits are at `visible` where that is a part.
    State look(const Tile& tile, uint64_t* scratch, uint64_t* visible) const;

private:
    struct Step {
        Opcode opcode;
        int64_t operands[3];
    };
    using Bounds = std::vector<std::pair<int32_t, int32_t>>;

    State leaf(const Step& step, const Tile& tile, uint64_t* bits) const;
    bool decided(size_t step, State before) const;
    State segments(const Step& step, const Tile& tile, uint64_t* bits) const;
    State dense(const Step& step, const Tile& tile, uint64_t* bits) const;
    State band_at(const Step& step, const Tile& tile, uint64_t* bits) const;
    void note_bounds(const Strided& ids, int64_t batch, int64_t keys);

    std::vector<Step> steps_;
    std::vector<Strided> tensors_;
    Functions functions_;
    std::vector<Bounds> bounds_;  // of SEGMENTS, in order: the least and the largest id of each tile of keys
    int64_t depth_ = 1, tiles_ = 0;
};

}  // namespace opkit::attention
