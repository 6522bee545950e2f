// Work for all of torch's threads: each takes the next piece until none is left.
#pragma once

#include <atomic>
#include <cstdint>

#include "../runtime/parallel.hpp"

namespace opkit::attention {

// Multiply-adds that take longer than it takes to wake a thread.
constexpr int64_t kLeastShared = 1 << 18;

// Of torch's threads so many as are worth waking for these multiply-adds.
inline int64_t workers_for(int64_t multiply_adds) { return multiply_adds < kLeastShared ? 1 : thread_count(); }

// Calls work(n) for each n below count, by so many threads; by the calling one alone where that is 1.
template <class Work>
void deal(int64_t count, int64_t workers, const Work& work) {
    if (count <= 1 || workers <= 1) {
        for (int64_t n = 0; n < count; ++n) work(n);
        return;
    }
    struct Shared {
        std::atomic<int64_t> next{0};
        int64_t count;
        const Work* work;
    } shared;
    shared.count = count;
    shared.work = &work;
    parallel_for(0, workers, 1, [](int64_t, int64_t, void* context) {
        auto& all = *static_cast<Shared*>(context);
        for (int64_t n; (n = all.next++) < all.count;) (*all.work)(n);
    }, &shared);
}

}  // namespace opkit::attention
