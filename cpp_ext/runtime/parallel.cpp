#include "parallel.hpp"

#include <exception>

#include "failure.hpp"
#include "shim.hpp"

namespace opkit {
namespace {

struct Work {
    opk_range_body body;
    void* context;
    Report* report;
};

void run_part(int64_t begin, int64_t end, void* context) {
    const Work& work = *static_cast<const Work*>(context);
    Reporting reporting(work.report);
    try {
        work.body(begin, end, work.context);
    } catch (const std::exception& error) {
        fail("opk_parallel_for", 0, "%s", error.what());
    } catch (...) {
        fail("opk_parallel_for", 0, "its body threw something that is no std::exception");
    }
}

}  // namespace

void parallel_for(int64_t begin, int64_t end, int64_t grain, opk_range_body body, void* context) {
    if (begin >= end) return;
    Work work{body, context, Reporting::current()};
    if (shim().torch_parallel_for(begin, end, grain < 1 ? 1 : grain, run_part, &work) != 0)
        fail("opkit", 0, "torch's parallel_for failed");
}

int32_t thread_count() {
    uint32_t count = 1;
    shim().torch_get_num_threads(&count);
    return static_cast<int32_t>(count);
}

int32_t thread_index() {
    uint32_t index = 0;
    shim().torch_get_thread_idx(&index);
    return static_cast<int32_t>(index);
}

}  // namespace opkit
