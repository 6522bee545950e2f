#include "boxed.hpp"

#include <cstring>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "execute.hpp"
#include "program.hpp"
#include "shim.hpp"
#include "small.hpp"

namespace opkit {
namespace {

Handle as_handle(uint64_t word) { return reinterpret_cast<Handle>(static_cast<uintptr_t>(word)); }

template <class T>
T as(uint64_t word) {
    T value;
    std::memcpy(&value, &word, sizeof value);  // the low bytes: every machine that torch runs on is little-endian
    return value;
}

// An optional that is not None is a cell on the heap that holds the value's word.
uint64_t take_cell(uint64_t word) {
    uint64_t* cell = reinterpret_cast<uint64_t*>(static_cast<uintptr_t>(word));
    const uint64_t value = *cell;
    if (shim().torch_delete_stable_ivalue != nullptr)
        shim().torch_delete_stable_ivalue(cell);
    else
        ::operator delete(cell);
    return value;
}

// The arguments of a call, and what has to be released after it.
class Stack {
public:
    Stack(const opk_kernel& kernel, const uint64_t* stack, bool has_layout)
        : kernel_(kernel), inputs_(kernel.argument_count) {
        for (int32_t i = 0; i < kernel.argument_count; i++) read(kernel.arguments[i], stack[i], inputs_[i]);
        given_ = has_layout && stack[kernel.argument_count] != 0;
        if (given_) read_ints(take_cell(stack[kernel.argument_count]), layout_);
        layout_.push_back(0);  // so that the layout of no outputs has an address
    }

    ~Stack() {
        for (Handle tensor : tensors_) shim().aoti_torch_delete_tensor_object(tensor);
        for (Handle string : strings_) shim().torch_delete_string(string);
    }

    const opk_input* inputs() { return inputs_.data(); }

    // The layout that was passed; null where there is none. Throws std::runtime_error where it is not one.
    const int64_t* layout() const {
        if (!given_) return nullptr;
        const size_t words = layout_.size() - 1;
        size_t at = 0;
        for (int32_t left = new_outputs(kernel_); left > 0; left--) {
            const int64_t rank = at + 1 < words ? layout_[at + 1] : -1;
            if (rank < 0 || rank > static_cast<int64_t>(words)) throw std::runtime_error("opk_layout is not the layout of this kernel's outputs");
            at += 2 + 2 * static_cast<size_t>(rank);
        }
        if (at != words) throw std::runtime_error("opk_layout is not the layout of this kernel's outputs");
        return layout_.data();
    }

private:
    void read(const opk_argument& argument, uint64_t word, opk_input& input) {
        input.present = !argument.optional || word != 0;
        input.count = 0;
        input.known = nullptr;
        input.as.i = 0;
        if (!input.present) return;
        if (argument.optional) word = take_cell(word);
        switch (argument.kind) {
            case OPK_KIND_TENSOR: read_tensor(word, input); break;
            case OPK_KIND_TENSORS: read_tensors(word, input); break;
            case OPK_KIND_INT: input.as.i = as<int64_t>(word); break;
            case OPK_KIND_FLOAT: input.as.f = as<double>(word); break;
            case OPK_KIND_BOOL: input.as.i = as<bool>(word); break;
            case OPK_KIND_DTYPE: input.as.i = as<int32_t>(word); break;
            case OPK_KIND_STRING: read_string(word, input); break;
            case OPK_KIND_INTS:
                read_ints(word, ints_.emplace_back());
                input.as.ints = ints_.back().data();
                input.count = static_cast<int64_t>(ints_.back().size());
                break;
            case OPK_KIND_FLOATS: read_list(word, floats_.emplace_back(), input, as<double>); break;
            case OPK_KIND_BOOLS: read_list(word, bools_.emplace_back(), input, as<uint8_t>); break;
            default: break;
        }
    }

    // an undefined tensor stands for None
    Handle own(uint64_t word) {
        const Handle tensor = as_handle(word);
        bool defined = false;
        if (tensor == nullptr) return nullptr;
        tensors_.push_back(tensor);
        return shim().aoti_torch_is_defined(tensor, &defined) == 0 && defined ? tensor : nullptr;
    }

    void read_tensor(uint64_t word, opk_input& input) {
        input.as.tensor = own(word);
        input.present = input.as.tensor != nullptr;
    }

    template <class F>
    void each(uint64_t word, F take) {
        const Handle list = as_handle(word);
        size_t size = 0;
        shim().torch_list_size(list, &size);
        for (size_t i = 0; i < size; i++) {
            uint64_t item = 0;
            shim().torch_list_get_item(list, i, &item);
            take(item);
        }
        shim().torch_delete_list(list);
    }

    void read_tensors(uint64_t word, opk_input& input) {
        std::vector<Handle>& list = lists_.emplace_back();
        each(word, [&](uint64_t item) { list.push_back(own(item)); });
        input.as.tensors = list.data();
        input.count = static_cast<int64_t>(list.size());
    }

    void read_ints(uint64_t word, std::vector<int64_t>& list) {
        each(word, [&](uint64_t item) { list.push_back(as<int64_t>(item)); });
    }

    template <class T>
    void read_list(uint64_t word, std::vector<T>& list, opk_input& input, T (*convert)(uint64_t)) {
        each(word, [&](uint64_t item) { list.push_back(convert(item)); });
        input.as.text = reinterpret_cast<const char*>(list.data());  // all pointers of the union
        input.count = static_cast<int64_t>(list.size());
    }

    void read_string(uint64_t word, opk_input& input) {
        const Handle string = as_handle(word);
        size_t length = 0;
        strings_.push_back(string);
        shim().torch_string_length(string, &length);
        shim().torch_string_c_str(string, &input.as.text);
        input.count = static_cast<int64_t>(length);
    }

    const opk_kernel& kernel_;
    Small<opk_input, 16> inputs_;
    bool given_ = false;
    std::vector<int64_t> layout_;
    std::vector<Handle> tensors_, strings_;
    std::vector<std::vector<Handle>> lists_;
    std::vector<std::vector<int64_t>> ints_;
    std::vector<std::vector<double>> floats_;
    std::vector<std::vector<uint8_t>> bools_;
};

[[noreturn]] void raise(const opk_kernel& kernel, int32_t status, opk_message& message) {
    if (status == OPK_REFUSED) {
        name_kernel(kernel, message);
        throw std::runtime_error(std::string(message.text) + "; the kernel does not take such a call");
    }
    throw std::runtime_error(message.text);
}

}  // namespace

void boxed(const opk_kernel* kernel, uint64_t* stack, uint64_t, uint64_t, int32_t has_layout) {
    opk_message message;
    Small<void*, 8> outputs(kernel->output_count);
    {
        Stack arguments(*kernel, stack, has_layout != 0);
        const int32_t status = execute(kernel, arguments.inputs(), arguments.layout(), outputs.data(), &message);
        if (status != OPK_DONE) raise(*kernel, status, message);
        for (size_t i = 0; i < outputs.size(); i++)
            if (kernel->outputs[i].alias >= 0)
                shim().aoti_torch_new_tensor_handle(arguments.inputs()[kernel->outputs[i].alias].as.tensor, &outputs[i]);
    }
    for (size_t i = 0; i < outputs.size(); i++) stack[i] = reinterpret_cast<uintptr_t>(outputs[i]);
}

}  // namespace opkit
