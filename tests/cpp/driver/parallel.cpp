// The threads of kernels without torch: runtime/parallel.hpp by the standard library.
#include "../../../cpp_ext/runtime/parallel.hpp"

#include <algorithm>
#include <thread>
#include <vector>

#include "checks.hpp"

namespace opkit {

int32_t driver::threads = 1;

namespace {
thread_local int32_t index = 0;
}

void parallel_for(int64_t begin, int64_t end, int64_t grain, opk_range_body body, void* context) {
    if (begin >= end) return;
    const int64_t parts = std::min<int64_t>(thread_count(), (end - begin + grain - 1) / std::max<int64_t>(grain, 1));
    const auto run = [=](int64_t part) {
        index = static_cast<int32_t>(part);
        body(begin + (end - begin) * part / parts, begin + (end - begin) * (part + 1) / parts, context);
    };
    std::vector<std::thread> others;
    for (int64_t part = 1; part < parts; ++part) others.emplace_back(run, part);
    run(0);
    for (std::thread& other : others) other.join();
}

int32_t thread_count() { return driver::threads; }
int32_t thread_index() { return index; }

}  // namespace opkit
