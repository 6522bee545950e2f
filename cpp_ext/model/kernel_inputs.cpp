#include "kernel_inputs.hpp"

#include <cstring>
#include <stdexcept>
#include <string>

namespace opkit::model {
namespace {

[[noreturn]] void refuse(const opk_argument& argument, const char* reason) {
    throw std::invalid_argument(std::string("the argument ") + argument.name + reason);
}

void expect(bool right, const opk_argument& argument) {
    if (!right) refuse(argument, " is of another kind");
}

bool is_number(const opk_passed& value) {
    return value.kind == OPK_PASSED_INT || value.kind == OPK_PASSED_BOOL || value.kind == OPK_PASSED_DTYPE;
}

double real(const opk_argument& argument, const opk_passed& value) {
    expect(value.kind == OPK_PASSED_FLOAT || value.kind == OPK_PASSED_INT, argument);
    return value.kind == OPK_PASSED_FLOAT ? value.as.f : static_cast<double>(value.as.i);
}

int64_t integer(const opk_argument& argument, const opk_passed& value) {
    expect(is_number(value), argument);
    return value.as.i;
}

}  // namespace

void* KernelInputs::handle(const opk_tensor& tensor) { return &tensors_.emplace_back(Tensor::view(tensor)); }

void KernelInputs::add(const opk_argument& argument, const opk_passed* passed) {
    opk_input input = {};
    input.present = passed != nullptr && passed->kind != OPK_PASSED_NONE;
    if (!input.present && !argument.optional) refuse(argument, " must not be None");
    if (input.present) switch (argument.kind) {
            case OPK_KIND_TENSOR:
                expect(passed->kind == OPK_PASSED_TENSOR, argument);
                input.as.tensor = handle(*passed->as.tensor);
                break;
            case OPK_KIND_FLOAT: input.as.f = real(argument, *passed); break;
            case OPK_KIND_STRING:
                expect(passed->kind == OPK_PASSED_TEXT, argument);
                input.as.text = passed->as.text;
                input.count = static_cast<int64_t>(std::strlen(passed->as.text));
                break;
            case OPK_KIND_TENSORS:
            case OPK_KIND_INTS:
            case OPK_KIND_FLOATS:
            case OPK_KIND_BOOLS:
                expect(passed->kind == OPK_PASSED_LIST, argument);
                add_list(argument, *passed, input);
                break;
            case OPK_KIND_IGNORED: break;
            default: input.as.i = integer(argument, *passed);
        }
    inputs_.push_back(input);
}

void KernelInputs::add_list(const opk_argument& argument, const opk_passed& passed, opk_input& input) {
    input.count = passed.count;
    const opk_passed *first = passed.as.items, *last = first + passed.count;
    const auto fill = [&](auto& lists, const auto& convert) {
        auto& list = lists.emplace_back();
        for (const opk_passed* item = first; item < last; ++item) list.push_back(convert(*item));
        return list.data();
    };
    if (argument.kind == OPK_KIND_TENSORS)
        input.as.tensors = fill(handles_, [&](const opk_passed& item) -> void* {
            expect(item.kind == OPK_PASSED_TENSOR || item.kind == OPK_PASSED_NONE, argument);
            return item.kind == OPK_PASSED_TENSOR ? handle(*item.as.tensor) : nullptr;
        });
    else if (argument.kind == OPK_KIND_FLOATS)
        input.as.floats = fill(floats_, [&](const opk_passed& item) { return real(argument, item); });
    else if (argument.kind == OPK_KIND_BOOLS)
        input.as.bools = fill(bools_, [&](const opk_passed& item) { return uint8_t{integer(argument, item) != 0}; });
    else
        input.as.ints = fill(ints_, [&](const opk_passed& item) { return integer(argument, item); });
}

}  // namespace opkit::model
