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
    int it = 0;
    for (int n = 0;; n++) {
        wait(barriers + K_FULL, n & 1);
        const int4 x = load_four(base + S::PUBLISHED_TILES + (n & 1) * 16);
        const Tile tile{x.x, x.y, x.z, x.w};
        arrive(barriers + K_EMPTY);
        if (tile.steps < 0) break;
        int left = S::LISTED ? tile.steps : tile.steps * (problem.heads / problem.key_heads);
        if (left == 0) continue;
        int* before = nullptr;
        for (Walk<S> walk(problem, tile);; it++) {
            wait(barriers + Q_EMPTY + it % STAGES * 8, it / STAGES & 1);
            arrive(barriers + PASSED + it % STAGES * 8);
            if (before) add_count(before, 1);
            before = added<S>(problem, walk.head, walk.visit(problem, tile).block);
            if (--left == 0) break;
            walk.next(problem, tile);
        }
        it++;
        wait(barriers + SUMMED + (n & 1) * 8, n >> 1 & 1);
        add_count(before, 1);
    }
}

}  // namespace
