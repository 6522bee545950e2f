#include "threads.hpp"

#include <omp.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>

namespace opkit::model {
namespace {

void in_parallel(void (*body)(void*), void* data, unsigned threads, unsigned) {
#pragma omp parallel num_threads(static_cast<int>(threads))
    body(data);
}

Threads& chosen() {
    static Threads found = {in_parallel, omp_get_thread_num, std::max(1, omp_get_max_threads())};
    return found;
}

std::atomic<bool> forked{false};
const int registered = pthread_atfork(nullptr, nullptr, [] { forked = true; });
thread_local bool inside = false;

struct Range {
    int64_t begin, end, step;
    std::atomic<int64_t> next;
    void (*body)(int64_t, int64_t, void*);
    void* context;

    static void run(void* data) {
        Range& range = *static_cast<Range*>(data);
        inside = true;
        for (int64_t at; (at = range.next.fetch_add(range.step)) < range.end;)
            range.body(at, std::min(range.end, at + range.step), range.context);
        inside = false;
    }
};

}  // namespace

Threads threads() {
    Threads found = chosen();
    if (forked || inside) found.count = 1;
    return found;
}

void set_threads(const Threads& threads) { chosen() = threads; }

void set_thread_count(int64_t count) { chosen().count = count > 0 ? count : std::max(1, omp_get_max_threads()); }

void for_range(int64_t begin, int64_t end, int64_t grain, void (*body)(int64_t, int64_t, void*), void* context) {
    if (begin >= end) return;
    const Threads found = threads();
    const int64_t parts = std::min(found.count, (end - begin + grain - 1) / std::max<int64_t>(grain, 1));
    if (parts <= 1) return body(begin, end, context);
    Range range{begin, end, (end - begin + parts - 1) / parts, {begin}, body, context};
    found.parallel(Range::run, &range, static_cast<unsigned>(parts), 0);
}

}  // namespace opkit::model
