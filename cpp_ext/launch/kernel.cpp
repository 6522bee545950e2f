#include "kernel.hpp"

#include <cstring>
#include <stdexcept>

namespace opkit::launch {
namespace {

void require(const Description& given, bool holds, const std::string& message) {
    if (!holds) throw std::invalid_argument(given.operator_name + ", kernel " + given.kernel_name + ": " + message);
}

// Everything that an opk_kernel points to.
class Described {
public:
    Described(Description given, std::shared_ptr<Launcher> launcher);
    const opk_kernel& kernel() const { return kernel_; }

private:
    void check_numbers(const GivenSource& source) const;
    void add_arguments();
    void add_sources();
    void add_lengths();
    void add_parameter(const char* name, const GivenSource& source);
    const std::string& name_of(const GivenSource& source) const;
    bool new_output(const GivenSource& source) const;
    void tell(const GivenSource& source, Source& told) const;
    void finish();

    Description given_;
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

Described::Described(Description given, std::shared_ptr<Launcher> launcher)
    : given_(std::move(given)), launcher_(std::move(launcher)) {
    require(given_, launcher_->sources.size() == given_.sources.size(),
            "it has " + std::to_string(given_.sources.size()) + " sources, and the launcher " +
                std::to_string(launcher_->sources.size()) + " roles");
    require(given_, launcher_->value_count == 0, "its launcher is that of another kernel already");
    require(given_, launcher_->cuda() == given_.cuda, "its launcher is for another device");
    for (const GivenSource& source : given_.sources) check_numbers(source);
    add_arguments();
    opk_value itself;
    itself.p = launcher_.get();
    add_parameter("launcher", {OPK_FROM_INT_CONSTANT, -1, 0, OPK_ANY_DTYPE, itself});
    add_sources();
    add_lengths();
    if (given_.cuda) add_parameter("stream", {OPK_FROM_STREAM, -1, 0, OPK_ANY_DTYPE, integer(0)});
    finish();
}

void Described::check_numbers(const GivenSource& source) const {
    const auto below = [](int32_t number, size_t count) { return number >= 0 && static_cast<size_t>(number) < count; };
    if (source.source == OPK_FROM_NAMED_SIZE)
        require(given_, below(source.detail, given_.size_names.size()), "a source asks for a size that has no name");
    else if (of_argument(source.source))
        require(
            given_,
            below(source.argument, given_.arguments.size() + (of_outputs(source.source) ? given_.outputs.size() : 0)),
            "a source asks for the argument " + std::to_string(source.argument) + ", which is not there");
}

void Described::add_arguments() {
    dims_.reserve(given_.arguments.size());
    shapes_.reserve(given_.arguments.size());
    for (const GivenArgument& each : given_.arguments) {
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
    for (const GivenOutput& each : given_.outputs) outputs_.push_back({each.name.c_str(), each.alias});
    for (const std::string& name : given_.size_names) size_names_.push_back(name.c_str());
}

void Described::add_parameter(const char* name, const GivenSource& source) {
    parameters_.push_back({name, source.source, source.argument, source.detail, source.dtype, source.constant});
}

void Described::add_sources() {
    for (size_t i = 0; i < given_.sources.size(); i++) {
        const GivenSource& source = given_.sources[i];
        tell(source, launcher_->sources[i]);
        add_parameter(name_of(source).c_str(), source);
    }
}

// The length of each list, which its pointer does not tell.
void Described::add_lengths() {
    launcher_->value_count = given_.sources.size();
    for (size_t i = 0; i < given_.sources.size(); i++) {
        if (launcher_->sources[i].role != Role::kInts) continue;
        launcher_->sources[i].length = launcher_->value_count++;
        GivenSource length = given_.sources[i];
        length.source = OPK_FROM_LENGTH;
        add_parameter(name_of(length).c_str(), length);
    }
}

const std::string& Described::name_of(const GivenSource& source) const {
    static const std::string constant = "a constant";
    if (source.source == OPK_FROM_NAMED_SIZE) return given_.size_names[static_cast<size_t>(source.detail)];
    if (!of_argument(source.source)) return constant;
    const size_t number = static_cast<size_t>(source.argument), count = given_.arguments.size();
    return number < count ? given_.arguments[number].name : given_.outputs[number - count].name;
}

bool Described::new_output(const GivenSource& source) const {
    const int64_t output = source.argument - static_cast<int64_t>(given_.arguments.size());
    return output >= 0 && given_.outputs[static_cast<size_t>(output)].alias < 0;
}

// What the launcher has to know of a source beside its role.
void Described::tell(const GivenSource& source, Source& told) const {
    told.name = name_of(source);
    require(given_, told.tensor() == of_tensor(source.source),
            told.name + (told.tensor() ? " has a tensor's role and is none" : " is a tensor and has another's role"));
    told.output = told.tensor() && new_output(source);
    const size_t number = static_cast<size_t>(source.argument);
    const bool scalar = source.source == OPK_FROM_SCALAR || source.source == OPK_FROM_SCALAR_POINTER;
    if (scalar) told.kind = given_.arguments[number].kind;
    if (source.source == OPK_FROM_SCALAR_POINTER) told.pointer = told.kind;
    if (source.source == OPK_FROM_FLOAT_CONSTANT) told.kind = OPK_KIND_FLOAT;
    const bool list = source.source == OPK_FROM_VALUES && given_.arguments[number].kind == OPK_KIND_INTS;
    require(given_,
            (told.role == Role::kInts) == (source.source == OPK_FROM_VALUES) && (list || told.role != Role::kInts),
            told.name + ": the role \"ints\" is for lists of ints");
    require(given_, (told.role == Role::kText) == (source.source == OPK_FROM_STRING),
            told.name + ": the role \"text\" is for strings");
}

void Described::finish() {
    kernel_.version = OPK_ABI_VERSION;
    kernel_.operator_name = given_.operator_name.c_str();
    kernel_.kernel_name = given_.kernel_name.c_str();
    kernel_.schema = given_.schema.c_str();
    kernel_.cuda = given_.cuda;
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
