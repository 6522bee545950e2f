// Run models that opkit.export wrote from C++ with libtorch, without Python: operators that only torch has are called through its
// dispatcher, and kernels use torch's threads. Header-only; C++17, or what your libtorch asks for.
//
//   const opkit::Model model("model.opk");
//   const std::vector<at::Tensor> results = model({images});
//
// Link libopkit_model and libtorch. Errors are std::runtime_error.
#ifndef OPKIT_TORCH_HPP
#define OPKIT_TORCH_HPP

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/jit_type.h>
#include <ATen/core/stack.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <cstdio>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "opkit.h"
#include "opkit_model.h"
#include "opkit_program.h"

namespace opkit {
namespace torch_operators {

inline at::Tensor tensor_of(const opk_tensor& from) {
    const auto rank = static_cast<size_t>(from.rank);
    const at::Device device = from.device_index < 0 ? at::Device(at::kCPU)
                                                    : at::Device(at::kCUDA, static_cast<at::DeviceIndex>(from.device_index));
    const auto options = at::TensorOptions(static_cast<at::ScalarType>(from.dtype)).device(device);
    return at::from_blob(from.data, {from.sizes, rank}, {from.strides, rank}, options);
}

// A dtype, layout or memory format by its name in Python; schemas have integers for these.
inline int64_t number_of(const std::string& text) {
    static const std::pair<const char*, int64_t> known[] = {
        {"torch.strided", static_cast<int64_t>(at::Layout::Strided)},
        {"torch.contiguous_format", static_cast<int64_t>(at::MemoryFormat::Contiguous)},
        {"torch.preserve_format", static_cast<int64_t>(at::MemoryFormat::Preserve)},
        {"torch.channels_last", static_cast<int64_t>(at::MemoryFormat::ChannelsLast)},
        {"torch.channels_last_3d", static_cast<int64_t>(at::MemoryFormat::ChannelsLast3d)}};
    for (const auto& [name, number] : known)
        if (text == name) return number;
    throw std::runtime_error("an argument is " + text + ", which has no meaning without Python");
}

c10::IValue value_of(const opk_passed& passed, const c10::TypePtr& type);

template <class T, class F>
c10::IValue list_of(const opk_passed& passed, const F& item) {
    c10::List<T> list;
    for (int32_t i = 0; i < passed.count; ++i) list.push_back(item(passed.as.items[i]));
    return list;
}

inline c10::IValue list_of(const opk_passed& passed, const c10::TypePtr& element) {
    using Item = const opk_passed&;
    switch (element->kind()) {
        case c10::TypeKind::TensorType:
            return list_of<at::Tensor>(passed, [](Item each) { return tensor_of(*each.as.tensor); });
        case c10::TypeKind::OptionalType:
            return list_of<std::optional<at::Tensor>>(passed, [](Item each) {
                return each.kind == OPK_PASSED_TENSOR ? std::optional(tensor_of(*each.as.tensor)) : std::nullopt;
            });
        case c10::TypeKind::FloatType:
            return list_of<double>(passed, [](Item each) {
                return each.kind == OPK_PASSED_FLOAT ? each.as.f : static_cast<double>(each.as.i);
            });
        case c10::TypeKind::BoolType: return list_of<bool>(passed, [](Item each) { return each.as.i != 0; });
        case c10::TypeKind::StringType:
            return list_of<std::string>(passed, [](Item each) { return std::string(each.as.text); });
        default: return list_of<int64_t>(passed, [](Item each) { return each.as.i; });
    }
}

inline c10::IValue value_of(const opk_passed& passed, const c10::TypePtr& declared) {
    c10::TypePtr type = declared;
    if (const auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
    switch (passed.kind) {
        case OPK_PASSED_NONE: return {};
        case OPK_PASSED_TENSOR: return tensor_of(*passed.as.tensor);
        case OPK_PASSED_FLOAT: return passed.as.f;
        case OPK_PASSED_BOOL: return passed.as.i != 0;
        case OPK_PASSED_TEXT:
            if (type->kind() == c10::TypeKind::DeviceObjType) return c10::Device(passed.as.text);
            if (type->kind() == c10::TypeKind::IntType) return number_of(passed.as.text);
            return std::string(passed.as.text);
        case OPK_PASSED_LIST: {
            const auto list = type->cast<c10::ListType>();
            if (!list) throw std::runtime_error("a list is passed for " + type->str());
            return list_of(passed, list->getElementType());
        }
        default:
            if (type->kind() == c10::TypeKind::FloatType) return static_cast<double>(passed.as.i);
            return passed.as.i;
    }
}

inline const opk_passed* find(const c10::Argument& argument, size_t position, const opk_passed* passed, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
        const bool is_it = passed[i].name ? argument.name() == passed[i].name : static_cast<size_t>(i) == position;
        if (is_it) return &passed[i];
    }
    return nullptr;
}

// Puts a tensor where the program expects the result.
inline void give(const at::Tensor& made, opk_result& result) {
    opk_tensor& expected = result.tensor;
    const auto rank = static_cast<size_t>(expected.rank);
    const at::IntArrayRef sizes(expected.sizes, rank), strides(expected.strides, rank);
    if (made.sizes() != sizes) throw std::runtime_error("a result has other sizes than its fake implementation gives");
    if (expected.data != nullptr) {
        if (made.data_ptr() != expected.data) tensor_of(expected).copy_(made);
        return;
    }
    const bool is_aligned = reinterpret_cast<uintptr_t>(made.data_ptr()) % 16 == 0;  // as kernels for GPUs expect
    const bool fits = made.strides() == strides && !made.is_conj() && !made.is_neg() && is_aligned;
    auto owner = std::make_unique<at::Tensor>(fits ? made : at::empty_strided(sizes, strides, made.options()).copy_(made));
    expected.data = owner->data_ptr();
    result.owner = owner.release();
}

inline std::optional<c10::OperatorHandle> handle_of(const char* name, const char* overload) {
    return c10::Dispatcher::singleton().findSchema({name, std::string(overload) == "default" ? "" : overload});
}

inline void call(const c10::OperatorHandle& handle, const opk_passed* passed, int64_t count, opk_result* results,
                 int64_t result_count) {
    const at::NoGradGuard no_grad;
    torch::jit::Stack stack;
    const auto& arguments = handle.schema().arguments();
    for (size_t i = 0; i < arguments.size(); ++i) {
        if (arguments[i].is_out()) {
            stack.emplace_back(tensor_of(results[0].tensor));
        } else if (const opk_passed* value = find(arguments[i], i, passed, count)) {
            stack.push_back(value_of(*value, arguments[i].type()));
        } else {
            stack.push_back(arguments[i].default_value().value_or(c10::IValue()));
        }
    }
    handle.callBoxed(stack);
    std::vector<at::Tensor> made;
    for (const c10::IValue& each : stack) {
        if (each.isTensorList())
            for (const at::Tensor& tensor : each.toTensorVector()) made.push_back(tensor);
        else
            made.push_back(each.isTensor() ? each.toTensor() : at::Tensor());
    }
    for (size_t i = 0; i < static_cast<size_t>(result_count); ++i)
        if (results[i].buffer >= 0) give(made.at(i), results[i]);
}

inline at::Device device_of(void* context) { return *static_cast<at::Device*>(context); }

inline void* allocate(void* context, int64_t bytes, void** owner) {
    try {
        auto made = std::make_unique<at::Tensor>(
            at::empty_strided({bytes > 0 ? bytes : 1}, {1}, at::TensorOptions(at::kByte).device(device_of(context))));
        void* data = made->data_ptr();
        *owner = made.release();
        return data;
    } catch (const std::exception&) {
        return nullptr;
    }
}

inline int32_t copy(void*, const opk_tensor* from, const opk_tensor* to) {
    try {
        tensor_of(*to).copy_(tensor_of(*from));
        return 0;
    } catch (const std::exception&) {
        return 1;
    }
}

inline void* stream(void* context) {
    return c10::impl::VirtualGuardImpl(at::kCUDA).getStream(device_of(context)).native_handle();
}

inline opkit_operators table(at::Device* device) {
    return {[](void*, const char* name, const char* overload) -> int32_t { return handle_of(name, overload).has_value(); },
            [](void*, const char* name, const char* overload, const opk_passed* passed, int64_t count, opk_result* results,
               int64_t result_count, char* error, size_t size) -> int32_t {
                try {
                    call(handle_of(name, overload).value(), passed, count, results, result_count);
                    return 0;
                } catch (const std::exception& problem) {
                    snprintf(error, size, "%s", problem.what());
                    return 1;
                }
            },
            [](void*, void* owner) { delete static_cast<at::Tensor*>(owner); },
            device,
            device->is_cuda() ? device->index() : -1,
            device->is_cuda() ? allocate : nullptr,
            copy,
            stream};
}

inline void run_on_threads(void (*body)(void*), void* data, unsigned threads, unsigned) {
    at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
        for (; begin < end; ++begin) body(data);
    });
}

}  // namespace torch_operators

// A loaded model.
class Model {
public:
    // A model that was exported for GPUs needs the device, such as at::Device(at::kCUDA, 0).
    explicit Model(const std::string& path, bool verify = true, at::Device device = at::kCPU)
        : device_(std::make_shared<at::Device>(device)) {
        char why[4096] = "";
        const c10::OptionalDeviceGuard guard(device.is_cuda() ? std::optional(device) : std::nullopt);
        const opkit_operators operators = torch_operators::table(device_.get());
        opkit_use_threads(torch_operators::run_on_threads, at::get_thread_num, at::get_num_threads());
        model_.reset(opkit_model_load(path.c_str(), verify, &operators, why, sizeof why), opkit_model_free);
        if (!model_) throw std::runtime_error(why);
    }

    // The manifest of the file, as JSON: entries, arguments, results.
    std::string manifest() const { return opkit_model_manifest(model_.get()); }

    // Runs an entry on tensors on the model's device: the arguments that are no constants, in order. A size is an int64 of no dimensions.
    // A result that is None is an undefined tensor.
    std::vector<at::Tensor> operator()(const std::vector<at::Tensor>& arguments, const std::string& entry = "") const {
        const c10::OptionalDeviceGuard guard(device_->is_cuda() ? std::optional(*device_) : std::nullopt);
        std::vector<DLTensor> tensors;
        std::vector<const DLTensor*> pointers;
        tensors.reserve(arguments.size());
        for (const at::Tensor& each : arguments) {
            tensors.push_back(dlpack(each));
            pointers.push_back(&tensors.back());
        }
        std::vector<DLManagedTensor*> results(
            static_cast<size_t>(std::max<int64_t>(0, opkit_model_output_count(model_.get(), entry.c_str()))));
        char why[4096] = "";
        if (opkit_model_run(model_.get(), entry.c_str(), pointers.data(), static_cast<int64_t>(pointers.size()),
                            results.data(), static_cast<int64_t>(results.size()), why, sizeof why))
            throw std::runtime_error(why);
        std::vector<at::Tensor> found;
        for (DLManagedTensor* each : results) found.push_back(each ? owned(each) : at::Tensor());
        return found;
    }

private:
    struct Kind {
        at::ScalarType type;
        uint8_t code, bits;
    };
    static const std::vector<Kind>& kinds() {
        static const std::vector<Kind> known = {
            {at::kFloat, 2, 32}, {at::kDouble, 2, 64}, {at::kHalf, 2, 16},         {at::kBFloat16, 4, 16},
            {at::kLong, 0, 64},  {at::kInt, 0, 32},    {at::kShort, 0, 16},        {at::kChar, 0, 8},
            {at::kByte, 1, 8},   {at::kBool, 6, 8},    {at::kComplexFloat, 5, 64}, {at::kComplexDouble, 5, 128}};
        return known;
    }

    static DLTensor dlpack(const at::Tensor& from) {
        if (!from.device().is_cpu() && !from.device().is_cuda())
            throw std::runtime_error("an argument is on " + from.device().str());
        const DLDevice place = from.device().is_cpu() ? DLDevice{1, 0} : DLDevice{2, from.device().index()};
        for (const Kind& kind : kinds())
            if (kind.type == from.scalar_type())
                return {from.data_ptr(),
                        place,
                        static_cast<int32_t>(from.dim()),
                        {kind.code, kind.bits, 1},
                        const_cast<int64_t*>(from.sizes().data()),
                        const_cast<int64_t*>(from.strides().data()),
                        0};
        throw std::runtime_error(std::string("an argument is of ") + c10::toString(from.scalar_type()) +
                                 ", which models do not take");
    }

    static at::Tensor owned(DLManagedTensor* managed) {
        const DLTensor& from = managed->dl_tensor;
        const auto rank = static_cast<size_t>(from.ndim);
        at::ScalarType type = at::kFloat;
        for (const Kind& kind : kinds())
            if (kind.code == from.dtype.code && kind.bits == from.dtype.bits) type = kind.type;
        const at::Device place = from.device.device_type == 1
                                     ? at::Device(at::kCPU)
                                     : at::Device(at::kCUDA, static_cast<at::DeviceIndex>(from.device.device_id));
        return at::from_blob(
            from.data, {from.shape, rank}, {from.strides, rank}, [managed](void*) { managed->deleter(managed); },
            at::TensorOptions(type).device(place));
    }

    std::shared_ptr<at::Device> device_;  // outlives the model, which refers to it
    std::shared_ptr<opkit_model> model_;
};

}  // namespace opkit
#endif
