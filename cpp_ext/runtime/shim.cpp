#include "shim.hpp"

#include <dlfcn.h>

#include <mutex>
#include <stdexcept>
#include <string>

namespace opkit {
namespace {

#if defined(__APPLE__)
constexpr const char* kCpu[] = {"@rpath/libtorch_cpu.dylib", "libtorch_cpu.dylib"};
constexpr const char* kCuda[] = {"libtorch_cuda.dylib"};
#else
constexpr const char* kCpu[] = {"libtorch_cpu.so"};
constexpr const char* kCuda[] = {"libtorch_cuda.so", "libtorch_hip.so"};
#endif

// libtorch is loaded with RTLD_LOCAL, so that only a handle of its own finds its symbols.
template <size_t N>
void* loaded(const char* const (&names)[N]) {
    for (const char* name : names)
        if (void* library = dlopen(name, RTLD_NOLOAD | RTLD_NOW)) return library;
    throw std::runtime_error(std::string("opkit: ") + names[0] + " is not loaded in this process; load torch first");
}

template <class F>
void find(void* library, const char* name, F& function, std::string& missing) {
    function = reinterpret_cast<F>(dlsym(library, name));
    if (function == nullptr) missing += std::string(missing.empty() ? "" : ", ") + name;
}

void require(const std::string& missing) {
    if (!missing.empty())
        throw std::runtime_error("opkit: this torch has not the functions " + missing + "; opkit needs torch 2.11 or newer");
}

Shim find_cuda() {
    Shim found = shim();
    std::string missing;
    void* library = loaded(kCuda);
#define OPKIT_FIND(name, parameters) find(library, #name, found.name, missing);
    OPKIT_CUDA_SHIM(OPKIT_FIND)
#undef OPKIT_FIND
    require(missing);
    return found;
}

}  // namespace

Shim find_shim() {
    Shim found;
    std::string missing, optional;
    void* library = loaded(kCpu);
#define OPKIT_FIND(name, parameters) find(library, #name, found.name, missing);
    OPKIT_SHIM(OPKIT_FIND)
#undef OPKIT_FIND
    find(library, "torch_delete_stable_ivalue", found.torch_delete_stable_ivalue, optional);
    find(library, "torch_exception_get_what_without_backtrace", found.torch_exception_get_what_without_backtrace, optional);
    require(missing);
    return found;
}

const Shim& cuda_shim() {
    static const Shim found = find_cuda();
    return found;
}

}  // namespace opkit
