// Users' functions of scores and masks: C that opkit/attn/functions/c/emission.py writes and the build cache compiles.
//
// Each entry takes `words` (captured numbers, then of each captured tensor its address, sizes and strides) and a tile.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace opkit::attention {

struct Tile;

// A mask's: what is seen of the tile, a State; and bits, a word for each row, where that is a part.
using LookAt = int64_t (*)(const int64_t* words, const Tile* tile, uint64_t* bits);
// What depends on the head and the distance of key and query alone: `entries` of each distance, from that of index 0 on, whose
// distance is -`zero`.
struct Distances {
    const char* entries;
    int64_t count, zero;
};
using Tabulate = void (*)(const int64_t* words, const Tile* tile, const Distances* of, char* entries);
// A score's, in place: kKeys scores to a row, rows `pitch` apart.
using Score = void (*)(const int64_t* words, const Tile* tile, const Distances* of, float* scores, int64_t pitch);
// From the scores before, kKeys to a row, the gradient before, in place of that after. What is seen is also added to the gradients
// of captured tensors, contiguous: `sums` has one for each of them, or null; it may be null itself.
using Slope = void (*)(const int64_t* words, const Tile* tile, const Distances* of, const float* before, float* gradients, const uint64_t* seen,
                       double* const* sums);

// The addresses of code, and of what tabulates distances for it: so many bytes for each; 0: none.
struct Code {
    uintptr_t entry = 0, tabulate = 0;
    int64_t bytes = 0;
};

struct Function {
    Code code, slope;                                   // LookAt or Score; Slope
    std::vector<int64_t> words;
    std::vector<std::pair<int64_t, int64_t>> tensors;   // the word of the address of each, and its number among the program's
};
using Functions = std::vector<Function>;

// Writes the addresses of tensors into the words.
template <class Tensor>
Functions placed(Functions functions, const std::vector<Tensor>& tensors) {
    for (Function& function : functions)
        for (const auto& [word, number] : function.tensors)
            function.words.at(static_cast<size_t>(word)) = reinterpret_cast<int64_t>(tensors.at(static_cast<size_t>(number)).data);
    return functions;
}

}  // namespace opkit::attention
