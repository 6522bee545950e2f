#include "operators.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "tensor.hpp"

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
