#include "operators.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <vector>

#include "../attention/forward_call.hpp"
#include "../isa/dispatch.hpp"
#include "../runtime/failure.hpp"
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

const float* floats(const opk_tensor& tensor) {
    if (tensor.dtype != OPK_FLOAT32) throw std::runtime_error("this library multiplies float32, and got " + describe(tensor.dtype, tensor.sizes, tensor.rank));
    return static_cast<const float*>(tensor.data);
}

// ---- products --------------------------------------------------------------------------------------------------------

void multiply(const float* a, int64_t a_row, int64_t a_depth, const float* b, int64_t b_depth, int64_t b_column, float* y, int64_t y_row,
              int64_t y_column, int64_t rows, int64_t columns, int64_t depth, const float* added, int64_t added_row, int64_t added_column) {
    for (int64_t i = 0; i < rows; ++i)
        for (int64_t j = 0; j < columns; ++j) {
            float sum = added ? added[i * added_row + j * added_column] : 0;
            for (int64_t k = 0; k < depth; ++k) sum += a[i * a_row + k * a_depth] * b[k * b_depth + j * b_column];
            y[i * y_row + j * y_column] = sum;
        }
}

// y = added + a b, of matrices, or of batches of them.
template <int ADDED>
void product(const Arguments& arguments, const opk_result* results) {
    const opk_tensor *added = ADDED ? &required(arguments, 0) : nullptr, &a = required(arguments, ADDED), &b = required(arguments, ADDED + 1);
    const opk_tensor& y = results[0].tensor;
    if (arguments.number(ADDED + 2, 1, "beta") != 1 || arguments.number(ADDED + 3, 1, "alpha") != 1) throw std::runtime_error("a product is scaled");
    const int64_t batch = a.rank == 3 ? a.sizes[0] : 1, d = a.rank - 2;
    for (int64_t n = 0; n < batch; ++n) {
        const auto at = [&](const opk_tensor& tensor) { return const_cast<float*>(floats(tensor)) + (d ? n * tensor.strides[0] : 0); };
        multiply(at(a), a.strides[d], a.strides[d + 1], at(b), b.strides[d], b.strides[d + 1], at(y), y.strides[d], y.strides[d + 1], a.sizes[d],
                 b.sizes[d + 1], a.sizes[d + 1], added ? at(*added) : nullptr, added ? added->strides[d] : 0, added ? added->strides[d + 1] : 0);
    }
}

// ---- attention -------------------------------------------------------------------------------------------------------

attention::Operand operand(const opk_tensor& tensor) {
    floats(tensor);
    return {tensor.data, {tensor.strides[0], tensor.strides[1], tensor.strides[2]}, attention::Type::Float};
}

Tensor with_dense_rows(const opk_tensor& tensor) {
    if (tensor.sizes[3] == 1 || tensor.strides[3] == 1) return Tensor::view(tensor);
    int64_t strides[4] = {tensor.sizes[1] * tensor.sizes[2] * tensor.sizes[3], tensor.sizes[2] * tensor.sizes[3], tensor.sizes[3], 1};
    opk_tensor layout = tensor;
    layout.strides = strides;
    Tensor made = Tensor::empty(layout);
    copy(tensor, made.described());
    return made;
}

// q, k, v, dropout_p, is_causal, attn_mask, scale: the result and its log-sum-exp.
void attend(const Arguments& arguments, const opk_result* results) {
    using namespace attention;
    const Tensor tensors[3] = {with_dense_rows(required(arguments, 0)), with_dense_rows(required(arguments, 1)), with_dense_rows(required(arguments, 2))};
    const opk_tensor q = tensors[0].described(), k = tensors[1].described(), v = tensors[2].described();
    if (arguments.number(3, 0, "dropout_p") != 0) throw std::runtime_error("there is no dropout without torch");
    std::vector<int64_t> mask_program, bias_program;
    std::vector<Typed> added;
    if (arguments.integer(4, 0, "is_causal")) mask_program = {static_cast<int64_t>(Opcode::Band), -(int64_t{1} << 40), 0};
    if (const opk_tensor* bias = arguments.tensor(5, "attn_mask")) {
        Typed typed;
        typed.data = floats(*bias);
        for (int64_t d = 0; d < bias->rank; ++d) typed.stride[4 - bias->rank + d] = bias->sizes[d] == 1 ? 0 : bias->strides[d];
        added.push_back(typed);
        bias_program = {0, 0};
    }
    const Mask mask(mask_program, {}, q.sizes[0], k.sizes[2]);
    const Biases biases(bias_program, added, q.sizes[2], k.sizes[2]);
    std::vector<float> lse(static_cast<size_t>(q.sizes[0] * q.sizes[1] * q.sizes[2]));
    const float scale = static_cast<float>(arguments.number(6, 1 / std::sqrt(static_cast<double>(q.sizes[3])), "scale"));
    Call call{q.sizes[0], q.sizes[1], k.sizes[1], q.sizes[2], k.sizes[2], q.sizes[3], v.sizes[3], operand(q), operand(k), operand(v), nullptr, {},
              lse.data(), nullptr, scale, 0, mask, biases, &isa::choose("").kernels};
    const opk_tensor& out = results[0].tensor;
    if (out.strides[3] != 1 && out.sizes[3] != 1) throw std::runtime_error("a result of attention has gaps in its rows");
    call.out = out.data;
    std::copy_n(out.strides, 3, call.out_stride);
    const Report report;
    forward(call);
    if (report.failed()) throw std::runtime_error(report.text());
    if (results[1].buffer < 0) return;
    const opk_tensor& sums = results[1].tensor;  // (batch, heads, queries)
    const int64_t strides[3] = {q.sizes[1] * q.sizes[2], q.sizes[2], 1};
    copy({lse.data(), sums.sizes, strides, 3, OPK_FLOAT32, -1}, sums);
}

struct Row {
    const char *name, *overload;
    Operator function;
};

constexpr Row kOperators[] = {
    {"aten::mm", "default", product<0>},
    {"aten::mm", "out", product<0>},
    {"aten::bmm", "default", product<0>},
    {"aten::bmm", "out", product<0>},
    {"aten::addmm", "default", product<1>},
    {"aten::addmm", "out", product<1>},
    {"aten::baddbmm", "default", product<1>},
    {"aten::baddbmm", "out", product<1>},
    {"aten::_scaled_dot_product_flash_attention_for_cpu", "default", attend},
};

}  // namespace

Operator find_operator(const std::string& name, const std::string& overload) {
    for (const Row& row : kOperators)
        if (name == row.name && overload == row.overload) return row.function;
    return nullptr;
}

}  // namespace opkit::model
