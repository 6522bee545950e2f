// Compiled kernels in their shared libraries, and their places in torch's dispatcher.
#pragma once

#include <memory>
#include <string>

#include "shim.hpp"
#include "../../opkit/kernels/include/opkit.h"

namespace opkit {

// The functions that every kernel receives.
const opk_runtime& runtime();

// A kernel's shared library. It stays loaded as long as the process lives: the dispatcher may hold its functions.
struct KernelLibrary {
    const opk_kernel* kernel;
    BoxedKernel boxed, boxed_with_layout;
    std::shared_ptr<void> lease = nullptr;  // of the functions, where they are lent; alive while a dispatcher may hold them
};

// Loads a kernel that opkit built, with the programs of its outputs' sizes that it was built with: others that were added
// since it was loaded before are forgotten. Throws std::runtime_error where the file is not one, or was built for another opkit.
KernelLibrary load_kernel(const std::string& path);

// Adds what a build knew of the outputs' sizes: programs one after another, each beginning with its length, then a 0.
void add_programs(const opk_kernel& kernel, const int64_t* words);

// A kernel's place in the dispatcher, until it is removed.
class Registration {
public:
    // `op` is "namespace::name" or "namespace::name.overload"; `key` a dispatch key, such as "CPU".
    Registration(const std::string& op, const std::string& key, BoxedKernel function, std::shared_ptr<void> lease = nullptr);
    ~Registration() { remove(); }
    void remove();

private:
    Handle library_ = nullptr;
    std::shared_ptr<void> lease_;
};

// Defines the operator of a kernel with its schema and registers the kernel for its device: what a process without
// Python needs. Both stay for good. Throws std::runtime_error.
void define_and_register(const KernelLibrary& loaded);

}  // namespace opkit
