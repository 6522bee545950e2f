// One compiled kernel: the image of a module with one function, loaded once for each device.
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "driver.hpp"

namespace opkit::launch {

struct Scratch {
    int64_t bytes = 0;  // for each program (for each block of a cluster)
    int64_t alignment = 1;
};

struct Properties {
    int64_t threads = 0, shared = 0;
    Extent cluster{1, 1, 1};
    bool cooperative = false;
    bool pdl = false;  // it may begin before the kernel before it has ended (programmatic dependent launch)
    bool prefer_shared = true;  // rather than L1 cache, where it has much shared memory
    Scratch scratch, profile_scratch;

    int64_t blocks() const { return cluster[0] * cluster[1] * cluster[2]; }  // of a cluster
};

struct Attributes {
    int32_t registers, local_bytes, shared_bytes, max_threads;
};

// Its modules stay loaded when it goes: a launch may still be running, or wait in a graph to be replayed.
class Binary {
public:
    // Throws std::invalid_argument where a number is out of range.
    Binary(std::shared_ptr<const Driver> driver, std::string image, std::string name, const Properties& properties);
    Binary(const Binary&) = delete;
    Binary& operator=(const Binary&) = delete;

    // The function on a device, -1 being the CPU of tests. Throws std::runtime_error where the driver does not load it.
    void* function(int32_t device) const {
        const size_t place = slot(device);
        void* found = functions_[place].load(std::memory_order_acquire);
        return found != nullptr ? found : load(place);
    }

    Attributes attributes(int32_t device) const;

    // How many bytes each parameter of the function has. Empty where the driver does not say.
    std::vector<size_t> parameter_sizes(int32_t device) const;

    const Driver& driver() const { return *driver_; }
    const Properties& properties() const { return properties_; }
    const std::string& name() const { return name_; }

private:
    static constexpr size_t kMostDevices = 64;
    static size_t slot(int32_t device);
    void* load(size_t place) const;
    void* load_module(int32_t device, void*& module) const;
    void allow_shared(void* function, int32_t device) const;

    std::shared_ptr<const Driver> driver_;
    std::string image_, name_;
    Properties properties_;
    mutable std::mutex loading_;
    mutable std::array<std::atomic<void*>, kMostDevices> functions_{};
};

}  // namespace opkit::launch
