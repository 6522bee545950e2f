// libopkit_model: opkit_model.h.
#include <cstdio>
#include <deque>
#include <exception>
#include <new>
#include <stdexcept>

#include "../runtime/execute.hpp"
#include "../runtime/tensor.hpp"
#include "kernel_inputs.hpp"
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

static_assert(int{OPKIT_NONE} == int{OPK_PASSED_NONE} && int{OPKIT_TENSOR} == int{OPK_PASSED_TENSOR} &&
              int{OPKIT_INT} == int{OPK_PASSED_INT} && int{OPKIT_FLOAT} == int{OPK_PASSED_FLOAT} &&
              int{OPKIT_BOOL} == int{OPK_PASSED_BOOL} && int{OPKIT_TEXT} == int{OPK_PASSED_TEXT});

// Arguments of the caller's as programs pass them, and what they point to.
struct KernelArguments {
    std::deque<Taken> taken;
    std::deque<Tensor> copies;
    std::deque<opk_tensor> tensors;
    std::deque<std::vector<opk_passed>> lists;

    opk_passed passed(const opk_argument& argument, const opkit_argument& value) {
        opk_passed found = {value.kind, 0, nullptr, {}};
        switch (value.kind) {
            case OPKIT_TENSOR: return tensor(value.as.tensor, argument);
            case OPKIT_FLOAT: found.as.f = value.as.f; break;
            case OPKIT_TEXT: found.as.text = value.as.text; break;
            case OPKIT_INTS: return list(value.count, [&](int64_t i) { return number(value.as.ints[i]); });
            case OPKIT_FLOATS: return list(value.count, [&](int64_t i) { return number(value.as.floats[i]); });
            case OPKIT_TENSORS: return list(value.count, [&](int64_t i) { return tensor(value.as.tensors[i], argument); });
            default: found.as.i = value.as.i;
        }
        return found;
    }

    static opk_passed number(int64_t value) {
        opk_passed passed = {OPK_PASSED_INT, 0, nullptr, {}};
        passed.as.i = value;
        return passed;
    }
    static opk_passed number(double value) {
        opk_passed passed = {OPK_PASSED_FLOAT, 0, nullptr, {}};
        passed.as.f = value;
        return passed;
    }

    // What the kernel does not write to is copied where its rows have gaps: the sizes of outputs are known for tensors without.
    opk_passed tensor(const DLTensor* given, const opk_argument& argument) {
        opk_tensor found = taken.emplace_back(given).tensor;
        if (found.device_index >= 0) throw std::invalid_argument("a tensor is on a GPU, and kernels run on the CPU");
        if (argument.written == 0 && !opkit::row_major(found.sizes, found.strides, found.rank)) {
            Tensor held = Tensor::view(found);
            int64_t count = 1;
            for (int64_t d = found.rank; d-- > 0; count *= found.sizes[d]) held.strides[static_cast<size_t>(d)] = count;
            const opk_tensor copied = copies.emplace_back(Tensor::empty(held.described())).described();
            opkit::model::copy(found, copied);
            found = copied;
        }
        opk_passed passed = {OPK_PASSED_TENSOR, 0, nullptr, {}};
        passed.as.tensor = &tensors.emplace_back(found);
        return passed;
    }

    template <class Item>
    opk_passed list(int64_t count, const Item& item) {
        std::vector<opk_passed>& items = lists.emplace_back();
        for (int64_t i = 0; i < count; ++i) items.push_back(item(i));
        opk_passed passed = {OPK_PASSED_LIST, static_cast<int32_t>(count), nullptr, {}};
        passed.as.items = items.data();
        return passed;
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
        KernelArguments given;
        opkit::model::KernelInputs inputs;
        for (int64_t i = 0; i < count; ++i) {
            const opk_passed passed = given.passed(kernel->arguments[i], arguments[i]);
            inputs.add(kernel->arguments[i], &passed);
        }
        std::vector<void*> outputs(static_cast<size_t>(result_count));
        opk_message message;
        const int32_t status = opkit::execute(kernel, inputs.data(), nullptr, outputs.data(), &message);
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
