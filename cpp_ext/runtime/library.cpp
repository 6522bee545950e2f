#include "library.hpp"

#include <dlfcn.h>
#if defined(__linux__)
#include <link.h>
#endif

#include <cstring>
#include <stdexcept>

#include "boxed.hpp"
#include "execute.hpp"
#include "failure.hpp"
#include "parallel.hpp"
#include "program.hpp"

namespace opkit {
namespace {

#if defined(__linux__)
int note_openmp(dl_phdr_info* info, size_t, void* found) {
    const char* file = std::strrchr(info->dlpi_name, '/');
    if (std::strncmp(file ? file + 1 : info->dlpi_name, "libgomp", 7) != 0) return 0;
    *static_cast<std::string*>(found) = info->dlpi_name;
    return 1;
}
#endif

// Kernels with OpenMP are linked against no runtime of it: they share the one that torch has loaded, and so its threads.
void offer_openmp() {
    std::string name = "libgomp.so.1";
#if defined(__linux__)
    dl_iterate_phdr(note_openmp, &name);
#endif
    dlopen(name.c_str(), RTLD_LAZY | RTLD_GLOBAL);
}

void* open(const std::string& path) {
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library != nullptr) return library;
    std::string reason = dlerror();
    if (reason.find("GOMP_") != std::string::npos || reason.find("omp_") != std::string::npos) {
        offer_openmp();
        library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
        if (library == nullptr) reason = dlerror();
    }
    if (library == nullptr) throw std::runtime_error("opkit: a kernel cannot be loaded: " + reason);
    return library;
}

template <class F>
F function(void* library, const std::string& path, const char* name) {
    void* found = dlsym(library, name);
    if (found == nullptr) throw std::runtime_error("opkit: " + path + " is no kernel: it lacks " + name);
    return reinterpret_cast<F>(found);
}

std::pair<std::string, std::string> split(const std::string& op) {
    const size_t at = op.find("::");
    if (at == std::string::npos) throw std::runtime_error("opkit: " + op + " has no namespace");
    return {op.substr(0, at), op.substr(at + 2)};
}

}  // namespace

const opk_runtime& runtime() {
    static const opk_runtime table = {OPK_ABI_VERSION, fail, parallel_for, thread_count, thread_index, boxed, execute};
    return table;
}

void add_programs(const opk_kernel& kernel, const int64_t* words) {
    for (; *words > 0; words += *words) add_program(kernel, std::vector<int64_t>(words, words + *words));
}

KernelLibrary load_kernel(const std::string& path) {
    void* library = open(path);
    const opk_kernel* kernel = function<const opk_kernel* (*)()>(library, path, "opk_describe")();
    if (kernel->version != OPK_ABI_VERSION)
        throw std::runtime_error("opkit: " + path + " was built for version " + std::to_string(kernel->version) +
                                 " of opkit's kernel interface; this is version " + std::to_string(OPK_ABI_VERSION) +
                                 ". Build it again");
    function<void (*)(const opk_runtime*)>(library, path, "opk_init")(&runtime());
    forget_programs(*kernel);  // a kernel that is loaded again serves an operator that was defined again
    if (const void* words = dlsym(library, "opk_programs")) add_programs(*kernel, static_cast<const int64_t*>(words));
    return {kernel, function<BoxedKernel>(library, path, "opk_boxed"),
            function<BoxedKernel>(library, path, "opk_boxed_with_layout"), nullptr};
}

Registration::Registration(const std::string& op, const std::string& key, BoxedKernel function, std::shared_ptr<void> lease)
    : lease_(std::move(lease)) {
    const auto [space, name] = split(op);
    const Shim& torch = shim();
    if (torch.aoti_torch_library_init_impl(space.c_str(), key.c_str(), "opkit", 0, &library_))
        throw std::runtime_error("opkit: torch made no library for " + op + " and the dispatch key " + key);
    if (torch.torch_library_impl(library_, name.c_str(), function, kTorchVersion)) {
        remove();
        throw std::runtime_error("opkit: torch did not register a kernel of " + op + " for " + key);
    }
}

void Registration::remove() {
    if (library_ != nullptr) shim().aoti_torch_delete_library_object(library_);
    library_ = nullptr;
    lease_ = nullptr;
}

void define_and_register(const KernelLibrary& loaded) {
    const opk_kernel& kernel = *loaded.kernel;
    const auto [space, name] = split(kernel.operator_name);
    const auto [same_space, schema] = split(kernel.schema);
    Handle library = nullptr;
    const Shim& torch = shim();
    if (torch.aoti_torch_library_init_fragment(space.c_str(), "opkit", 0, &library) ||
        torch.aoti_torch_library_def(library, schema.c_str()))
        throw std::runtime_error(std::string("opkit: torch did not define ") + kernel.schema);
    new Registration(kernel.operator_name, kernel.cuda ? "CUDA" : "CPU", loaded.boxed);
}

}  // namespace opkit
