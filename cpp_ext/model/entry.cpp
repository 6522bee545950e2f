#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <set>
#include <sstream>
#include <stdexcept>

#include "../cpu_features.hpp"
#include "model.hpp"

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
                throw std::runtime_error("its kernels cannot be written to " + path_ +
                                         ". The variable TMPDIR names another folder");
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
    for (const auto& [graph, described] : variant.at("graphs").fields())
        graphs_.emplace(graph, std::make_unique<Entry>(graph, described, archive, weights, device, host));
    for (const Json& graph : program.at("graphs").items())
        if (!graphs_.count(graph.text())) throw std::runtime_error("it lacks a graph that it calls, " + graph.text());
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
        Size size{bound.at(size_t{0}).integer(),
                  bound.at(2).integer(),
                  bound.at(4).integer(),
                  bound.at(1).text(),
                  from == "size"     ? Size::From::Size
                  : from == "stride" ? Size::From::Stride
                                     : Size::From::Value,
                  INT64_MIN,
                  INT64_MAX};
        if (const Json* range = convention.at("ranges").find(size.name)) {
            if (!range->at(size_t{0}).is_null()) size.least = range->at(size_t{0}).integer();
            if (!range->at(1).is_null()) size.most = range->at(1).integer();
        }
        const bool fits = size.number >= 0 && size.number < size_count_ && size.input >= 0 &&
                          size.input < static_cast<int64_t>(inputs_.size());
        if (!fits || (size.from != Size::From::Value &&
                      (size.dimension < 0 || size.dimension >= inputs_[static_cast<size_t>(size.input)].rank)))
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
        call.flow = find_flow(call.name);
        for (const Json& described : variant.at("operators").items())
            if (const Json* library = described.find("library");
                library != nullptr && described.at("name").text() == call.name)
                call.kernel = load_kernel(LibraryFile(archive.read(library->text())).path()).kernel;
        const bool is_own = call.name.rfind("opkit::", 0) == 0;
        const bool hosted = !call.kernel && !call.flow && host_ && host_->has(host_->context, call.name.c_str(), call.overload.c_str());
        if (!call.kernel && (is_own || !hosted)) call.own = find_operator(call.name, call.overload);
        if (!call.kernel && !call.own && !call.flow && !hosted) missing += (missing.empty() ? "" : ", ") + call.name + "." + call.overload;
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
            if (found == nullptr)
                throw std::runtime_error("the function " + each.at(1).text() + " of " + library + " cannot be called");
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
    const auto* count = static_cast<const int64_t*>(dlsym(library_, "opkit_attention_function_count"));
    const void* functions = dlsym(library_, "opkit_attention_functions");
    if (count && functions) attention_functions_ = {static_cast<const SavedFunction*>(functions), *count};
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
        binaries_.push_back(std::make_unique<launch::Binary>(driver, Text(image.data, image.size),
                                                             described[i].at(size_t{0}).text(), properties));
        binaries_.back()->function(device_.number());
    }
}

Entry::~Entry() {
    if (library_ != nullptr) dlclose(library_);
}

// ---- models ----------------------------------------------------------------------------------------------------------

Model::Model(const Text& path, bool verify, const opkit_operators* host)
    : archive_(path),
      host_(host ? *host : opkit_operators{}),
      has_host_(host != nullptr),
      device_(device()),
      weights_(archive_, verify, device_) {
    for (const auto& [name, convention] : archive_.manifest().at("entries").fields())
        entries_.push_back(
            std::make_unique<Entry>(name, convention, archive_, weights_, device_, has_host_ ? &host_ : nullptr));
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
        throw std::runtime_error("it was made for " + made.at("device").text() +
                                 ", and this program runs models on the CPU");
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
