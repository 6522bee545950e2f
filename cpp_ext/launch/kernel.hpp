// An opk_kernel that no compiler made: the description of a kernel whose calls a launcher runs.
#pragma once

#include <memory>
#include <optional>

#include "../runtime/library.hpp"
#include "launcher.hpp"

namespace opkit::launch {

struct ShapeDescription {
    std::vector<int32_t> before, after;
    int32_t variadic;
};

struct ArgumentDescription {
    std::string name;
    int32_t kind;
    bool optional, written;
    std::optional<ShapeDescription> shape;
};

struct OutputDescription {
    std::string name;
    int32_t alias;
};

struct SourceDescription {
    int32_t source, argument, detail, dtype;
    opk_value constant;
};

struct Description {
    std::string operator_name, kernel_name, schema;
    bool cuda;
    std::vector<ArgumentDescription> arguments;
    std::vector<OutputDescription> outputs;
    std::vector<std::string> size_names;
    std::vector<SourceDescription> sources;
};

// The kernel, ready to be registered. It and the launcher stay as long as the process lives: a call may still be running.
// Throws std::invalid_argument where description and launcher do not fit each other, and std::runtime_error where the
// process has used up the functions that there are for such kernels.
KernelLibrary launch_kernel(Description description, std::shared_ptr<Launcher> launcher);

// Functions of the pool that serve calls of this kernel. They serve another one once the library and its registrations
// are gone. Throws std::runtime_error where all are lent.
KernelLibrary lend_functions(const opk_kernel& kernel);

}  // namespace opkit::launch
