// Work for all of torch's threads: each takes the next piece until none is left.
#pragma once

#include <atomic>
#include <cstdint>

#include "../runtime/parallel.hpp"

namespace opkit::attention {

// Calls work(n) for each n below count, by as many threads as torch has.
template <class Work>
void deal(int64_t count, const Work& work) {
    struct Shared {
        std::atomic<int64_t> next{0};
        int64_t count;
        const Work* work;
    } shared;
    shared.count = count;
    shared.work = &work;
    parallel_for(0, thread_count(), 1, [](int64_t, int64_t, void* context) {
        auto& all = *static_cast<Shared*>(context);
        for (int64_t n; (n = all.next++) < all.count;) (*all.work)(n);
    }, &shared);
}

}  // namespace opkit::attention
