// Functions for the dispatcher. It calls a boxed kernel without any context, so that each kernel needs a function of its
// own; these are made when opkit is compiled.
#include <array>
#include <atomic>
#include <stdexcept>
#include <utility>

#include "../runtime/boxed.hpp"
#include "kernel.hpp"

namespace opkit::launch {
namespace {

constexpr size_t kFunctions = 1024;

std::array<const opk_kernel*, kFunctions> kernels;
std::atomic<size_t> taken{0};

template <size_t N, int32_t HasLayout>
void call(uint64_t* stack, uint64_t inputs, uint64_t outputs) {
    boxed(kernels[N], stack, inputs, outputs, HasLayout);
}

template <size_t... N>
constexpr std::array<BoxedPair, sizeof...(N)> make_pool(std::index_sequence<N...>) {
    return {BoxedPair{call<N, 0>, call<N, 1>}...};
}

constexpr auto kPool = make_pool(std::make_index_sequence<kFunctions>());

}  // namespace

BoxedPair take_boxed(const opk_kernel* kernel) {
    const size_t number = taken.fetch_add(1);
    if (number >= kFunctions)
        throw std::runtime_error(std::string("opkit: ") + kernel->operator_name + ", kernel " + kernel->kernel_name +
                                 ": a process can have " + std::to_string(kFunctions) +
                                 " kernels that are launched, and they are used up");
    kernels[number] = kernel;
    return kPool[number];
}

}  // namespace opkit::launch
