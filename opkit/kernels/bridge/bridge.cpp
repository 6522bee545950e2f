// Kernels of C operators for torch's dispatcher that decide without Python whether a call needs Python.
//
// For each operator two boxed kernels stand in front of the Python ones: at AutogradCPU (AutogradCUDA) and at CPU (CUDA).
// A call that is plain, and that the runtime does not refuse, runs in C from here; every other one goes on to the kernel
// that the dispatcher had at that key before. Compiled once for each torch against its headers; the C side is opkit.h.

#include <torch/csrc/profiler/orchestration/observer.h>
#include <torch/library.h>
#include <torch/headeronly/version.h>

#include <atomic>
#include <cstdio>
#include <memory>
#include <string>
#include <vector>

#include "opkit.h"

namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using c10::OperatorHandle;
using torch::jit::Stack;
using Fallback =
    std::decay_t<decltype(std::declval<const OperatorHandle&>().getComputedKernelForDispatchKey(DispatchKey::CPU))>;

constexpr size_t kFew = 16; // arguments and outputs of a call that needs no memory of its own

// The dispatch keys of plain tensors on one device; any other key in a call stands for something that needs Python.
struct Device {
    DispatchKey backend, autograd;
    c10::DeviceType type;
    uint64_t needed, call, tensor;
};

Device device_of(DispatchKey backend, DispatchKey autograd, DispatchKey autocast, c10::DeviceType type) {
    const DispatchKeySet call{backend, autograd, DispatchKey::ADInplaceOrView, DispatchKey::BackendSelect};
    return {backend, autograd, type, DispatchKeySet(backend).raw_repr(), call.raw_repr(), call.add(autocast).raw_repr()};
}

const Device& device_numbered(int number) {
    static const Device devices[] = {
        device_of(DispatchKey::CPU, DispatchKey::AutogradCPU, DispatchKey::AutocastCPU, c10::kCPU),
        device_of(DispatchKey::CUDA, DispatchKey::AutogradCUDA, DispatchKey::AutocastCUDA, c10::kCUDA),
    };
    TORCH_CHECK(number == 0 || number == 1, "the bridge knows the devices 0 (cpu) and 1 (cuda), not ", number);
    return devices[number];
}

// One installed kernel, shared by its two dispatcher entries.
struct Site {
    const opk_kernel* kernel;
    const opk_runtime* runtime;
    const Device& device;
    std::vector<int32_t> written; // arguments
    std::atomic<bool> enabled{true};
    std::optional<Fallback> above, below; // what runs at the autograd and the backend key without us

    Site(const opk_kernel* k, const opk_runtime* r, const Device& d) : kernel(k), runtime(r), device(d) {}
};

// Memory for the elements of list arguments, valid until the call returns.
class Arena {
    alignas(8) unsigned char fixed_[512];
    size_t used_ = 0;
    std::vector<std::unique_ptr<uint64_t[]>> more_;

public:
    template <class T> T* take(size_t count) {
        const size_t words = (count * sizeof(T) + 7) / 8;
        if (words <= (sizeof(fixed_) - used_) / 8) {
            void* place = fixed_ + used_;
            used_ += words * 8;
            return static_cast<T*>(place);
        }
        more_.push_back(std::make_unique<uint64_t[]>(words));
        return reinterpret_cast<T*>(more_.back().get());
    }
};

// Space for `count` values that nobody has set.
template <class T> class Few {
    T fixed_[kFew];
    std::unique_ptr<T[]> more_;

public:
    explicit Few(size_t count) {
        if (C10_UNLIKELY(count > kFew)) more_ = std::make_unique<T[]>(count);
    }
    T* data() { return more_ ? more_.get() : fixed_; }
};

// Reads the arguments of one call. Each function returns whether the call is still one for C.
class Reader {
    const Site& site_;
    const bool autograd_; // we stand at the autograd key: gradients and tangents count
    Arena arena_;
    static constexpr int kNone = -2;
    int device_index_ = kNone; // of the tensors so far

    bool differentiable(const at::Tensor& tensor, c10::TensorImpl* impl) const {
        if (impl->autograd_meta() == nullptr) return false;
        return (impl->requires_grad() && c10::GradMode::is_enabled()) || impl->_fw_grad(0, tensor).defined();
    }

    bool plain(const at::Tensor& tensor) {
        c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
        const uint64_t keys = impl->key_set().raw_repr();
        const Device& device = site_.device;
        if ((keys & ~device.tensor) != 0 || (keys & device.needed) != device.needed) return false;
        if (autograd_ && differentiable(tensor, impl)) return false;
        if (device.type == c10::kCPU) return true;
        const int index = impl->device().index();
        if (device_index_ == kNone) device_index_ = index;
        return device_index_ == index;
    }

    static void* handle(const IValue& value) { return const_cast<at::Tensor*>(&value.toTensor()); }

    bool tensor(const IValue& value, const opk_argument& argument, opk_input& input) {
        if (!value.isTensor()) return false;
        if (!value.toTensor().defined()) return absent(argument, input);
        input.as.tensor = handle(value);
        if (!plain(value.toTensor())) return false;
        input.known = known(value.toTensor().unsafeGetTensorImpl());
        return true;
    }

    const opk_tensor* known(const c10::TensorImpl* impl) {
        opk_tensor* shown = arena_.take<opk_tensor>(1);
        *shown = {nullptr, impl->sizes().data(), impl->strides().data(), impl->dim(),
                  static_cast<int32_t>(c10::typeMetaToScalarType(impl->dtype())), static_cast<int32_t>(impl->device().index())};
        return shown;
    }

    bool tensors(c10::ArrayRef<IValue> values, opk_input& input) {
        void** handles = arena_.take<void*>(values.size());
        for (size_t i = 0; i < values.size(); ++i) {
            if (!values[i].isTensor() || !values[i].toTensor().defined() || !plain(values[i].toTensor())) return false;
            handles[i] = handle(values[i]);
        }
        input.as.tensors = handles;
        return true;
    }

    template <class T, class Is, class Get>
    bool elements(c10::ArrayRef<IValue> values, const T*& place, Is is, Get get) {
        T* copies = arena_.take<T>(values.size());
        for (size_t i = 0; i < values.size(); ++i) {
            if (!is(values[i])) return false;
            copies[i] = static_cast<T>(get(values[i]));
        }
        place = copies;
        return true;
    }

    bool list(const IValue& value, int32_t kind, opk_input& input) {
        if (!value.isList()) return false;
        const auto values = value.toListRef();
        input.count = static_cast<int64_t>(values.size());
        switch (kind) {
        case OPK_KIND_TENSORS: return tensors(values, input);
        case OPK_KIND_INTS:
            return elements(values, input.as.ints, [](auto& v) { return v.isInt(); }, [](auto& v) { return v.toInt(); });
        case OPK_KIND_FLOATS:
            return elements(
                values, input.as.floats, [](auto& v) { return v.isDouble(); }, [](auto& v) { return v.toDouble(); });
        default:
            return elements(
                values, input.as.bools, [](auto& v) { return v.isBool(); }, [](auto& v) { return v.toBool(); });
        }
    }

    static bool text(const IValue& value, opk_input& input) {
        if (!value.isString()) return false;
        const std::string& characters = value.toStringRef();
        input.as.text = characters.c_str();
        input.count = static_cast<int64_t>(characters.size());
        return true;
    }

    static bool absent(const opk_argument& argument, opk_input& input) {
        input.present = 0;
        return argument.optional || argument.kind == OPK_KIND_IGNORED;
    }

public:
    Reader(const Site& site, bool autograd) : site_(site), autograd_(autograd) {}

    bool read(const IValue& value, const opk_argument& argument, opk_input& input) {
        input.present = 1;
        input.count = 0;
        input.known = nullptr;
        input.as.i = 0;
        if (value.isNone()) return absent(argument, input);
        switch (argument.kind) {
        case OPK_KIND_TENSOR: return tensor(value, argument, input);
        case OPK_KIND_INT:
        case OPK_KIND_DTYPE: return value.isInt() && ((input.as.i = value.toInt()), true); // not a symbol
        case OPK_KIND_BOOL: return value.isBool() && ((input.as.i = value.toBool()), true);
        case OPK_KIND_FLOAT: return value.isDouble() && ((input.as.f = value.toDouble()), true);
        case OPK_KIND_STRING: return text(value, input);
        case OPK_KIND_IGNORED: return true;
        default: return list(value, argument.kind, input);
        }
    }
};

// ---- one call -------------------------------------------------------------------------------------------------------

// Whether nothing in the thread's state wants to see the call. Autocast and torch.jit.trace ran before this kernel.
bool unobserved(const Site& site, DispatchKeySet keys) {
    if ((keys.raw_repr() & ~site.device.call) != 0) return false; // modes, transforms, subclasses, other devices, ...
    return !torch::profiler::impl::profilerEnabled();
}

[[noreturn]] void raise(const opk_message& message) {
    throw std::runtime_error(message.text); // a c10::Error would add where in C++ it was raised
}

template <class Visit> void each_written(const Site& site, const IValue* arguments, Visit visit) {
    for (const int32_t i : site.written) {
        if (arguments[i].isTensor()) visit(arguments[i].toTensor());
        if (!arguments[i].isList()) continue;
        for (const IValue& item : arguments[i].toListRef())
            if (item.isTensor()) visit(item.toTensor());
    }
}

// Whether the kernel at ADInplaceOrView, which this one skips, would have run.
bool versions_count() {
    return !c10::impl::tls_local_dispatch_key_set().excluded_.has(DispatchKey::ADInplaceOrView);
}

bool any_inference_tensor(const Site& site, const IValue* arguments) {
    bool found = false;
    each_written(site, arguments, [&](const at::Tensor& t) { found = found || (t.defined() && t.is_inference()); });
    return found;
}

void bump_versions(const Site& site, const IValue* arguments) {
    each_written(site, arguments, [](const at::Tensor& tensor) {
        if (tensor.defined()) tensor.unsafeGetTensorImpl()->bump_version();
    });
}

// In place of the arguments, the outputs.
void put_outputs(const opk_kernel* kernel, void** outputs, Stack& stack) {
    c10::SmallVector<IValue, 4> results;
    const IValue* arguments = stack.data() + (stack.size() - kernel->argument_count);
    for (int32_t i = 0; i < kernel->output_count; ++i) {
        const int32_t alias = kernel->outputs[i].alias;
        if (alias >= 0) {
            results.push_back(arguments[alias]);
        } else {
            const std::unique_ptr<at::Tensor> owned(static_cast<at::Tensor*>(outputs[i]));
            results.emplace_back(std::move(*owned));
        }
    }
    torch::jit::drop(stack, kernel->argument_count);
    for (IValue& result : results) stack.push_back(std::move(result));
}

// Runs the call in C if it is one for C; otherwise the stack is as it was.
bool run(const Site& site, DispatchKeySet keys, bool autograd, Stack& stack) {
    const opk_kernel* kernel = site.kernel;
    if (!site.enabled.load(std::memory_order_relaxed) || !unobserved(site, keys)) return false;
    const size_t count = kernel->argument_count;
    const IValue* arguments = stack.data() + (stack.size() - count);
    Reader reader(site, autograd);
    Few<opk_input> inputs(count);
    for (size_t i = 0; i < count; ++i)
        if (!reader.read(arguments[i], kernel->arguments[i], inputs.data()[i])) return false;
    const bool versions = autograd && !site.written.empty() && versions_count();
    if (versions && any_inference_tensor(site, arguments)) return false;
    Few<void*> outputs(kernel->output_count);
    opk_message message;
    const int32_t status = site.runtime->execute(kernel, inputs.data(), nullptr, outputs.data(), &message);
    if (status == OPK_REFUSED) return false;
    if (versions) bump_versions(site, arguments); // of a kernel that failed too: it may have written
    if (status != OPK_DONE) raise(message);
    put_outputs(kernel, outputs.data(), stack);
    return true;
}

template <bool autograd> struct Kernel final : c10::OperatorKernel {
    std::shared_ptr<Site> site;
    explicit Kernel(std::shared_ptr<Site> s) : site(std::move(s)) {}

    void operator()(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
        if (C10_LIKELY(run(*site, keys, autograd, *stack))) return;
        (autograd ? site->above : site->below)->callBoxed(op, keys, stack);
    }
};

// ---- installation ---------------------------------------------------------------------------------------------------

struct Handle {
    std::shared_ptr<Site> site; // outlives the registrations: its Python kernels go outside the dispatcher's lock
    std::vector<torch::Library> libraries;
};

struct NoWarnings : c10::WarningHandler {
    void process(const c10::Warning&) override {}
};

void check_fits(const OperatorHandle& op, const opk_kernel* kernel) {
    const auto& schema = op.schema();
    const auto name = c10::toString(op.operator_name());
    TORCH_CHECK(kernel->version == OPK_ABI_VERSION, name, ": the kernel is of ABI ", kernel->version, ", the bridge of ",
                OPK_ABI_VERSION);
    TORCH_CHECK(schema.arguments().size() == static_cast<size_t>(kernel->argument_count) &&
                    schema.returns().size() == static_cast<size_t>(kernel->output_count),
                name, ": the kernel was made for ", kernel->schema, ", and the operator is ", schema);
    for (int32_t i = 0; i < kernel->output_count; ++i) {
        const auto* alias = schema.returns()[i].alias_info();
        TORCH_CHECK(kernel->outputs[i].alias < kernel->argument_count && (kernel->outputs[i].alias >= 0) == (alias != nullptr),
                    name, ": output ", i, " of the kernel and of ", schema, " differ in whether they are an argument");
        TORCH_CHECK(alias == nullptr || alias->isWrite(), name, ": returns a view, which has no native kernel");
    }
}

std::shared_ptr<Site> make_site(const OperatorHandle& op, const Device& device, const opk_kernel* kernel,
                                const opk_runtime* runtime) {
    auto site = std::make_shared<Site>(kernel, runtime, device);
    const auto& arguments = op.schema().arguments();
    for (size_t i = 0; i < arguments.size(); ++i)
        if (arguments[i].alias_info() != nullptr && arguments[i].alias_info()->isWrite())
            site->written.push_back(static_cast<int32_t>(i));
    site->above.emplace(op.getComputedKernelForDispatchKey(device.autograd));
    site->below.emplace(op.getComputedKernelForDispatchKey(device.backend));
    return site;
}

template <bool autograd> void add(Handle& handle, const OperatorHandle& op, DispatchKey key) {
    const auto& name = op.operator_name();
    const auto space = name.name.substr(0, name.name.find("::"));
    handle.libraries.emplace_back(torch::Library::IMPL, space, key, __FILE__, __LINE__);
    handle.libraries.back().impl(
        c10::toString(name).c_str(), torch::CppFunction::makeFromBoxedFunctor(std::make_unique<Kernel<autograd>>(handle.site)));
}

std::unique_ptr<Handle> install(const char* name, const char* overload, int number, const opk_kernel* kernel,
                                const opk_runtime* runtime) {
    const Device& device = device_numbered(number);
    const auto op = c10::Dispatcher::singleton().findSchema({name, overload});
    TORCH_CHECK(op.has_value(), "there is no operator ", name, *overload ? "." : "", overload);
    TORCH_CHECK(!op->hasKernelForDispatchKey(device.autograd), name, ": has a kernel at ", device.autograd, " already");
    check_fits(*op, kernel);
    auto handle = std::make_unique<Handle>();
    handle->site = make_site(*op, device, kernel, runtime);
    NoWarnings silent; // an operator limited to some devices has its Python kernel at the very key that we take over
    const c10::WarningUtils::WarningHandlerGuard guard(&silent);
    add<true>(*handle, *op, device.autograd);
    add<false>(*handle, *op, device.backend);
    return handle;
}

} // namespace

extern "C" {

#define OPKIT_EXPORT __attribute__((visibility("default")))

// Puts `kernel` in front of an operator's Python kernels. The result is for opkit_bridge_uninstall; NULL: see error.
OPKIT_EXPORT void* opkit_bridge_install(const char* name, const char* overload, int device, const opk_kernel* kernel,
                                        const opk_runtime* runtime, char* error, size_t error_size) {
    try {
        return install(name, overload, device, kernel, runtime).release();
    } catch (const c10::Error& failure) {
        std::snprintf(error, error_size, "%s", failure.what_without_backtrace());
    } catch (const std::exception& failure) {
        std::snprintf(error, error_size, "%s", failure.what());
    }
    return nullptr;
}

// The operator is as if nothing had been installed. No other thread may be calling it.
OPKIT_EXPORT void opkit_bridge_uninstall(void* handle) {
    delete static_cast<Handle*>(handle);
}

// Whether calls may run in C, in every thread; at once, and whoever is calling.
OPKIT_EXPORT void opkit_bridge_enable(void* handle, int enabled) {
    static_cast<Handle*>(handle)->site->enabled.store(enabled != 0);
}

OPKIT_EXPORT int opkit_bridge_abi(const char** torch_version) {
    *torch_version = TORCH_VERSION;
    return OPK_ABI_VERSION;
}
}
