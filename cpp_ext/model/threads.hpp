// The threads that models and kernels run on: OpenMP's, or those of the program that uses this library.
#pragma once

#include <cstdint>

namespace opkit::model {

struct Threads {
    // Runs body(data) in as many threads, as GOMP_parallel does; the last argument is 0.
    void (*parallel)(void (*body)(void*), void* data, unsigned threads, unsigned flags);
    int (*number)();  // of this thread among those, from 0
    int64_t count;    // how many may be used
};

// Those of this call: one in a forked process, which does not have its parent's threads, and inside of a parallel part.
Threads threads();

void set_threads(const Threads& threads);
void set_thread_count(int64_t count);  // 0: as many as OpenMP says

// Runs body(begin, end, context) on parts of a range, none but the last shorter than the grain.
void for_range(int64_t begin, int64_t end, int64_t grain, void (*body)(int64_t, int64_t, void*), void* context);

}  // namespace opkit::model
