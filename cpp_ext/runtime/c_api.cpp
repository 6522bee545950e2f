// libopkit.so: what a program without Python calls.
#include <cstdio>
#include <exception>

#include "execute.hpp"
#include "library.hpp"

#define OPKIT_EXPORT extern "C" __attribute__((visibility("default")))

// Loads the kernel library at `path` (built by `opkit build`), defines its operator in torch and registers the kernel.
// Load libtorch first. Returns 0; or 1, with the reason in `error` (of `size` bytes).
OPKIT_EXPORT int opkit_register(const char* path, char* error, size_t size) {
    try {
        opkit::define_and_register(opkit::load_kernel(path));
        return 0;
    } catch (const std::exception& problem) {
        snprintf(error, size, "%s", problem.what());
        return 1;
    }
}

// Loads the kernel library at `path` for opkit_call, with these programs of its outputs' sizes (one after another, then a 0);
// torch learns nothing of it. Returns null, with the reason in `error`, if that fails.
OPKIT_EXPORT const opk_kernel* opkit_load(const char* path, const int64_t* programs, char* error, size_t size) {
    try {
        const opk_kernel* kernel = opkit::load_kernel(path).kernel;
        opkit::add_programs(*kernel, programs);
        return kernel;
    } catch (const std::exception& problem) {
        snprintf(error, size, "%s", problem.what());
        return nullptr;
    }
}

// Runs a kernel: `outputs` receives a handle for each output, which the caller owns. Returns 0; or 1, with the reason in `error`.
OPKIT_EXPORT int opkit_call(const opk_kernel* kernel, const opk_input* inputs, void** outputs, char* error, size_t size) {
    opk_message message;
    const int32_t status = opkit::execute(kernel, inputs, nullptr, outputs, &message);
    if (status == OPK_REFUSED) opkit::name_kernel(*kernel, message);
    if (status != OPK_DONE) {
        snprintf(error, size, "%s", message.text);
        return 1;
    }
    for (int32_t i = 0; i < kernel->output_count; i++)
        if (kernel->outputs[i].alias >= 0)
            opkit::shim().aoti_torch_new_tensor_handle(inputs[kernel->outputs[i].alias].as.tensor, &outputs[i]);
    return 0;
}
