#include "driver.hpp"

#include <dlfcn.h>

#include <atomic>
#include <stdexcept>

namespace opkit::launch {
namespace {

using IsCapturing = int32_t (*)(void*, int32_t*);

// Of the driver that was opened last: where a process uses a GPU, there is one.
std::atomic<IsCapturing> is_capturing{nullptr};

void* open(const std::string& path) {
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr)
        throw std::runtime_error("opkit: the GPU's driver cannot be opened: " + std::string(dlerror()));
    return library;
}

bool parse(const std::string& kind) {
    if (kind != "cuda" && kind != "hip")
        throw std::runtime_error("opkit: a driver is of the kind \"cuda\" or \"hip\", not \"" + kind + "\"");
    return kind == "hip";
}

// The driver that the process has loaded, without opkit having opened it.
IsCapturing find_capturing() {
    static constexpr const char* kDrivers[][2] = {
        {"libcuda.so.1", "cuStreamIsCapturing"},
        {"libamdhip64.so.7", "hipStreamIsCapturing"},
        {"libamdhip64.so.6", "hipStreamIsCapturing"},
        {"libamdhip64.so", "hipStreamIsCapturing"},
    };
    for (const auto& [file, name] : kDrivers)
        if (void* library = dlopen(file, RTLD_NOLOAD | RTLD_NOW))
            if (void* found = dlsym(library, name)) return reinterpret_cast<IsCapturing>(found);
    return nullptr;
}

}  // namespace

Driver::Driver(const std::string& path, const std::string& kind) : path_(path), hip_(parse(kind)) {
    void* library = open(path);
    std::string missing;
    const auto find = [&](const char* cuda, const char* hip, bool needed, auto& function) {
        function.name = hip_ ? hip : cuda;
        if (*function.name == 0) {
            function.name = hip_ ? cuda : hip;  // for messages: this kind of driver never has it
            return;
        }
        function.pointer = reinterpret_cast<decltype(function.pointer)>(dlsym(library, function.name));
        if (needed && function.pointer == nullptr) missing += std::string(missing.empty() ? "" : ", ") + function.name;
    };
#define OPKIT_FIND(member, cuda, hip, needed, parameters) find(cuda, hip, needed, member);
    OPKIT_DRIVER(OPKIT_FIND)
#undef OPKIT_FIND
    if (!missing.empty())
        throw std::runtime_error("opkit: " + path + " lacks " + missing + "; a newer driver has them");
    is_capturing.store(capturing.pointer);
}

int32_t Driver::loaded_version() const {
    int32_t number = 0;
    (*this)(version, &number);
    return number;
}

bool Driver::is_captured(void* stream) {
    IsCapturing query = is_capturing.load();
    if (query == nullptr) query = find_capturing();
    int32_t status = 0;
    return query != nullptr && query(stream, &status) == 0 && status != 0;
}

void Driver::fail(const char* function, int32_t error) const {
    const char *name = nullptr, *text = nullptr;
    error_name.pointer(error, &name);
    error_text.pointer(error, &text);
    throw std::runtime_error(std::string(function) + " failed with " +
                             (name ? name : "error " + std::to_string(error)) +
                             (text ? " (" + std::string(text) + ")" : ""));
}

void Driver::lacks(const char* function) const { throw std::runtime_error(path_ + " has no " + function); }

void Driver::require_context(int32_t device) const {
    void* context = nullptr;
    (*this)(get_context, &context);
    if (context != nullptr) return;
    int32_t handle = 0;
    (*this)(initialize, 0u);
    (*this)(find_device, &handle, device < 0 ? 0 : device);
    (*this)(retain_context, &context, handle);
    (*this)(set_context, context);
}

Loading::Loading(const Driver& driver, int32_t device) : driver_(driver) {
    device = device < 0 ? 0 : device;
    driver(driver.initialize, 0u);
    if (driver.hip()) {
        driver(driver.get_device, &device_);
        driver(driver.set_device, device);
    } else {
        int32_t handle = 0;
        void* context = nullptr;
        driver(driver.get_context, &context_);
        driver(driver.find_device, &handle, device);
        driver(driver.retain_context, &context, handle);
        driver(driver.set_context, context);
    }
    driver(driver.exchange_capture_mode, &mode_);  // from here on mode_ is the thread's own
}

Loading::~Loading() {
    if (driver_.hip())
        driver_.set_device.pointer(device_);
    else if (context_ != nullptr)
        driver_.set_context.pointer(context_);
    driver_.exchange_capture_mode.pointer(&mode_);
}

}  // namespace opkit::launch
