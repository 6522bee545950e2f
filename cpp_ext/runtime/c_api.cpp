// libopkit.so: what a program without Python calls.
#include <cstdio>
#include <exception>

#include "library.hpp"

// Loads the kernel library at `path` (built by `opkit build`), defines its operator in torch and registers the kernel.
// Load libtorch first. Returns 0; or 1, with the reason in `error` (of `size` bytes).
extern "C" __attribute__((visibility("default"))) int opkit_register(const char* path, char* error, size_t size) {
    try {
        opkit::define_and_register(opkit::load_kernel(path));
        return 0;
    } catch (const std::exception& problem) {
        snprintf(error, size, "%s", problem.what());
        return 1;
    }
}
