// libopkit_model: opkit_model.h.
#include <cstdio>
#include <cstring>
#include <exception>
#include <new>
#include <stdexcept>

#include "../runtime/execute.hpp"
#include "../runtime/tensor.hpp"
#include "model.hpp"
#include "threads.hpp"

#define OPKIT_EXPORT extern "C" __attribute__((visibility("default")))

using opkit::model::Entry;
using opkit::model::Model;
using opkit::model::Tensor;

struct opkit_model {
    Model model;
    std::string manifest;
};

namespace {

// ---- DLPack ----------------------------------------------------------------------------------------------------------

struct Kind {
    uint8_t code, bits;
    int32_t dtype;
};

constexpr Kind kKinds[] = {{0, 8, OPK_INT8},       {0, 16, OPK_INT16},       {0, 32, OPK_INT32},   {0, 64, OPK_INT64},
                           {1, 8, OPK_UINT8},      {1, 16, OPK_UINT16},      {1, 32, OPK_UINT32},  {1, 64, OPK_UINT64},
                           {2, 16, OPK_FLOAT16},   {2, 32, OPK_FLOAT32},     {2, 64, OPK_FLOAT64}, {4, 16, OPK_BFLOAT16},
                           {5, 64, OPK_COMPLEX64}, {5, 128, OPK_COMPLEX128}, {6, 8, OPK_BOOL}};

// One of the caller's tensors, with strides of its own where DLPack leaves them out.
struct Taken {
    opk_tensor tensor;
    std::vector<int64_t> strides;

    explicit Taken(const DLTensor* from) {
        if (from == nullptr) throw std::invalid_argument("a tensor is missing");
        const int32_t place = from->device.device_type;
        if (place != 1 && place != 2)
            throw std::invalid_argument("a tensor is on a device of DLPack's type " + std::to_string(place) +
                                        ", which is neither the CPU nor a CUDA device");
        tensor = {static_cast<char*>(from->data) + from->byte_offset,
                  from->shape,
                  from->strides,
                  from->ndim,
                  -1,
                  place == 2 ? from->device.device_id : -1};
        for (const Kind& kind : kKinds)
            if (from->dtype.code == kind.code && from->dtype.bits == kind.bits && from->dtype.lanes == 1)
                tensor.dtype = kind.dtype;
        if (tensor.dtype < 0)
            throw std::invalid_argument("a tensor has the DLPack type " + std::to_string(from->dtype.code) + " of " +
                                        std::to_string(from->dtype.bits) + " bits, which models do not take");
        if (from->strides != nullptr) return;
        strides.resize(static_cast<size_t>(from->ndim));
        int64_t count = 1;
        for (int32_t d = from->ndim; d-- > 0; count *= from->shape[d]) strides[static_cast<size_t>(d)] = count;
        tensor.strides = strides.data();
    }
    Taken(Taken&& other) noexcept : tensor(other.tensor), strides(std::move(other.strides)) {}
};

struct Given {
    DLManagedTensor managed;
    Tensor tensor;
};

DLManagedTensor* give(Tensor&& tensor) {
    auto* given = new Given{{}, std::move(tensor)};
    Tensor& held = given->tensor;
    Kind found = {2, 32, OPK_FLOAT32};
    for (const Kind& kind : kKinds)
        if (kind.dtype == held.dtype) found = kind;
    given->managed.dl_tensor = {held.data,
                                {held.device < 0 ? 1 : 2, held.device < 0 ? 0 : held.device},
                                static_cast<int32_t>(held.sizes.size()),
                                {found.code, found.bits, 1},
                                held.sizes.data(),
                                held.strides.data(),
                                0};
    given->managed.manager_ctx = given;
    given->managed.deleter = [](DLManagedTensor* self) { delete static_cast<Given*>(self->manager_ctx); };
    return &given->managed;
}

int32_t failed(const std::exception& problem, char* error, size_t size) {
    if (size > 0) snprintf(error, size, "%s", problem.what());
    return 1;
}

// ---- kernels ---------------------------------------------------------------------------------------------------------

struct KernelCall {
    std::vector<opk_input> inputs;
    std::vector<std::unique_ptr<Tensor>> tensors;
    std::vector<std::vector<void*>> lists;
    std::vector<std::vector<uint8_t>> bools;

    // What the kernel does not write to is copied where its rows have gaps: the sizes of outputs are known for tensors without.
    void* handle(const DLTensor* given, bool is_written) {
        const Taken taken(given);
        const opk_tensor& tensor = taken.tensor;
        if (tensor.device_index >= 0) throw std::invalid_argument("a tensor is on a GPU, and kernels run on the CPU");
        Tensor held = Tensor::view(tensor);
        if (!is_written && !opkit::row_major(tensor.sizes, tensor.strides, tensor.rank)) {
            int64_t count = 1;
            for (int64_t d = tensor.rank; d-- > 0; count *= tensor.sizes[d]) held.strides[static_cast<size_t>(d)] = count;
            held = Tensor::empty(held.described());
            opkit::model::copy(tensor, held.described());
        }
        tensors.push_back(std::make_unique<Tensor>(std::move(held)));
        return tensors.back().get();
    }

    void add(const opk_argument& argument, const opkit_argument& value) {
        opk_input input = {};
        input.present = value.kind != OPKIT_NONE;
        input.count = value.count;
        const auto wrong = [&] {
            return std::invalid_argument(std::string("the argument ") + argument.name + " is of another kind");
        };
        if (!input.present && !argument.optional)
            throw std::invalid_argument(std::string("the argument ") + argument.name + " must not be None");
        if (input.present) switch (argument.kind) {
                case OPK_KIND_TENSOR:
                    if (value.kind != OPKIT_TENSOR) throw wrong();
                    input.as.tensor = handle(value.as.tensor, argument.written != 0);
                    break;
                case OPK_KIND_TENSORS:
                    if (value.kind != OPKIT_TENSORS) throw wrong();
                    lists.emplace_back();
                    for (int64_t i = 0; i < value.count; ++i)
                        lists.back().push_back(handle(value.as.tensors[i], argument.written != 0));
                    input.as.tensors = lists.back().data();
                    break;
                case OPK_KIND_FLOAT:
                    if (value.kind != OPKIT_FLOAT && value.kind != OPKIT_INT) throw wrong();
                    input.as.f = value.kind == OPKIT_FLOAT ? value.as.f : static_cast<double>(value.as.i);
                    break;
                case OPK_KIND_STRING:
                    if (value.kind != OPKIT_TEXT) throw wrong();
                    input.as.text = value.as.text;
                    input.count = static_cast<int64_t>(std::strlen(value.as.text));
                    break;
                case OPK_KIND_INTS:
                    if (value.kind != OPKIT_INTS) throw wrong();
                    input.as.ints = value.as.ints;
                    break;
                case OPK_KIND_FLOATS:
                    if (value.kind != OPKIT_FLOATS) throw wrong();
                    input.as.floats = value.as.floats;
                    break;
                case OPK_KIND_BOOLS:
                    if (value.kind != OPKIT_INTS) throw wrong();
                    bools.emplace_back(value.as.ints, value.as.ints + value.count);
                    input.as.bools = bools.back().data();
                    break;
                case OPK_KIND_IGNORED: break;
                default:
                    if (value.kind != OPKIT_INT && value.kind != OPKIT_BOOL) throw wrong();
                    input.as.i = value.as.i;
            }
        inputs.push_back(input);
    }
};

}  // namespace

OPKIT_EXPORT opkit_model* opkit_model_load(const char* path, int32_t verify, const opkit_operators* operators, char* error,
                                           size_t size) {
    try {
        auto model = std::unique_ptr<opkit_model>(new opkit_model{{path, verify != 0, operators}, ""});
        model->manifest = model->model.description();
        return model.release();
    } catch (const std::exception& problem) {
        if (size > 0) snprintf(error, size, "%s cannot be loaded: %s.", path, problem.what());
        return nullptr;
    }
}

OPKIT_EXPORT void opkit_model_free(opkit_model* model) { delete model; }

OPKIT_EXPORT const char* opkit_model_manifest(const opkit_model* model) { return model->manifest.c_str(); }

OPKIT_EXPORT int64_t opkit_model_input_count(const opkit_model* model, const char* entry) {
    try {
        return static_cast<int64_t>(model->model.entry(entry).inputs());
    } catch (const std::exception&) {
        return -1;
    }
}

OPKIT_EXPORT int64_t opkit_model_output_count(const opkit_model* model, const char* entry) {
    try {
        return static_cast<int64_t>(model->model.entry(entry).outputs());
    } catch (const std::exception&) {
        return -1;
    }
}

OPKIT_EXPORT int32_t opkit_model_run(const opkit_model* model, const char* entry, const DLTensor* const* arguments,
                                     int64_t count, DLManagedTensor** results, int64_t result_count, char* error,
                                     size_t size) {
    try {
        const Entry& found = model->model.entry(entry);
        if (result_count != static_cast<int64_t>(found.outputs()))
            throw std::invalid_argument("the model returns " + std::to_string(found.outputs()) +
                                        " tensors, and there is room for " + std::to_string(result_count));
        std::vector<Taken> taken;
        std::vector<opk_tensor> tensors;
        for (int64_t i = 0; i < count; ++i) taken.emplace_back(arguments[i]);
        for (const Taken& each : taken) tensors.push_back(each.tensor);
        std::vector<Tensor> outputs = found.run(tensors);
        for (int64_t i = 0; i < result_count; ++i) {
            Tensor& output = outputs[static_cast<size_t>(i)];
            results[i] = output.memory ? give(std::move(output)) : nullptr;
        }
        return 0;
    } catch (const std::invalid_argument& problem) {
        failed(problem, error, size);
        return 2;
    } catch (const std::exception& problem) {
        return failed(problem, error, size);
    }
}

OPKIT_EXPORT void opkit_set_threads(int64_t count) { opkit::model::set_thread_count(count); }

OPKIT_EXPORT void opkit_use_threads(void (*parallel)(void (*)(void*), void*, unsigned, unsigned), int (*number)(void),
                                    int64_t count) {
    opkit::model::set_threads({parallel, number, count});
}

OPKIT_EXPORT const opk_kernel* opkit_kernel_load(const char* path, char* error, size_t size) {
    try {
        const opk_kernel* kernel = opkit::load_kernel(path).kernel;
        if (kernel->cuda) throw std::runtime_error(std::string(path) + " is a kernel for GPUs, which needs torch");
        return kernel;
    } catch (const std::exception& problem) {
        failed(problem, error, size);
        return nullptr;
    }
}

OPKIT_EXPORT const char* opkit_kernel_schema(const opk_kernel* kernel) { return kernel->schema; }

OPKIT_EXPORT int64_t opkit_kernel_output_count(const opk_kernel* kernel) { return kernel->output_count; }

OPKIT_EXPORT int64_t opkit_kernel_output_alias(const opk_kernel* kernel, int64_t output) {
    return output >= 0 && output < kernel->output_count ? kernel->outputs[output].alias : -1;
}

OPKIT_EXPORT DLManagedTensor* opkit_tensor_share(const DLManagedTensor* tensor) {
    return give(Tensor(static_cast<const Given*>(tensor->manager_ctx)->tensor));
}

OPKIT_EXPORT int32_t opkit_kernel_call(const opk_kernel* kernel, const opkit_argument* arguments, int64_t count,
                                       DLManagedTensor** results, int64_t result_count, char* error, size_t size) {
    try {
        if (count != kernel->argument_count || result_count != kernel->output_count)
            throw std::invalid_argument(std::string(kernel->schema) + " was called with " + std::to_string(count) +
                                        " arguments for " + std::to_string(result_count) + " results");
        KernelCall call;
        for (int64_t i = 0; i < count; ++i) call.add(kernel->arguments[i], arguments[i]);
        std::vector<void*> outputs(static_cast<size_t>(result_count));
        opk_message message;
        const int32_t status = opkit::execute(kernel, call.inputs.data(), nullptr, outputs.data(), &message);
        if (status == OPK_REFUSED) opkit::name_kernel(*kernel, message);
        if (status != OPK_DONE) throw std::runtime_error(message.text);
        for (int64_t i = 0; i < result_count; ++i) {
            const std::unique_ptr<Tensor> made(static_cast<Tensor*>(outputs[static_cast<size_t>(i)]));
            results[i] = made ? give(std::move(*made)) : nullptr;
        }
        return 0;
    } catch (const std::exception& problem) {
        return failed(problem, error, size);
    }
}
