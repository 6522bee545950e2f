#include "operators.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "../product/product.hpp"
#include "tensor.hpp"
#include "threads.hpp"

namespace opkit::model {

const opk_passed* Arguments::find(int64_t position, const char* name) const {
    for (int64_t i = 0; i < count_; ++i) {
        const bool found = values_[i].name ? name && std::strcmp(values_[i].name, name) == 0 : i == position;
        if (found) return values_[i].kind == OPK_PASSED_NONE ? nullptr : &values_[i];
    }
    return nullptr;
}

const opk_tensor* Arguments::tensor(int64_t position, const char* name) const {
    const opk_passed* found = find(position, name);
    return found && found->kind == OPK_PASSED_TENSOR ? found->as.tensor : nullptr;
}

int64_t Arguments::integer(int64_t position, int64_t otherwise, const char* name) const {
    const opk_passed* found = find(position, name);
    return found ? found->as.i : otherwise;
}

double Arguments::number(int64_t position, double otherwise, const char* name) const {
    const opk_passed* found = find(position, name);
    return !found ? otherwise : found->kind == OPK_PASSED_FLOAT ? found->as.f : static_cast<double>(found->as.i);
}

const char* Arguments::text(int64_t position, const char* otherwise, const char* name) const {
    const opk_passed* found = find(position, name);
    return found ? found->as.text : otherwise;
}

std::vector<int64_t> Arguments::integers(int64_t position) const {
    std::vector<int64_t> found;
    if (const opk_passed* list = find(position))
        for (int32_t i = 0; i < list->count; ++i) found.push_back(list->as.items[i].as.i);
    return found;
}

void Arguments::integers(int64_t position, int64_t* found, int64_t count) const {
    const opk_passed* list = find(position);
    if (!list || list->kind != OPK_PASSED_LIST || (list->count != 1 && list->count != count))
        throw std::runtime_error("an argument is no list of " + std::to_string(count) + " integers");
    for (int64_t i = 0; i < count; ++i) found[i] = list->as.items[list->count == 1 ? 0 : i].as.i;
}

namespace {

const opk_tensor& required(const Arguments& arguments, int64_t position) {
    const opk_tensor* found = arguments.tensor(position);
    if (found == nullptr) throw std::runtime_error("a tensor is missing");
    return *found;
}

float* floats(const opk_tensor& tensor) {
    if (tensor.dtype != OPK_FLOAT32)
        throw std::runtime_error("this library multiplies float32, and got " +
                                 describe(tensor.dtype, tensor.sizes, tensor.rank));
    return static_cast<float*>(tensor.data);
}

const float* optional_floats(const Arguments& arguments, int64_t position) {
    const opk_tensor* found = arguments.tensor(position);
    return found ? floats(*found) : nullptr;
}

// A tensor with these strides: itself, or a copy.
class LaidOut {
public:
    LaidOut(const opk_tensor& tensor, const std::vector<int64_t>& strides)
        : tensor_(tensor), copied_(!same_layout(tensor, strides.data())) {
        if (!copied_) return;
        opk_tensor layout = tensor;
        layout.strides = strides.data();
        held_ = Tensor::empty(layout);
    }
    float* read() {
        if (copied_) copy(tensor_, held_.described());
        return write();
    }
    float* write() { return floats(copied_ ? held_.described() : tensor_); }
    void copy_back() const {
        if (copied_) copy(held_.described(), tensor_);
    }

private:
    const opk_tensor& tensor_;
    bool copied_;
    Tensor held_;
};

std::vector<int64_t> row_major_strides(const opk_tensor& tensor) {
    std::vector<int64_t> found(static_cast<size_t>(tensor.rank), 1);
    for (int64_t d = tensor.rank - 1; d-- > 0;)
        found[static_cast<size_t>(d)] = found[static_cast<size_t>(d) + 1] * tensor.sizes[d + 1];
    return found;
}

// Of images (batch, channels, height, width) whose channels lie next to each other.
std::vector<int64_t> channels_last_strides(const opk_tensor& tensor) {
    const int64_t c = tensor.sizes[1], h = tensor.sizes[2], w = tensor.sizes[3];
    return {c * h * w, 1, w * c, c};
}

product::Parallel parallel() {
    return {[](void*, int64_t n, int64_t grain, void (*body)(int64_t, int64_t, void*), void* context) {
                for_range(0, n, grain, body, context);
            },
            static_cast<int32_t>(threads().count), nullptr};
}

product::Activation activation_of(const char* name) {
    if (std::strcmp(name, "none") == 0) return product::kNone;
    if (std::strcmp(name, "relu") == 0) return product::kRelu;
    throw std::runtime_error(std::string("there is no activation ") + name);
}

// ---- products --------------------------------------------------------------------------------------------------------

// y = added + a b, of matrices, or of batches of them.
template <int ADDED>
void matmul(const Arguments& arguments, const opk_result* results) {
    const opk_tensor *added = ADDED ? &required(arguments, 0) : nullptr, &a = required(arguments, ADDED),
                     &b = required(arguments, ADDED + 1);
    if (arguments.number(ADDED + 2, 1, "beta") != 1 || arguments.number(ADDED + 3, 1, "alpha") != 1)
        throw std::runtime_error("a product is scaled");
    const int64_t d = a.rank - 2, batch = d ? a.sizes[0] : 1;
    const auto outer = [d](const opk_tensor& tensor) { return d ? tensor.strides[0] : 0; };
    LaidOut y(results[0].tensor, row_major_strides(results[0].tensor));
    const int64_t rows = a.sizes[d], columns = b.sizes[d + 1];
    product::Matmul call{floats(a),
                         outer(a),
                         a.strides[d],
                         a.strides[d + 1],
                         floats(b),
                         outer(b),
                         b.strides[d],
                         b.strides[d + 1],
                         nullptr,
                         nullptr,
                         0,
                         0,
                         y.write(),
                         rows * columns,
                         columns,
                         batch,
                         rows,
                         columns,
                         a.sizes[d + 1]};
    if (added) {  // it is expanded to the result's sizes
        const bool dense = columns <= 1 || added->strides[d + 1] == 1;
        if (dense && added->strides[d] == 0 && outer(*added) == 0) {
            call.bias = floats(*added);
        } else {
            LaidOut addend(*added, row_major_strides(*added));
            call.addend = addend.read();
            call.addend_batch = rows * columns;
            call.addend_pitch = columns;
            product::matmul(call, parallel());
            return y.copy_back();
        }
    }
    product::matmul(call, parallel());
    y.copy_back();
}

// x, packed, columns, bias, activation
void linear(const Arguments& arguments, const opk_result* results) {
    const opk_tensor& given = required(arguments, 0);
    LaidOut x(given, row_major_strides(given)), y(results[0].tensor, row_major_strides(results[0].tensor));
    const int64_t depth = given.sizes[given.rank - 1], columns = arguments.integer(2, 0);
    int64_t rows = 1;
    for (int64_t d = 0; d < given.rank - 1; ++d) rows *= given.sizes[d];
    product::linear({x.read(), depth, floats(required(arguments, 1)), optional_floats(arguments, 3), nullptr, 0, y.write(),
                     columns, rows, columns, depth, activation_of(arguments.text(4, "none"))},
                    parallel());
    y.copy_back();
}

product::Convolution described(const Arguments& arguments, int64_t first, const opk_tensor& x, const opk_tensor& y) {
    product::Convolution call{};
    call.batch = x.sizes[0];
    call.in_channels = x.sizes[1];
    call.height = x.sizes[2];
    call.width = x.sizes[3];
    call.out_channels = y.sizes[1];
    call.out_height = y.sizes[2];
    call.out_width = y.sizes[3];
    arguments.integers(first, call.stride, 2);
    arguments.integers(first + 1, call.padding, 2);
    arguments.integers(first + 2, call.dilation, 2);
    call.channels_last = true;
    return call;
}

// x, packed, bias, addend, kernel, stride, padding, dilation, groups, out_channels, tile, activation
void packed_convolution(const Arguments& arguments, const opk_result* results) {
    const opk_tensor &given = required(arguments, 0), &result = results[0].tensor, *added = arguments.tensor(3);
    LaidOut x(given, channels_last_strides(given)), y(result, channels_last_strides(result));
    LaidOut addend(added ? *added : result, channels_last_strides(result));
    product::Convolution call = described(arguments, 5, given, result);
    arguments.integers(4, call.kernel, 2);
    call.groups = arguments.integer(8, 1);
    call.tile = arguments.integer(10, 0);
    call.activation = activation_of(arguments.text(11, "none"));
    call.x = x.read();
    call.y = y.write();
    call.packed = floats(required(arguments, 1));
    call.bias = optional_floats(arguments, 2);
    call.addend = added ? addend.read() : nullptr;
    product::convolution(call, parallel());
    y.copy_back();
}

// input, weight, bias, stride, padding, dilation, transposed, output_padding, groups: the weight is packed at each call
void convolution(const Arguments& arguments, const opk_result* results) {
    const opk_tensor &given = required(arguments, 0), &weight = required(arguments, 1), &result = results[0].tensor;
    if (given.rank != 4 || arguments.integer(6, 0))
        throw std::runtime_error("convolutions that are transposed, or not of images, need torch");
    LaidOut x(given, channels_last_strides(given)), y(result, channels_last_strides(result)),
        w(weight, row_major_strides(weight));
    product::Convolution call = described(arguments, 3, given, result);
    call.kernel[0] = weight.sizes[2];
    call.kernel[1] = weight.sizes[3];
    call.groups = arguments.integer(8, 1);
    const int64_t inner = weight.sizes[1];
    const Memory packed = allocate(
        4 * product::packed_convolution_floats(call.out_channels, inner, call.kernel[0], call.kernel[1], call.groups));
    product::pack_convolution(w.read(), call.out_channels, inner, call.kernel[0], call.kernel[1], call.groups,
                              static_cast<float*>(packed.get()));
    call.x = x.read();
    call.y = y.write();
    call.packed = static_cast<float*>(packed.get());
    call.bias = optional_floats(arguments, 2);
    product::convolution(call, parallel());
    y.copy_back();
}

struct Row {
    const char *name, *overload;
    Operator function;
};

constexpr Row kOperators[] = {
    {"aten::mm", "default", matmul<0>},
    {"aten::mm", "out", matmul<0>},
    {"aten::bmm", "default", matmul<0>},
    {"aten::bmm", "out", matmul<0>},
    {"aten::addmm", "default", matmul<1>},
    {"aten::addmm", "out", matmul<1>},
    {"aten::baddbmm", "default", matmul<1>},
    {"aten::baddbmm", "out", matmul<1>},
    {"aten::convolution", "default", convolution},
    {"opkit::packed_linear", "default", linear},
    {"opkit::packed_linear", "out", linear},
    {"opkit::packed_convolution", "default", packed_convolution},
    {"opkit::packed_convolution", "out", packed_convolution},
    {"aten::_scaled_dot_product_flash_attention_for_cpu", "default", torch_attention},
    {"opkit::attention", "default", opkit_attention},
};

}  // namespace

Operator find_operator(const std::string& name, const std::string& overload) {
    for (const Row& row : kOperators)
        if (name == row.name && overload == row.overload) return row.function;
    return nullptr;
}

}  // namespace opkit::model
