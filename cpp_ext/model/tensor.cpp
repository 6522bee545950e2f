#include "tensor.hpp"

#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>

#include "../runtime/tensor.hpp"
#include "threads.hpp"

namespace opkit::model {

Memory allocate(int64_t bytes) {
    const size_t rounded = (static_cast<size_t>(bytes > 0 ? bytes : 1) + 63) / 64 * 64;
    void* found = std::aligned_alloc(64, rounded);
    if (found == nullptr) throw std::bad_alloc();
    return {found, std::free};
}

int64_t item_size(int32_t dtype) {
    switch (dtype) {
        case OPK_UINT8:
        case OPK_INT8:
        case OPK_BOOL:
        case OPK_FLOAT8_E5M2:
        case OPK_FLOAT8_E4M3FN: return 1;
        case OPK_INT16:
        case OPK_UINT16:
        case OPK_FLOAT16:
        case OPK_BFLOAT16: return 2;
        case OPK_INT32:
        case OPK_UINT32:
        case OPK_FLOAT32: return 4;
        case OPK_INT64:
        case OPK_UINT64:
        case OPK_FLOAT64:
        case OPK_COMPLEX64: return 8;
        case OPK_COMPLEX128: return 16;
        default: return 0;
    }
}

int64_t span(const int64_t* sizes, const int64_t* strides, int64_t rank) {
    int64_t last = 0;
    for (int64_t d = 0; d < rank; ++d)
        if (sizes[d] == 0) return 0;
    for (int64_t d = 0; d < rank; ++d) {
        int64_t far;
        if (sizes[d] < 0 || strides[d] < 0 || __builtin_mul_overflow(sizes[d] - 1, strides[d], &far) ||
            __builtin_add_overflow(last, far, &last) || last > int64_t{1} << 56)
            throw std::runtime_error("a tensor is too large");
    }
    return last + 1;
}

bool same_layout(const opk_tensor& tensor, const int64_t* strides) {
    bool same = true;
    for (int64_t d = 0; d < tensor.rank; ++d) {
        if (tensor.sizes[d] == 0) return true;
        same = same && (tensor.sizes[d] == 1 || tensor.strides[d] == strides[d]);
    }
    return same;
}

std::string describe(int32_t dtype, const int64_t* sizes, int64_t rank) {
    std::string text = std::string(dtype_name(dtype)) + "[";
    for (int64_t d = 0; d < rank; ++d) text += (d ? ", " : "") + std::to_string(sizes[d]);
    return text + "]";
}

Tensor Tensor::empty(const opk_tensor& layout) {
    Tensor made = view(layout);
    made.memory = allocate(span(layout.sizes, layout.strides, layout.rank) * item_size(layout.dtype));
    made.data = made.memory.get();
    return made;
}

Tensor Tensor::view(const opk_tensor& of) {
    Tensor made;
    made.sizes.assign(of.sizes, of.sizes + of.rank);
    made.strides.assign(of.strides, of.strides + of.rank);
    made.dtype = of.dtype;
    made.device = of.device_index;
    made.data = of.data;
    return made;
}

opk_tensor Tensor::described() const {
    return {data, sizes.data(), strides.data(), static_cast<int64_t>(sizes.size()), dtype, device};
}

namespace {

struct Copy {
    const opk_tensor &from, &to;
    int64_t item;

    void dimension(int64_t d, const char* source, char* target) const {
        if (d == from.rank) {
            std::memcpy(target, source, static_cast<size_t>(item));
            return;
        }
        if (d == from.rank - 1 && from.strides[d] == 1 && to.strides[d] == 1) {
            std::memcpy(target, source, static_cast<size_t>(item * from.sizes[d]));
            return;
        }
        for (int64_t i = 0; i < from.sizes[d]; ++i)
            dimension(d + 1, source + i * from.strides[d] * item, target + i * to.strides[d] * item);
    }

    static void run(int64_t begin, int64_t end, void* context) {
        const Copy& copy = *static_cast<const Copy*>(context);
        const char* source = static_cast<const char*>(copy.from.data);
        char* target = static_cast<char*>(copy.to.data);
        for (int64_t i = begin; i < end; ++i)
            copy.dimension(1, source + i * copy.from.strides[0] * copy.item, target + i * copy.to.strides[0] * copy.item);
    }
};

}  // namespace

void copy(const opk_tensor& from, const opk_tensor& to) {
    int64_t count = 1;
    for (int64_t d = 0; d < from.rank; ++d) count *= from.sizes[d];
    if (count == 0) return;
    Copy work{from, to, item_size(from.dtype)};
    if (from.rank == 0) return work.dimension(0, static_cast<const char*>(from.data), static_cast<char*>(to.data));
    constexpr int64_t kLeast = 1 << 15;  // elements that are worth a thread
    for_range(0, from.sizes[0], std::max<int64_t>(1, kLeast / std::max<int64_t>(1, count / from.sizes[0])), Copy::run,
              &work);
}

}  // namespace opkit::model
