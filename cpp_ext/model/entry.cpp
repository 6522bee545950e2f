#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <set>
#include <sstream>
#include <stdexcept>

#include "../cpu_features.hpp"
#include "../runtime/execute.hpp"
#include "../runtime/tensor.hpp"
#include "model.hpp"
#include "threads.hpp"

namespace opkit::model {
namespace {

using Text = std::string;

// ---- this processor --------------------------------------------------------------------------------------------------

const std::set<Text>& features() {
    static const std::set<Text> found = [] {
        std::set<Text> all;
        for (const auto& part : {detect_x86(), detect_arm()})
            for (const Feature& feature : part)
                if (feature.usable) all.insert(feature.name);
        std::ifstream file("/proc/cpuinfo");
        for (Text line; std::getline(file, line);)
            if (line.rfind("flags", 0) == 0 || line.rfind("Features", 0) == 0) {
                std::istringstream words(line.substr(line.find(':') + 1));
                for (Text word; words >> word;) all.insert(word);
                break;
            }
        return all;
    }();
    return found;
}

Text lacking(const Json& variant) {
    Text missing;
    for (const Json& each : variant.at("features").items())
        if (!features().count(each.text())) missing += (missing.empty() ? "" : " ") + each.text();
    return missing;
}

// The last variant that this processor can run.
const Json& choose(const Json& convention) {
    const std::vector<Json>& variants = convention.at("variants").items();
    Text made;
    for (size_t i = variants.size(); i-- > 0;) {
        const Text missing = lacking(variants[i]);
        if (missing.empty()) return variants[i];
        made += (made.empty() ? "" : "; ") + variants[i].at("isa").text() + ", which needs " + missing;
    }
    throw std::runtime_error("it does not run on this processor: it was made for " + made);
}

// ---- libraries of the file -------------------------------------------------------------------------------------------

// A file with these bytes, for as long as it takes to load it.
class LibraryFile {
public:
    explicit LibraryFile(Bytes bytes) {
        const char* folder = std::getenv("TMPDIR");
        path_ = Text(folder && *folder ? folder : "/tmp") + "/opkit-XXXXXX";
        file_ = mkstemp(path_.data());
        for (ssize_t written = 0; bytes.size > 0; bytes = {bytes.data + written, bytes.size - static_cast<size_t>(written)})
            if ((written = write(file_, bytes.data, bytes.size)) <= 0)
                throw std::runtime_error("its kernels cannot be written to " + path_ + ". The variable TMPDIR names another folder");
    }
    ~LibraryFile() {
        unlink(path_.c_str());
        close(file_);
    }
    LibraryFile(const LibraryFile&) = delete;
    LibraryFile& operator=(const LibraryFile&) = delete;
    const Text& path() const { return path_; }

private:
    Text path_;
    int file_ = -1;
};

Text place(int32_t device) { return device < 0 ? "the CPU" : "the GPU " + std::to_string(device); }

template <class F>
void find(void* library, const char* name, F& function) {
    function = reinterpret_cast<F>(dlsym(library, name));
    if (function == nullptr) throw std::runtime_error(Text("its kernels lack ") + name);
}

}  // namespace

// ---- reading ---------------------------------------------------------------------------------------------------------

Entry::Entry(const Text& name, const Json& convention, const Archive& archive, Weights& weights, const Device& device,
             const opkit_operators* host)
    : name_(name), device_(device), host_(host) {
    const Json& variant = choose(convention);
    const Text folder = variant.at("folder").text();
    if (!variant.at("needs_python").text().empty())
        throw std::runtime_error("it needs Python: " + variant.at("needs_python").text() + ". Load it with opkit.load");
    const Json program = archive.read_json(folder + "/program.json");
    if (program.at("version").integer() != OPK_PROGRAM_VERSION)
        throw std::runtime_error("its program is for another version of opkit. Export the model again");
    for (const auto& field : convention.at("state").fields()) states_.push_back(weights.state(field.second));
    read_inputs(convention, program);
    read_operators(program, variant, archive);
    read_functions(program, archive);
    for (const Json& record : program.at("constants").items()) constants_.push_back(weights.constant(record).data);
    for (const Json& step : program.at("steps").items()) steps_.push_back(step.text());
    buffers_ = program.at("buffers").integer();
    outputs_ = program.at("outputs").integer();
    load_program(archive, folder);
    load_binaries(program, archive, folder);
}

void Entry::read_inputs(const Json& convention, const Json& program) {
    std::vector<Text> names, written;
    for (const auto& field : convention.at("state").fields()) names.push_back(field.first);
    for (const Json& argument : convention.at("arguments").items())
        if (argument.items().size() == 1) names.push_back(argument.at(size_t{0}).text());
    for (const Json& each : convention.at("written").items()) written.push_back(each.text());
    const std::vector<Json>& taken = program.at("inputs").items();
    if (taken.size() != names.size()) throw std::runtime_error("its program takes other inputs");
    for (size_t i = 0; i < taken.size(); ++i) {
        Input input;
        input.name = names[i];
        input.text = taken[i].at(2).text();
        input.dtype = static_cast<int32_t>(taken[i].at(size_t{0}).integer());
        input.rank = taken[i].at(1).integer();
        input.is_on_gpu = taken[i].at(3).integer() != 0;
        input.is_aligned = taken[i].at(4).integer() != 0;
        input.is_written = std::find(written.begin(), written.end(), names[i]) != written.end();
        if (input.rank < 0 || input.rank > 64) throw std::runtime_error("an input has no rank");
        if (input.dtype >= 0) layout_count_ += 2 * input.rank;
        inputs_.push_back(std::move(input));
    }
    size_count_ = program.at("sizes").integer();
    for (const Json& bound : program.at("bound").items()) {
        const Text& from = bound.at(3).text();
        Size size{bound.at(size_t{0}).integer(), bound.at(2).integer(), bound.at(4).integer(), bound.at(1).text(),
                  from == "size" ? Size::From::Size : from == "stride" ? Size::From::Stride : Size::From::Value, INT64_MIN, INT64_MAX};
        if (const Json* range = convention.at("ranges").find(size.name)) {
            if (!range->at(size_t{0}).is_null()) size.least = range->at(size_t{0}).integer();
            if (!range->at(1).is_null()) size.most = range->at(1).integer();
        }
        const bool fits = size.number >= 0 && size.number < size_count_ && size.input >= 0 && size.input < static_cast<int64_t>(inputs_.size());
        if (!fits || (size.from != Size::From::Value && (size.dimension < 0 || size.dimension >= inputs_[static_cast<size_t>(size.input)].rank)))
            throw std::runtime_error("a size is not that of an input");
        sizes_.push_back(std::move(size));
    }
}

void Entry::read_operators(const Json& program, const Json& variant, const Archive& archive) {
    Text missing;
    for (const Json& each : program.at("operators").items()) {
        Call call;
        call.name = each.at(size_t{0}).text();
        call.overload = each.at(1).text();
        for (const Json& described : variant.at("operators").items())
            if (const Json* library = described.find("library"); library != nullptr && described.at("name").text() == call.name)
                call.kernel = load_kernel(LibraryFile(archive.read(library->text())).path()).kernel;
        const bool is_own = call.name.rfind("opkit::", 0) == 0;
        const bool hosted = !call.kernel && host_ && host_->has(host_->context, call.name.c_str(), call.overload.c_str());
        if (!call.kernel && (is_own || !hosted)) call.own = find_operator(call.name, call.overload);
        if (!call.kernel && !call.own && !hosted) missing += (missing.empty() ? "" : ", ") + call.name + "." + call.overload;
        calls_.push_back(std::move(call));
    }
    if (!missing.empty())
        throw std::runtime_error("it calls operators that only torch has: " + missing +
                                 (host_ ? "" : ". Load it with opkit.load, or in C++ with opkit_torch.hpp"));
}

void Entry::read_functions(const Json& program, const Archive& archive) {
    for (const Json& each : program.at("functions").items()) {
        const Text& library = each.at(size_t{0}).text();
        const int64_t instance = each.at(2).integer();
        if (instance < 0) {
            void* opened = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
            void* found = opened ? dlsym(opened, each.at(1).text().c_str()) : nullptr;
            if (found == nullptr) throw std::runtime_error("the function " + each.at(1).text() + " of " + library + " cannot be called");
            functions_.push_back(found);
        } else {
            const LibraryFile file(archive.read(library));
            load_kernel(file.path());
            void* opened = dlopen(file.path().c_str(), RTLD_NOW | RTLD_LOCAL);
            void* (*entry)(int32_t) = nullptr;
            find(opened, "opk_entry", entry);
            functions_.push_back(entry(static_cast<int32_t>(instance)));
        }
    }
}

void Entry::load_program(const Archive& archive, const Text& folder) {
    const LibraryFile file(archive.read(folder + "/kernels.so"));
    library_ = dlopen(file.path().c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library_ == nullptr) throw std::runtime_error(Text("its kernels cannot be loaded: ") + dlerror());
    find(library_, "opkit_program_sizes", compute_sizes_);
    find(library_, "opkit_program_layouts", compute_layouts_);
    find(library_, "opkit_program_run", run_);
}

void Entry::load_binaries(const Json& program, const Archive& archive, const Text& folder) {
    const std::vector<Json>& described = program.at("kernels").items();
    if (described.empty()) return;
    const auto driver = std::make_shared<const launch::Driver>("libcuda.so.1", "cuda");
    for (size_t i = 0; i < described.size(); ++i) {
        const Bytes image = archive.read(folder + "/kernel" + std::to_string(i));
        launch::Properties properties;
        properties.threads = described[i].at(1).integer();
        properties.shared = described[i].at(2).integer();
        binaries_.push_back(std::make_unique<launch::Binary>(driver, Text(image.data, image.size), described[i].at(size_t{0}).text(), properties));
        binaries_.back()->function(device_.number());
    }
}

Entry::~Entry() {
    if (library_ != nullptr) dlclose(library_);
}

// ---- calls -----------------------------------------------------------------------------------------------------------

// What a program asks for, and the memory of its buffers.
struct Host : opk_host {
    const Entry& entry;
    std::vector<Memory> memory;
    std::vector<Tensor> outputs;
    Text failure;

    explicit Host(const Entry& of)
        : opk_host{}, entry(of), memory(static_cast<size_t>(of.buffers_)), outputs(static_cast<size_t>(of.outputs_)) {
        const Threads found = threads();
        segments = {found.parallel, found.number, found.count, {}, entry.functions_.data()};
        opk_host::device = entry.device_.number();
        opk_host::launch = [](opk_host* host, int64_t kernel, int64_t programs, void** parameters) {
            Host& self = of_host(host);
            return self.guarded([&] { self.start(*self.entry.binaries_.at(static_cast<size_t>(kernel)), programs, parameters); });
        };
        opk_host::allocate = [](opk_host* host, int64_t buffer, const opk_tensor* layout) -> void* {
            return of_host(host).guarded([&] { of_host(host).make(buffer, *layout); }) ? nullptr : of_host(host).at(buffer).get();
        };
        opk_host::release = [](opk_host* host, int64_t buffer) { of_host(host).at(buffer).reset(); };
        opk_host::call = [](opk_host* host, int64_t number, const opk_passed* arguments, int64_t count, opk_result* results, int64_t result_count) {
            Host& self = of_host(host);
            return self.guarded([&] { self.run(self.entry.calls_.at(static_cast<size_t>(number)), arguments, count, results, result_count); });
        };
        opk_host::give = [](opk_host* host, int64_t output, int64_t buffer, const opk_tensor* tensor) {
            of_host(host).guarded([&] { of_host(host).take(output, buffer, *tensor); });
        };
    }

    static Host& of_host(opk_host* host) { return *static_cast<Host*>(host); }
    Memory& at(int64_t buffer) { return memory.at(static_cast<size_t>(buffer)); }

    template <class F>
    int32_t guarded(const F& work) {
        try {
            work();
            return 0;
        } catch (const std::exception& error) {
            if (failure.empty()) failure = error.what();
            return 1;
        }
    }

    void make(int64_t buffer, const opk_tensor& layout) {
        at(buffer) = entry.device_.empty(layout).memory;
    }

    void start(const launch::Binary& binary, int64_t programs, void** parameters) {
        if (programs <= 0) return;
        const launch::Driver& driver = binary.driver();
        driver.enter(device);
        driver(driver.launch, binary.function(device), static_cast<uint32_t>(programs), 1u, 1u, static_cast<uint32_t>(binary.properties().threads), 1u,
               1u, static_cast<uint32_t>(binary.properties().shared), entry.device_.stream(), parameters, static_cast<void**>(nullptr));
    }

    void run(const Entry::Call& call, const opk_passed* arguments, int64_t count, opk_result* results, int64_t result_count) {
        if (call.kernel) return run_kernel(call, arguments, count, results);
        for (int64_t i = 0; i < result_count && call.own; ++i)
            if (results[i].buffer >= 0 && results[i].tensor.data == nullptr) {
                make(results[i].buffer, results[i].tensor);
                results[i].tensor.data = at(results[i].buffer).get();
            }
        if (call.own) return call.own(Arguments(arguments, count), results);
        char error[1024] = "";
        const opkit_operators& host = *entry.host_;
        const int32_t failed = host.call(host.context, call.name.c_str(), call.overload.c_str(), arguments, count, results, result_count, error, sizeof error);
        for (int64_t i = 0; i < result_count; ++i)
            if (results[i].owner != nullptr && results[i].buffer >= 0)
                at(results[i].buffer) = {results[i].owner, [&host](void* owner) { host.release(host.context, owner); }};
        if (failed) throw std::runtime_error(call.name + ": " + error);
    }

    // An operator's kernel, whose library is in the file.
    void run_kernel(const Entry::Call& call, const opk_passed* passed, int64_t count, opk_result* results);

    void take(int64_t output, int64_t buffer, const opk_tensor& tensor) {
        Tensor& to = outputs.at(static_cast<size_t>(output));
        if (buffer >= 0 && at(buffer) && at(buffer).use_count() == 1) {
            to = Tensor::view(tensor);
            to.memory = at(buffer);
        } else {
            to = entry.device_.empty(tensor);
            entry.device_.copy(tensor, to.described());
        }
    }
};

namespace {

// Values that a kernel takes, and what they point to.
struct KernelInputs {
    std::vector<opk_input> inputs;
    std::vector<std::unique_ptr<Tensor>> tensors;
    std::vector<std::vector<void*>> handles;
    std::vector<std::vector<int64_t>> ints;
    std::vector<std::vector<double>> floats;

    void* handle(const opk_tensor& tensor) {
        tensors.push_back(std::make_unique<Tensor>(Tensor::view(tensor)));
        return tensors.back().get();
    }

    void add(const opk_argument& argument, const opk_passed* passed) {
        opk_input input = {};
        input.present = passed != nullptr && passed->kind != OPK_PASSED_NONE;
        if (!input.present && !argument.optional) throw std::runtime_error(Text("the argument ") + argument.name + " is missing");
        if (input.present) {
            if (passed->kind == OPK_PASSED_TENSOR)
                input.as.tensor = handle(*passed->as.tensor);
            else if (passed->kind == OPK_PASSED_LIST)
                list(argument, *passed, input);
            else if (passed->kind == OPK_PASSED_TEXT)
                input.as.text = passed->as.text, input.count = static_cast<int64_t>(std::strlen(passed->as.text));
            else if (passed->kind == OPK_PASSED_FLOAT || argument.kind == OPK_KIND_FLOAT)
                input.as.f = passed->kind == OPK_PASSED_FLOAT ? passed->as.f : static_cast<double>(passed->as.i);
            else
                input.as.i = passed->as.i;
        }
        inputs.push_back(input);
    }

    void list(const opk_argument& argument, const opk_passed& passed, opk_input& input) {
        input.count = passed.count;
        if (argument.kind == OPK_KIND_TENSORS) {
            for (int32_t i = 0; i < passed.count; ++i) {
                if (i == 0) handles.emplace_back();
                handles.back().push_back(passed.as.items[i].kind == OPK_PASSED_TENSOR ? handle(*passed.as.items[i].as.tensor) : nullptr);
            }
            input.as.tensors = passed.count ? handles.back().data() : nullptr;
        } else if (argument.kind == OPK_KIND_FLOATS) {
            floats.emplace_back();
            for (int32_t i = 0; i < passed.count; ++i)
                floats.back().push_back(passed.as.items[i].kind == OPK_PASSED_FLOAT ? passed.as.items[i].as.f : static_cast<double>(passed.as.items[i].as.i));
            input.as.floats = floats.back().data();
        } else {
            ints.emplace_back();
            for (int32_t i = 0; i < passed.count; ++i) ints.back().push_back(passed.as.items[i].as.i);
            input.as.ints = ints.back().data();
        }
    }
};

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
    for (int32_t i = 0; i < kernel.argument_count; ++i) inputs.add(kernel.arguments[i], arguments.find(i, kernel.arguments[i].name));
    std::vector<void*> made(static_cast<size_t>(kernel.output_count));
    opk_message message;
    const std::vector<int64_t> layout = layout_of(kernel, results);
    const int32_t status = execute(&kernel, inputs.inputs.data(), layout.empty() ? nullptr : layout.data(), made.data(), &message);
    if (status == OPK_REFUSED) name_kernel(kernel, message);
    if (status != OPK_DONE) throw std::runtime_error(message.text);
    for (int32_t i = 0; i < kernel.output_count; ++i) {
        const std::unique_ptr<Tensor> tensor(static_cast<Tensor*>(made[static_cast<size_t>(i)]));
        if (!tensor || results[i].buffer < 0) continue;
        opk_result& result = results[i];
        const opk_tensor found = tensor->described();
        if (found.dtype != result.tensor.dtype || found.rank != result.tensor.rank || !std::equal(found.sizes, found.sizes + found.rank, result.tensor.sizes))
            throw std::runtime_error(call.name + " returned " + describe(found.dtype, found.sizes, found.rank) + ", and its fake implementation another");
        if (result.tensor.data == nullptr && same_layout(found, result.tensor.strides)) {
            at(result.buffer) = tensor->memory;
            result.tensor.data = found.data;
        } else {
            if (result.tensor.data == nullptr) {
                make(result.buffer, result.tensor);
                result.tensor.data = at(result.buffer).get();
            }
            copy(found, result.tensor);
        }
    }
}

std::vector<int64_t> Entry::bind(const std::vector<opk_tensor>& inputs) const {
    std::vector<int64_t> sizes(static_cast<size_t>(size_count_));
    for (const Size& size : sizes_) {
        const opk_tensor& from = inputs[static_cast<size_t>(size.input)];
        const auto d = static_cast<size_t>(size.dimension);
        const int64_t value = size.from == Size::From::Value ? *static_cast<const int64_t*>(from.data)
                              : size.from == Size::From::Size ? from.sizes[d] : from.strides[d];
        const Text& name = inputs_[static_cast<size_t>(size.input)].name;
        if (size.from == Size::From::Value && value < 0)
            throw std::invalid_argument(name + " is " + std::to_string(value) + ", and the model takes a size");
        if (size.from != Size::From::Stride && (value < size.least || value > size.most))
            throw std::invalid_argument(name + " has the size " + std::to_string(value) + ", and the model was exported for " + size.name +
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
                throw std::invalid_argument(inputs_[i].name + ", which the model writes to, has other strides than it was exported for" +
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
        throw std::invalid_argument("the model takes " + std::to_string(inputs()) + " tensors, and got " + std::to_string(given.size()));
    std::vector<opk_tensor> all;
    for (const Tensor& state : states_) all.push_back(state.described());
    all.insert(all.end(), given.begin(), given.end());
    for (size_t i = states_.size(); i < all.size(); ++i) {
        const Input& expected = inputs_[i];
        const bool is_size = expected.dtype < 0;
        if (all[i].device_index != (expected.is_on_gpu ? device_.number() : -1))
            throw std::invalid_argument(expected.name + " is on " + place(all[i].device_index) + ", and the model takes it on " +
                                        place(expected.is_on_gpu ? device_.number() : -1));
        if (all[i].dtype != (is_size ? OPK_INT64 : expected.dtype) || all[i].rank != (is_size ? 0 : expected.rank))
            throw std::invalid_argument(expected.name + " is " + describe(all[i].dtype, all[i].sizes, all[i].rank) + ", and the model takes " + expected.text);
    }
    const std::vector<int64_t> sizes = bind(all);
    std::vector<int64_t> layouts(static_cast<size_t>(layout_count_));
    compute_layouts_(sizes.data(), layouts.data());
    const std::vector<Tensor> copies = laid_out(all, layouts);

    Arena arena = take_arena(layouts[0], device_.stream());
    std::vector<void*> pointers;
    for (const opk_tensor& each : all) pointers.push_back(each.data);
    Host host(*this);
    const int64_t failed = run_(&host, sizes.data(), static_cast<char*>(arena.memory.get()), pointers.data(), constants_.data());
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        arenas_.push_back(std::move(arena));
    }
    if (failed || !host.failure.empty()) {
        Text why = host.failure;
        const auto& [code, first, second] = host.segments.error;
        if (why.empty() && code == 1) why = "index " + std::to_string(first) + " is out of range for a dimension of size " + std::to_string(second);
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

// ---- models ----------------------------------------------------------------------------------------------------------

Model::Model(const Text& path, bool verify, const opkit_operators* host)
    : archive_(path), host_(host ? *host : opkit_operators{}), has_host_(host != nullptr), device_(device()), weights_(archive_, verify, device_) {
    for (const auto& [name, convention] : archive_.manifest().at("entries").fields())
        entries_.push_back(std::make_unique<Entry>(name, convention, archive_, weights_, device_, has_host_ ? &host_ : nullptr));
}

Device Model::device() const {
#if defined(__x86_64__)
    constexpr const char* kMachine = "x86_64";
#else
    constexpr const char* kMachine = "aarch64";
#endif
    const Json& made = archive_.manifest().at("made_for");
    if (made.at("machine").text() != kMachine)
        throw std::runtime_error("it was made for " + made.at("machine").text() + ", and this machine is " + kMachine);
    if (made.at("device").text() == "cpu") return {};
    if (made.at("device").text() != "cuda" || host_.allocate == nullptr)
        throw std::runtime_error("it was made for " + made.at("device").text() + ", and this program runs models on the CPU");
    const launch::Driver driver("libcuda.so.1", "cuda");
    int32_t handle = 0, major = 0, minor = 0;
    driver(driver.initialize, 0u);
    driver(driver.find_device, &handle, host_.device);
    driver(driver.device_attribute, &major, 75, handle);
    driver(driver.device_attribute, &minor, 76, handle);
    const Text found = "sm_" + std::to_string(major) + std::to_string(minor);
    if (made.at("architecture").text() != found)
        throw std::runtime_error("it was made for " + made.at("architecture").text() + ", and the GPU is " + found);
    return Device(&host_);
}

std::string Model::description() const {
    const Bytes text = archive_.manifest_text();
    return {text.data, text.size};
}

const Entry& Model::entry(const char* name) const {
    Text known;
    for (const auto& each : entries_) {
        if (each->name() == name) return *each;
        known += (known.empty() ? "'" : ", '") + each->name() + "'";
    }
    throw std::invalid_argument(Text("the model has no entry '") + name + "': it has " + known);
}

}  // namespace opkit::model
