#include "kernel.hpp"

#include <cstring>
#include <stdexcept>

namespace opkit::launch {
namespace {

void require(const Description& description, bool holds, const std::string& message) {
    if (!holds) throw std::invalid_argument(description.operator_name + ", kernel " + description.kernel_name + ": " + message);
}

// Everything that an opk_kernel points to.
class Described {
public:
    Described(Description description, std::shared_ptr<Launcher> launcher);
    const opk_kernel& kernel() const { return kernel_; }

private:
    void check_numbers(const SourceDescription& source) const;
    void add_arguments();
    void add_sources();
    void add_lengths();
    void add_parameter(const char* name, const SourceDescription& source);
    const std::string& name_of(const SourceDescription& source) const;
    bool new_output(const SourceDescription& source) const;
    void complete(const SourceDescription& source, Source& target) const;
    void finish();

    Description description_;
    std::shared_ptr<Launcher> launcher_;
    std::vector<opk_argument> arguments_;
    std::vector<std::vector<int32_t>> dims_;
    std::vector<opk_shape> shapes_;
    std::vector<opk_output> outputs_;
    std::vector<const char*> size_names_;
    std::vector<opk_parameter> parameters_;
    opk_instance instance_{nullptr, Launcher::trampoline};
    opk_state state_{};
    opk_kernel kernel_{};
};

opk_value integer(int64_t number) {
    opk_value value;
    value.i = number;
    return value;
}

bool of_tensor(int32_t source) { return source == OPK_FROM_TENSOR || source == OPK_FROM_PACKED_TENSOR; }

bool of_argument(int32_t source) {
    return source != OPK_FROM_NAMED_SIZE && source != OPK_FROM_STREAM && source != OPK_FROM_INT_CONSTANT &&
           source != OPK_FROM_FLOAT_CONSTANT;
}

// Of an argument or an output; else of an argument alone.
bool of_outputs(int32_t source) {
    return of_tensor(source) || source == OPK_FROM_DATA || (source >= OPK_FROM_NUMEL && source <= OPK_FROM_STRIDE);
}

Described::Described(Description description, std::shared_ptr<Launcher> launcher)
    : description_(std::move(description)), launcher_(std::move(launcher)) {
    require(description_, launcher_->sources.size() == description_.sources.size(),
            "it has " + std::to_string(description_.sources.size()) + " sources, and the launcher " +
                std::to_string(launcher_->sources.size()) + " roles");
    require(description_, launcher_->value_count == 0, "its launcher is that of another kernel already");
    require(description_, launcher_->cuda() == description_.cuda, "its launcher is for another device");
    for (const SourceDescription& source : description_.sources) check_numbers(source);
    add_arguments();
    opk_value itself;
    itself.p = launcher_.get();
    add_parameter("launcher", {OPK_FROM_INT_CONSTANT, -1, 0, OPK_ANY_DTYPE, itself});
    add_sources();
    add_lengths();
    if (description_.cuda) add_parameter("stream", {OPK_FROM_STREAM, -1, 0, OPK_ANY_DTYPE, integer(0)});
    finish();
}

void Described::check_numbers(const SourceDescription& source) const {
    const auto below = [](int32_t number, size_t count) { return number >= 0 && static_cast<size_t>(number) < count; };
    if (source.source == OPK_FROM_NAMED_SIZE)
        require(description_, below(source.detail, description_.size_names.size()), "a source asks for a size that has no name");
    else if (of_argument(source.source))
        require(
            description_,
            below(source.argument, description_.arguments.size() + (of_outputs(source.source) ? description_.outputs.size() : 0)),
            "a source asks for the argument " + std::to_string(source.argument) + ", which is not there");
}

void Described::add_arguments() {
    dims_.reserve(description_.arguments.size());
    shapes_.reserve(description_.arguments.size());
    for (const ArgumentDescription& each : description_.arguments) {
        const opk_shape* shape = nullptr;
        if (each.shape) {
            std::vector<int32_t>& dims = dims_.emplace_back(each.shape->before);
            dims.insert(dims.end(), each.shape->after.begin(), each.shape->after.end());
            shape =
                &shapes_.emplace_back(opk_shape{static_cast<int32_t>(each.shape->before.size()), each.shape->variadic,
                                                static_cast<int32_t>(each.shape->after.size()), dims.data()});
        }
        arguments_.push_back({each.name.c_str(), each.kind, each.optional, each.written, shape});
    }
    for (const OutputDescription& each : description_.outputs) outputs_.push_back({each.name.c_str(), each.alias});
    for (const std::string& name : description_.size_names) size_names_.push_back(name.c_str());
}

void Described::add_parameter(const char* name, const SourceDescription& source) {
    parameters_.push_back({name, source.source, source.argument, source.detail, source.dtype, source.constant});
}

void Described::add_sources() {
    for (size_t i = 0; i < description_.sources.size(); i++) {
        const SourceDescription& source = description_.sources[i];
        complete(source, launcher_->sources[i]);
        add_parameter(name_of(source).c_str(), source);
    }
}

// The length of each list, which its pointer does not say.
void Described::add_lengths() {
    launcher_->value_count = description_.sources.size();
    for (size_t i = 0; i < description_.sources.size(); i++) {
        if (launcher_->sources[i].role != Role::kInts) continue;
        launcher_->sources[i].length = launcher_->value_count++;
        SourceDescription length = description_.sources[i];
        length.source = OPK_FROM_LENGTH;
        add_parameter(name_of(length).c_str(), length);
    }
}

const std::string& Described::name_of(const SourceDescription& source) const {
    static const std::string constant = "a constant";
    if (source.source == OPK_FROM_NAMED_SIZE) return description_.size_names[static_cast<size_t>(source.detail)];
    if (!of_argument(source.source)) return constant;
    const size_t number = static_cast<size_t>(source.argument), count = description_.arguments.size();
    return number < count ? description_.arguments[number].name : description_.outputs[number - count].name;
}

bool Described::new_output(const SourceDescription& source) const {
    const int64_t output = source.argument - static_cast<int64_t>(description_.arguments.size());
    return output >= 0 && description_.outputs[static_cast<size_t>(output)].alias < 0;
}

// Fill in what the launcher has to know of a source in addition to its role.
void Described::complete(const SourceDescription& source, Source& target) const {
    target.name = name_of(source);
    require(description_, target.tensor() == of_tensor(source.source),
            target.name + (target.tensor() ? " has a tensor's role and is none" : " is a tensor and has another's role"));
    target.output = target.tensor() && new_output(source);
    const size_t number = static_cast<size_t>(source.argument);
    const bool scalar = source.source == OPK_FROM_SCALAR || source.source == OPK_FROM_SCALAR_POINTER;
    if (scalar) target.kind = description_.arguments[number].kind;
    if (source.source == OPK_FROM_SCALAR_POINTER) target.pointer = target.kind;
    if (source.source == OPK_FROM_FLOAT_CONSTANT) target.kind = OPK_KIND_FLOAT;
    const bool list = source.source == OPK_FROM_VALUES && description_.arguments[number].kind == OPK_KIND_INTS;
    require(description_,
            (target.role == Role::kInts) == (source.source == OPK_FROM_VALUES) && (list || target.role != Role::kInts),
            target.name + ": the role \"ints\" is for lists of ints");
    require(description_, (target.role == Role::kText) == (source.source == OPK_FROM_STRING),
            target.name + ": the role \"text\" is for strings");
}

void Described::finish() {
    kernel_.version = OPK_ABI_VERSION;
    kernel_.operator_name = description_.operator_name.c_str();
    kernel_.kernel_name = description_.kernel_name.c_str();
    kernel_.schema = description_.schema.c_str();
    kernel_.cuda = description_.cuda;
    kernel_.argument_count = static_cast<int32_t>(arguments_.size());
    kernel_.output_count = static_cast<int32_t>(outputs_.size());
    kernel_.parameter_count = static_cast<int32_t>(parameters_.size());
    kernel_.size_count = static_cast<int32_t>(size_names_.size());
    kernel_.instance_count = 1;
    kernel_.arguments = arguments_.data();
    kernel_.outputs = outputs_.data();
    kernel_.parameters = parameters_.data();
    kernel_.size_names = size_names_.data();
    kernel_.instances = &instance_;
    kernel_.state = &state_;
}

}  // namespace

KernelLibrary launch_kernel(Description description, std::shared_ptr<Launcher> launcher) {
    auto described = std::make_unique<Described>(std::move(description), std::move(launcher));
    KernelLibrary library = lend_functions(described->kernel());
    (void)described.release();
    return library;
}

}  // namespace opkit::launch
