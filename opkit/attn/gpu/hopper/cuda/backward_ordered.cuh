// The gradient of queries summed up in one order, so that equal calls give equal bits: of a block of rows tiles take turns. Who loads
// gives a tile its turn, before it makes the product that it adds; here one thread passes turns on.
#pragma once

#include "backward_tiles.cuh"

namespace {

using namespace sm90;

// A step's products for the gradient of queries are added in the next one, or at the end of a tile.
template <class S>
SM90 void pass_turns(const Problem& problem, uint32_t base) {
    const uint32_t barriers = base + S::BARRIERS;
    const int group = problem.heads / problem.key_heads;
    int it = 0;
    for (int n = 0;; n++) {
        wait(barriers + K_FULL, n & 1);
        const int4 x = load_four(base + S::PUBLISHED_TILES + (n & 1) * 16);
        const Tile tile{x.x, x.y, x.z, x.w};
        arrive(barriers + K_EMPTY);
        if (tile.steps < 0) break;
        int* before = nullptr;
        for (int head = tile.head * group; head < (tile.head + 1) * group; head++) {
            for (int step = 0; step < tile.steps; step++, it++) {
                wait(barriers + Q_EMPTY + it % STAGES * 8, it / STAGES & 1);
                arrive(barriers + PASSED + it % STAGES * 8);
                if (before) add_count(before, 1);
                before = added<S>(problem, head, visit_of<S>(problem, tile, step).block);
            }
        }
        if (!before) continue;
        wait(barriers + SUMMED + (n & 1) * 8, n >> 1 & 1);
        add_count(before, 1);
    }
}

}  // namespace
