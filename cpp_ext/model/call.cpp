// A call of an entry: what its program asks for, and the checks of its inputs.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "../runtime/execute.hpp"
#include "host.hpp"
#include "kernel_inputs.hpp"

namespace opkit::model {
namespace {

using Text = std::string;

Text place(int32_t device) { return device < 0 ? "the CPU" : "the GPU " + std::to_string(device); }

}  // namespace

namespace {

// The layout of a kernel's outputs, as the program says it; empty where nobody needs one of them, and so the program does not.
std::vector<int64_t> layout_of(const opk_kernel& kernel, const opk_result* results) {
    std::vector<int64_t> words;
    for (int32_t i = 0; i < kernel.output_count; ++i) {
        if (kernel.outputs[i].alias >= 0) continue;
        if (results[i].buffer < 0) return {};
        const opk_tensor& tensor = results[i].tensor;
        words.insert(words.end(), {tensor.dtype, tensor.rank});
        words.insert(words.end(), tensor.sizes, tensor.sizes + tensor.rank);
        words.insert(words.end(), tensor.strides, tensor.strides + tensor.rank);
    }
    return words;
}

}  // namespace

void Host::run_kernel(const Entry::Call& call, const opk_passed* passed, int64_t count, opk_result* results) {
    const opk_kernel& kernel = *call.kernel;
    const Arguments arguments(passed, count);
    KernelInputs inputs;
    for (int32_t i = 0; i < kernel.argument_count; ++i)
        inputs.add(kernel.arguments[i], arguments.find(i, kernel.arguments[i].name));
    std::vector<void*> made(static_cast<size_t>(kernel.output_count));
    opk_message message;
    const std::vector<int64_t> layout = layout_of(kernel, results);
    const int32_t status =
        execute(&kernel, inputs.data(), layout.empty() ? nullptr : layout.data(), made.data(), &message);
    if (status == OPK_REFUSED) name_kernel(kernel, message);
    if (status != OPK_DONE) throw std::runtime_error(message.text);
    for (int32_t i = 0; i < kernel.output_count; ++i) {
        const std::unique_ptr<Tensor> tensor(static_cast<Tensor*>(made[static_cast<size_t>(i)]));
        if (tensor) set(call.name, *tensor, results[i]);
    }
}

void Host::set(const Text& name, const Tensor& tensor, opk_result& result) {
    if (result.buffer < 0) return;
    const opk_tensor found = tensor.described();
    if (found.dtype != result.tensor.dtype || found.rank != result.tensor.rank ||
        !std::equal(found.sizes, found.sizes + found.rank, result.tensor.sizes))
        throw std::runtime_error(name + " returned " + describe(found.dtype, found.sizes, found.rank) +
                                 ", and its fake implementation another");
    if (result.tensor.data == nullptr && same_layout(found, result.tensor.strides)) {
        at(result.buffer) = tensor.memory;
        result.tensor.data = found.data;
    } else {
        make(result);
        entry.device_.copy(found, result.tensor);
    }
}

std::vector<int64_t> Entry::bind(const std::vector<opk_tensor>& inputs) const {
    std::vector<int64_t> sizes(static_cast<size_t>(size_count_));
    for (const Size& size : sizes_) {
        const opk_tensor& from = inputs[static_cast<size_t>(size.input)];
        const auto d = static_cast<size_t>(size.dimension);
        const int64_t value = size.from == Size::From::Value  ? *static_cast<const int64_t*>(from.data)
                              : size.from == Size::From::Size ? from.sizes[d]
                                                              : from.strides[d];
        const Text& name = inputs_[static_cast<size_t>(size.input)].name;
        if (size.from == Size::From::Value && value < 0)
            throw std::invalid_argument(name + " is " + std::to_string(value) + ", and the model takes a size");
        if (size.from != Size::From::Stride && (value < size.least || value > size.most))
            throw std::invalid_argument(
                name + " has the size " + std::to_string(value) + ", and the model was exported for " + size.name +
                (size.most == INT64_MAX ? " of at least " + std::to_string(size.least)
                                        : " from " + std::to_string(size.least) + " to " + std::to_string(size.most)));
        sizes[static_cast<size_t>(size.number)] = value;
    }
    compute_sizes_(sizes.data());
    return sizes;
}

// Checks sizes, and copies what has other strides than the model was exported for; the copies are returned.
std::vector<Tensor> Entry::laid_out(std::vector<opk_tensor>& inputs, const std::vector<int64_t>& layouts) const {
    std::vector<Tensor> copies;
    const int64_t* at = layouts.data() + 1;
    for (size_t i = 0; i < inputs.size(); ++i) {
        if (inputs_[i].dtype < 0) continue;
        opk_tensor& tensor = inputs[i];
        if (!std::equal(tensor.sizes, tensor.sizes + tensor.rank, at))
            throw std::invalid_argument(inputs_[i].name + " is " + describe(tensor.dtype, tensor.sizes, tensor.rank) +
                                        ", and the model takes " + inputs_[i].text);
        const bool is_aligned = !inputs_[i].is_aligned || reinterpret_cast<uintptr_t>(tensor.data) % 16 == 0;
        if (!is_aligned || !same_layout(tensor, at + tensor.rank)) {
            if (inputs_[i].is_written)
                throw std::invalid_argument(inputs_[i].name +
                                            ", which the model writes to, has other strides than it was exported for" +
                                            (is_aligned ? "" : ", or begins at no multiple of 16 bytes"));
            opk_tensor layout = tensor;
            layout.strides = at + tensor.rank;
            copies.push_back(device_.empty(layout));
            device_.copy(tensor, copies.back().described());
            tensor.data = copies.back().data;  // the program has the strides
        }
        at += 2 * tensor.rank;
    }
    return copies;
}

std::vector<Tensor> Entry::run(const std::vector<opk_tensor>& given) const {
    if (given.size() != inputs())
        throw std::invalid_argument("the model takes " + std::to_string(inputs()) + " tensors, and got " +
                                    std::to_string(given.size()));
    std::vector<opk_tensor> all;
    for (const Tensor& state : states_) all.push_back(state.described());
    all.insert(all.end(), given.begin(), given.end());
    for (size_t i = states_.size(); i < all.size(); ++i) {
        const Input& expected = inputs_[i];
        const bool is_size = expected.dtype < 0;
        if (all[i].device_index != (expected.is_on_gpu ? device_.number() : -1))
            throw std::invalid_argument(expected.name + " is on " + place(all[i].device_index) +
                                        ", and the model takes it on " + place(expected.is_on_gpu ? device_.number() : -1));
        if (all[i].dtype != (is_size ? OPK_INT64 : expected.dtype) || all[i].rank != (is_size ? 0 : expected.rank))
            throw std::invalid_argument(expected.name + " is " + describe(all[i].dtype, all[i].sizes, all[i].rank) +
                                        ", and the model takes " + expected.text);
    }
    const std::vector<int64_t> sizes = bind(all);
    std::vector<int64_t> layouts(static_cast<size_t>(layout_count_));
    compute_layouts_(sizes.data(), layouts.data());
    const std::vector<Tensor> copies = laid_out(all, layouts);

    Arena arena = take_arena(layouts[0], device_.stream());
    std::vector<void*> pointers;
    for (const opk_tensor& each : all) pointers.push_back(each.data);
    Host host(*this);
    const int64_t failed =
        run_(&host, sizes.data(), static_cast<char*>(arena.memory.get()), pointers.data(), constants_.data());
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        arenas_.push_back(std::move(arena));
    }
    if (failed || !host.failure.empty()) {
        Text why = host.failure;
        const auto& [code, first, second] = host.segments.error;
        if (why.empty() && code == 1)
            why = "index " + std::to_string(first) + " is out of range for a dimension of size " + std::to_string(second);
        if (why.empty()) why = code == 3 ? "an integer was divided by 0" : "there is no memory";
        const Text step = failed ? steps_.at(static_cast<size_t>(failed - 1)) : "";
        throw std::runtime_error(why + (step.empty() ? "" : " (at one of: " + step + ")"));
    }
    return std::move(host.outputs);
}

Entry::Arena Entry::take_arena(int64_t bytes, void* stream) const {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        for (size_t i = arenas_.size(); i-- > 0;) {
            if (arenas_[i].stream != stream) continue;
            Arena found = std::move(arenas_[i]);
            arenas_.erase(arenas_.begin() + static_cast<ptrdiff_t>(i));
            if (found.bytes >= bytes) return found;
            break;  // too small: the new one takes its place
        }
    }
    return {bytes, stream, device_.allocate(bytes)};
}

}  // namespace opkit::model
