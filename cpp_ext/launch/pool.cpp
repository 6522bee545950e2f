// Functions for the dispatcher. It calls a boxed kernel without any context, so that each kernel needs a function of its
// own; these are made when opkit is compiled.
#include <array>
#include <atomic>
#include <mutex>
#include <queue>
#include <stdexcept>
#include <utility>

#include "../runtime/boxed.hpp"
#include "kernel.hpp"

namespace opkit::launch {
namespace {

constexpr size_t kFunctions = 1024;

std::array<std::atomic<const opk_kernel*>, kFunctions> kernels;

template <size_t N, int32_t HasLayout>
void call(uint64_t* stack, uint64_t inputs, uint64_t outputs) {
    boxed(kernels[N].load(std::memory_order_acquire), stack, inputs, outputs, HasLayout);
}

struct Pair {
    BoxedKernel plain, with_layout;
};

template <size_t... N>
constexpr std::array<Pair, sizeof...(N)> make_pool(std::index_sequence<N...>) {
    return {Pair{call<N, 0>, call<N, 1>}...};
}

constexpr auto kPool = make_pool(std::make_index_sequence<kFunctions>());

std::mutex lending;
size_t taken = 0;
std::queue<size_t> returned;  // the one that was returned first is lent first

// Throws std::runtime_error.
size_t take(const opk_kernel& kernel) {
    std::lock_guard<std::mutex> lock(lending);
    if (taken < kFunctions) return taken++;
    if (returned.empty())
        throw std::runtime_error(std::string("opkit: ") + kernel.operator_name + ", kernel " + kernel.kernel_name +
                                 ": a process can have " + std::to_string(kFunctions) +
                                 " kernels that are launched, and they are used up");
    const size_t number = returned.front();
    returned.pop();
    return number;
}

void give_back(size_t number) {
    std::lock_guard<std::mutex> lock(lending);
    returned.push(number);
}

}  // namespace

KernelLibrary lend_functions(const opk_kernel& kernel) {
    const size_t number = take(kernel);
    kernels[number].store(&kernel, std::memory_order_release);
    std::shared_ptr<void> lease(nullptr, [number](void*) { give_back(number); });
    return {&kernel, kPool[number].plain, kPool[number].with_layout, std::move(lease)};
}

}  // namespace opkit::launch
