// How long a kernel takes: median of launches, with the caches cold.
#pragma once

#include "entry.hpp"

namespace opkit::launch {

struct TimeLimits {
    double warmup, run;  // milliseconds
};

// In milliseconds; 0 for an empty grid. The memory of `written` (sources) is as before afterwards.
// Throws std::runtime_error with the driver's message, and where the stream is being captured.
double time(const Entry& entry, const Frame& frame, const TimeLimits& limits, const std::vector<int64_t>& written);

}  // namespace opkit::launch
