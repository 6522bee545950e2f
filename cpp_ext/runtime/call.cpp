#include "call.hpp"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>

namespace opkit {
namespace {

constexpr int32_t kCpu = 0, kCuda = 1;  // torch's device types
constexpr int64_t kUnbound = -1;

int64_t count_tensors(const opk_kernel& kernel, const opk_input* inputs) {
    int64_t count = 0;
    for (int32_t i = 0; i < kernel.argument_count; i++) {
        const int32_t kind = kernel.arguments[i].kind;
        if (kind == OPK_KIND_TENSOR) count++;
        if (kind == OPK_KIND_TENSORS && inputs[i].present) count += inputs[i].count;
    }
    return count;
}

bool points(int32_t source) {
    return source == OPK_FROM_DATA || source == OPK_FROM_DATA_LIST || source == OPK_FROM_PACKED_TENSOR;
}

bool takes_tensor(int32_t source) { return source <= OPK_FROM_TENSOR_LIST || source == OPK_FROM_PACKED_TENSOR; }

// Whether the strides follow from the sizes and from those strides that the kernel receives.
bool packed(const View& view, uint32_t passed) {
    int64_t expected = 1;
    for (int64_t d = view.rank; d-- > 0;) {
        const bool free = (passed >> d & 1) != 0 || (passed >> (15 + view.rank - d) & 1) != 0;
        if (!free && view.sizes[d] != 1 && view.strides[d] != expected) return false;
        if (free || view.sizes[d] != 1) expected = view.strides[d];
        expected *= view.sizes[d];
    }
    return true;
}

bool same_layout(const View& a, const View& b) {
    return a.rank == b.rank && a.dtype == b.dtype && std::equal(a.sizes, a.sizes + a.rank, b.sizes) &&
           std::equal(a.strides, a.strides + a.rank, b.strides);
}

}  // namespace

Call::Call(const opk_kernel& kernel, const opk_input* inputs, opk_message& message)
    : kernel_(kernel),
      inputs_(inputs),
      message_(message),
      argument_tensors_(count_tensors(kernel, inputs)),
      first_(kernel.argument_count + 1),
      views_(argument_tensors_ + kernel.output_count),
      operands_(argument_tensors_ + kernel.output_count),
      sizes_(kernel.size_count),
      shown_(kernel.size_count),
      dtypes_(kernel.variable_count) {}

Call::~Call() {
    const Shim& torch = shim();
    for (const Operand& operand : operands_) {
        if (operand.owned != nullptr) torch.aoti_torch_delete_tensor_object(operand.owned);
        if (operand.copied != nullptr && !operand.shared) torch.aoti_torch_delete_tensor_object(operand.copied);
    }
    if (guard_ != nullptr) cuda_shim().aoti_torch_delete_cuda_guard(guard_);
}

bool Call::refuse(const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message_.text, sizeof message_.text, format, arguments);
    va_end(arguments);
    return false;
}

// ---- what the arguments are -------------------------------------------------------------------------------------------

bool Call::read_tensors() {
    int32_t next = 0;
    for (int32_t i = 0; i < kernel_.argument_count; i++) {
        const opk_input& input = inputs_[i];
        first_[i] = next;
        if (kernel_.arguments[i].kind == OPK_KIND_TENSOR) {
            if (!input.present && !kernel_.arguments[i].optional)
                return refuse("the argument %s must be a tensor, got None", kernel_.arguments[i].name);
            if (input.present && input.known != nullptr) {
                show(*input.known, input.as.tensor, views_[next]);
                if (!same_device(input.known->device_index)) return false;
            } else if (input.present && !read_tensor(i, input.as.tensor, views_[next])) {
                return false;
            }
            next++;
        } else if (kernel_.arguments[i].kind == OPK_KIND_TENSORS && input.present) {
            for (int64_t j = 0; j < input.count; j++, next++) {
                if (input.as.tensors[j] == nullptr)
                    return refuse("the argument %s must hold tensors, got None", kernel_.arguments[i].name);
                if (!read_tensor(i, input.as.tensors[j], views_[next])) return false;
            }
        }
    }
    mark_operands();
    return true;
}

bool Call::read_tensor(int32_t argument, Handle handle, View& view) {
    const char* name = kernel_.arguments[argument].name;
    if (!read(handle, view)) return refuse("the argument %s is not a dense tensor", name);
    if (view.device_type != (kernel_.cuda ? kCuda : kCpu))
        return refuse("the argument %s is not on %s", name, kernel_.cuda ? "a CUDA device" : "the CPU");
    if (!kernel_.cuda) return true;
    int32_t index;
    if (shim().aoti_torch_get_device_index(handle, &index)) return refuse("the argument %s has no device index", name);
    return same_device(index);
}

bool Call::same_device(int32_t index) {
    if (device_index_ >= 0 && device_index_ != index) return refuse("the arguments are on several devices");
    device_index_ = index;
    return true;
}

bool Call::bind_sizes() {
    std::fill(sizes_.begin(), sizes_.end(), kUnbound);
    std::fill(shown_.begin(), shown_.end(), nullptr);
    for (int32_t i = 0; i < kernel_.argument_count; i++) {
        const opk_argument& argument = kernel_.arguments[i];
        if (argument.shape == nullptr || !inputs_[i].present) continue;
        const int64_t count = argument.kind == OPK_KIND_TENSORS ? inputs_[i].count : 1;
        for (int64_t j = 0; j < count; j++)
            if (views_[first_[i] + j].handle != nullptr && !bind_shape(argument, views_[first_[i] + j])) return false;
    }
    return true;
}

bool Call::bind_shape(const opk_argument& argument, const View& view) {
    const opk_shape& shape = *argument.shape;
    const int64_t named = shape.before + shape.after;
    if (shape.variadic == OPK_NO_NAME ? view.rank != named : view.rank < named)
        return refuse("the argument %s has %lld dimensions", argument.name, static_cast<long long>(view.rank));
    for (int32_t i = 0; i < shape.before; i++)
        if (!bind_dim(argument, shape.dims[i], view.sizes[i])) return false;
    for (int32_t i = 0; i < shape.after; i++)
        if (!bind_dim(argument, shape.dims[shape.before + i], view.sizes[view.rank - shape.after + i])) return false;
    return shape.variadic < 0 || bind_variadic(argument, view);
}

bool Call::bind_dim(const opk_argument& argument, int32_t dim, int64_t size) {
    if (dim == OPK_ANY) return true;
    if (dim >= 0 && sizes_[dim] == kUnbound) sizes_[dim] = size;
    const int64_t expected = dim >= 0 ? sizes_[dim] : -2 - int64_t{dim};
    if (size == expected) return true;
    return refuse("the argument %s has %s %lld where %lld was expected", argument.name,
                  dim >= 0 ? kernel_.size_names[dim] : "the size", static_cast<long long>(size),
                  static_cast<long long>(expected));
}

bool Call::bind_variadic(const opk_argument& argument, const View& view) {
    const opk_shape& shape = *argument.shape;
    const int64_t count = view.rank - shape.before - shape.after;
    const int64_t* sizes = view.sizes + shape.before;
    if (sizes_[shape.variadic] == kUnbound) {
        sizes_[shape.variadic] = element_count(sizes, count);
        int64_t* run = arena_.take<int64_t>(count + 1);
        run[0] = count;
        std::copy(sizes, sizes + count, run + 1);
        shown_[shape.variadic] = run;
        return true;
    }
    const int64_t* run = shown_[shape.variadic];
    if (run[0] == count && std::equal(sizes, sizes + count, run + 1)) return true;
    return refuse("the argument %s has other sizes for %s than an argument before it", argument.name,
                  kernel_.size_names[shape.variadic]);
}

// ---- which instance, and what it writes ---------------------------------------------------------------------------------

bool Call::find_layout(const int64_t* layout) {
    layout_ = layout;
    if (layout != nullptr || new_outputs(kernel_) == 0) return true;
    const Arguments call{&kernel_, inputs_, views_.data(), first_.data()};
    if (!lay_out(call, made_layout_)) return refuse("the sizes of its outputs are not known for arguments like these");
    layout_ = made_layout_.words();
    return true;
}

int32_t Call::tensor_of(const opk_parameter& parameter, int64_t* count) const {
    const int32_t output = parameter.argument - kernel_.argument_count;
    *count = 1;
    if (output < 0) {
        if (kernel_.arguments[parameter.argument].kind == OPK_KIND_TENSORS)
            *count = inputs_[parameter.argument].present ? inputs_[parameter.argument].count : 0;
        return first_[parameter.argument];
    }
    const int32_t alias = kernel_.outputs[output].alias;
    if (alias >= 0) return first_[alias];
    return static_cast<int32_t>(argument_tensors_) + output;
}

bool Call::choose_instance() {
    std::fill(dtypes_.begin(), dtypes_.end(), OPK_ANY_DTYPE);
    const int64_t* layout = layout_;
    for (int32_t i = 0; i < kernel_.output_count; i++) {
        View& view = views_[argument_tensors_ + i];
        if (kernel_.outputs[i].alias >= 0) continue;
        view.dtype = static_cast<int32_t>(layout[0]);
        view.rank = layout[1];
        view.sizes = layout + 2;
        view.strides = layout + 2 + view.rank;
        view.contiguous = row_major(view.sizes, view.strides, view.rank);
        layout += 2 + 2 * view.rank;
    }
    for (int32_t i = 0; i < kernel_.parameter_count; i++)
        if (takes_tensor(kernel_.parameters[i].source) && !fits_dtype(kernel_.parameters[i])) return false;
    for (int32_t i = 0; i < kernel_.instance_count; i++) {
        const int32_t* dtypes = kernel_.instances[i].dtypes;
        bool fits = true;
        for (int32_t n = 0; n < kernel_.variable_count; n++)
            fits &= dtypes_[n] == OPK_ANY_DTYPE || dtypes_[n] == dtypes[n];
        if (fits) return instance_ = &kernel_.instances[i], true;
    }
    return refuse("it was not compiled for the element types of these arguments");
}

bool Call::fits_dtype(const opk_parameter& parameter) {
    if (parameter.dtype == OPK_ANY_DTYPE) return true;
    int64_t count;
    const int32_t tensor = tensor_of(parameter, &count);
    for (int64_t j = 0; j < count; j++) {
        const View& view = views_[tensor + j];
        if (tensor + j < argument_tensors_ && view.handle == nullptr) continue;
        int32_t expected = parameter.dtype;
        if (expected < OPK_ANY_DTYPE) {
            int32_t& variable = dtypes_[-2 - parameter.dtype];
            if (variable == OPK_ANY_DTYPE) variable = view.dtype;
            expected = variable;
        }
        if (view.dtype != expected)
            return refuse("%s has elements of type %s where %s was expected", parameter.name, dtype_name(view.dtype),
                          dtype_name(expected));
    }
    return true;
}

// ---- memory ---------------------------------------------------------------------------------------------------------------

void Call::mark_operands() {
    for (int32_t i = 0; i < kernel_.parameter_count; i++) {
        const opk_parameter& parameter = kernel_.parameters[i];
        if (!takes_tensor(parameter.source)) continue;
        int64_t count;
        const int32_t tensor = tensor_of(parameter, &count);
        const int32_t output = parameter.argument - kernel_.argument_count;
        const bool written = output >= 0 || kernel_.arguments[parameter.argument].written;
        const uint32_t passed = parameter.source == OPK_FROM_PACKED_TENSOR ? static_cast<uint32_t>(parameter.detail) : 0;
        for (int64_t j = 0; j < count; j++) {
            Operand& operand = operands_[tensor + j];
            if (points(parameter.source)) operand.passed_strides = operand.pointed ? operand.passed_strides & passed : passed;
            operand.pointed |= points(parameter.source);
            operand.written |= written;
        }
    }
}

bool Call::nothing_to_write() {
    bool writes = false;
    for (size_t i = 0; i < operands_.size(); i++) {
        const bool exists = static_cast<int64_t>(i) >= argument_tensors_ || views_[i].handle != nullptr;
        if (!operands_[i].written || !exists) continue;
        if (views_[i].numel() != 0) return false;
        writes = true;
    }
    return writes;
}

void Call::allocate_outputs() {
    if (kernel_.cuda) check(cuda_shim().aoti_torch_create_cuda_guard(device_index_, &guard_), "entering the device");
    for (int32_t i = 0; i < kernel_.output_count; i++)
        if (kernel_.outputs[i].alias < 0) {
            View& view = views_[argument_tensors_ + i];
            check(shim().aoti_torch_empty_strided(view.rank, view.sizes, view.strides, view.dtype,
                                                  kernel_.cuda ? kCuda : kCpu, device_index_, &view.handle),
                  "allocating an output");
            if (kernel_.cuda && device_index_ < 0)  // no argument says so: it is on torch's current device
                check(shim().aoti_torch_get_device_index(view.handle, &device_index_), "asking for an output's device");
            operands_[argument_tensors_ + i].owned = view.handle;
        }
}

void Call::make_contiguous() {
    const Shim& torch = shim();
    for (size_t i = 0; i < operands_.size(); i++) {
        Operand& operand = operands_[i];
        const View& view = views_[i];
        if (!operand.pointed || view.handle == nullptr) continue;
        // torch calls contiguous what has any stride along dimensions of one element, and those may be passed
        if ((operand.passed_strides == 0 ? view.contiguous : packed(view, operand.passed_strides)) || shares_copy(i)) continue;
        int64_t* strides = arena_.take<int64_t>(view.rank);
        for (int64_t d = view.rank, stride = 1; d-- > 0; stride *= view.sizes[d]) strides[d] = stride;
        Handle copy;
        check(torch.aoti_torch_empty_strided(view.rank, view.sizes, strides, view.dtype, kernel_.cuda ? kCuda : kCpu,
                                             device_index_, &copy),
              "allocating a contiguous copy");
        const bool output = operand.owned != nullptr;
        operand.copied = copy;
        operand.copied_strides = strides;
        if (!output) check(torch.aoti_torch_copy_(copy, view.handle, 0), "making a tensor contiguous");
    }
}

// A tensor that is passed twice is copied once, so that what is written through one argument is not lost.
bool Call::shares_copy(size_t tensor) {
    const View& view = views_[tensor];
    for (size_t i = 0; i < tensor; i++) {
        Operand& before = operands_[i];
        if (before.copied == nullptr || !same_layout(views_[i], view)) continue;
        if (memory(views_[i].handle, before.written) != memory(view.handle, operands_[tensor].written)) continue;
        before.written |= operands_[tensor].written;
        operands_[tensor].copied = before.copied;
        operands_[tensor].copied_strides = before.copied_strides;
        return operands_[tensor].shared = true;
    }
    return false;
}

void Call::copy_back() {
    for (size_t i = 0; i < operands_.size(); i++)
        if (operands_[i].copied != nullptr && operands_[i].written && !operands_[i].shared)
            check(shim().aoti_torch_copy_(views_[i].handle, operands_[i].copied, 0), "copying a result back");
}

void Call::give_outputs(void** outputs) {
    for (int32_t i = 0; i < kernel_.output_count; i++) {
        Operand& made = operands_[argument_tensors_ + i];
        outputs[i] = made.owned;
        made.owned = nullptr;
    }
}

}  // namespace opkit
