#include "call.hpp"

#include <stdexcept>
#include <string>

namespace opkit {
namespace {

int64_t nothing = 0;  // what an empty list's address is

}  // namespace

int32_t Call::run(const char** text) {
    Small<opk_value, kMostParameters> values(kernel_.parameter_count);
    for (int32_t i = 0; i < kernel_.parameter_count; i++) values[i] = value(kernel_.parameters[i]);
    return instance_->call(values.data(), text);
}

opk_value Call::value(const opk_parameter& parameter) {
    opk_value result;
    const bool of_argument = parameter.argument >= 0 && parameter.argument < kernel_.argument_count;
    const opk_input* input = of_argument ? &inputs_[parameter.argument] : nullptr;
    switch (parameter.source) {
        case OPK_FROM_DATA:
        case OPK_FROM_TENSOR:
        case OPK_FROM_PACKED_TENSOR:
        case OPK_FROM_NUMEL:
        case OPK_FROM_RANK:
        case OPK_FROM_SIZE:
        case OPK_FROM_STRIDE: return tensor_value(parameter);
        case OPK_FROM_DATA_LIST:
        case OPK_FROM_TENSOR_LIST: return list_value(parameter);
        case OPK_FROM_SCALAR:
            if (kernel_.arguments[parameter.argument].kind == OPK_KIND_FLOAT)
                result.f = input->as.f;
            else
                result.i = input->as.i;
            return result;
        case OPK_FROM_SCALAR_POINTER: return scalar_pointer(parameter.argument);
        case OPK_FROM_STRING:
        case OPK_FROM_VALUES:  // all of these are pointers in the union
            result.p = input->present ? const_cast<char*>(input->as.text) : nullptr;
            if (input->present && result.p == nullptr) result.p = &nothing;  // an empty list is not None
            return result;
        case OPK_FROM_LENGTH: result.i = input->present ? input->count : 0; return result;
        case OPK_FROM_NAMED_SIZE: result.i = sizes_[parameter.detail] < 0 ? 0 : sizes_[parameter.detail]; return result;
        case OPK_FROM_STREAM: {
            void* stream = nullptr;
            check(cuda_shim().aoti_torch_get_current_cuda_stream(device_index_, &stream), "asking for the CUDA stream");
            result.p = stream;
            return result;
        }
        default: return parameter.constant;
    }
}

opk_value Call::tensor_value(const opk_parameter& parameter) {
    int64_t count;
    const int32_t tensor = tensor_of(parameter, &count);
    const View& view = views_[tensor];
    opk_value result;
    if (parameter.source == OPK_FROM_DATA)
        result.p = view.handle == nullptr ? nullptr : pointer(tensor);
    else if (parameter.source == OPK_FROM_TENSOR || parameter.source == OPK_FROM_PACKED_TENSOR)
        result.p = const_cast<opk_tensor*>(describe(tensor));
    else
        result.i = view.handle == nullptr ? 0 : dimension(parameter, tensor);
    return result;
}

int64_t Call::dimension(const opk_parameter& parameter, int32_t tensor) const {
    const View& view = views_[tensor];
    if (parameter.source == OPK_FROM_NUMEL) return view.numel();
    if (parameter.source == OPK_FROM_RANK) return view.rank;
    if (parameter.detail < -view.rank) return parameter.source == OPK_FROM_SIZE ? 1 : 0;  // a leading dimension is missing
    const int64_t d = parameter.detail < 0 ? parameter.detail + view.rank : parameter.detail;
    if (d < 0 || d >= view.rank)
        throw std::out_of_range("the parameter " + std::string(parameter.name) + " asks for dimension " +
                                std::to_string(parameter.detail) + " of a tensor that has " + std::to_string(view.rank));
    if (parameter.source == OPK_FROM_SIZE) return view.sizes[d];
    return operands_[tensor].copied != nullptr ? operands_[tensor].copied_strides[d] : view.strides[d];
}

void* Call::pointer(int32_t tensor) {
    const Operand& operand = operands_[tensor];
    return memory(operand.copied != nullptr ? operand.copied : views_[tensor].handle, operand.written);
}

// Where it is to be written, memory that tensors share until one is written to becomes the tensor's own.
void* Call::memory(Handle handle, bool written) {
    void* data = nullptr;
    const void* constant = nullptr;
    if (written) {
        check(shim().torch_get_mutable_data_ptr(handle, &data), "asking for a tensor's memory");
        return data;
    }
    check(shim().torch_get_const_data_ptr(handle, &constant), "asking for a tensor's memory");
    return const_cast<void*>(constant);
}

const opk_tensor* Call::describe(int32_t tensor) {
    const View& view = views_[tensor];
    if (view.handle == nullptr) return nullptr;
    opk_tensor& described = operands_[tensor].described;
    described = {pointer(tensor), view.sizes, view.strides, view.rank, view.dtype, device_index_};
    if (operands_[tensor].copied != nullptr) described.strides = operands_[tensor].copied_strides;
    return &described;
}

opk_value Call::list_value(const opk_parameter& parameter) {
    int64_t count;
    const int32_t first = tensor_of(parameter, &count);
    opk_value result;
    if (!inputs_[parameter.argument].present) {
        result.p = nullptr;
    } else if (parameter.source == OPK_FROM_DATA_LIST) {
        void** pointers = arena_.take<void*>(count);
        for (int64_t j = 0; j < count; j++)
            pointers[j] = views_[first + j].handle == nullptr ? nullptr : pointer(first + static_cast<int32_t>(j));
        result.p = pointers;
    } else {
        opk_tensor* tensors = arena_.take<opk_tensor>(count);
        for (int64_t j = 0; j < count; j++) {
            const opk_tensor* described = describe(first + static_cast<int32_t>(j));
            tensors[j] = described == nullptr ? opk_tensor{} : *described;
        }
        result.p = tensors;
    }
    return result;
}

opk_value Call::scalar_pointer(int32_t argument) {
    const opk_input& input = inputs_[argument];
    opk_value result;
    result.p = nullptr;
    if (!input.present) return result;
    result.p = arena_.take<int64_t>(1);
    switch (kernel_.arguments[argument].kind) {
        case OPK_KIND_FLOAT: *static_cast<double*>(result.p) = input.as.f; break;
        case OPK_KIND_BOOL: *static_cast<uint8_t*>(result.p) = input.as.i != 0; break;
        case OPK_KIND_DTYPE: *static_cast<int32_t*>(result.p) = static_cast<int32_t>(input.as.i); break;
        default: *static_cast<int64_t*>(result.p) = input.as.i;
    }
    return result;
}

}  // namespace opkit
