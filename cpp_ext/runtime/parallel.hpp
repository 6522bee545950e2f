// opk_parallel_for: a range of work on torch's own threads, so that torch.set_num_threads holds for kernels too.
#pragma once

#include "../../opkit/kernels/include/opkit.h"

namespace opkit {

void parallel_for(int64_t begin, int64_t end, int64_t grain, opk_range_body body, void* context);
int32_t thread_count();
int32_t thread_index();

}  // namespace opkit
