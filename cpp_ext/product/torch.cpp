// Products of float32 tensors in place of those of torch's C shim, whose signatures these functions have. What these kernels do not
// compute, or torch computes faster, is passed on to torch.
#include <atomic>
#include <new>

#include "../runtime/failure.hpp"
#include "../runtime/parallel.hpp"
#include "../runtime/tensor.hpp"
#include "torch.hpp"

namespace opkit::product {
namespace {

constexpr int64_t kMinSize = 64;  // rows, columns and depth: the right operand is packed in each call, which must pay

std::atomic<const isa::Table*> chosen{nullptr};

// Whether the product was computed; if not, nothing was written that the product does not overwrite.
bool computed(Handle out, Handle left, Handle right) {
    View y, a, b;
    if (!read(out, y) || !read(left, a) || !read(right, b)) return false;
    if (y.dtype != OPK_FLOAT32 || a.dtype != OPK_FLOAT32 || b.dtype != OPK_FLOAT32) return false;
    const int64_t last = y.rank - 1, rows = y.sizes[last - 1], columns = y.sizes[last], depth = a.sizes[last];
    if (rows < kMinSize || columns < kMinSize || depth < kMinSize || y.strides[last] != 1) return false;
    const auto batch = [last](const View& view) { return last == 2 ? view.strides[0] : 0; };
    const void *from_a = nullptr, *from_b = nullptr;
    void* to = nullptr;
    const Shim& torch = shim();
    if (torch.torch_get_const_data_ptr(left, &from_a) || torch.torch_get_const_data_ptr(right, &from_b) ||
        torch.torch_get_mutable_data_ptr(out, &to))
        return false;
    const Report report;
    try {
        matmul({static_cast<const float*>(from_a), batch(a), a.strides[last - 1], a.strides[last], static_cast<const float*>(from_b),
                batch(b), b.strides[last - 1], b.strides[last], nullptr, nullptr, 0, 0, static_cast<float*>(to), batch(y),
                y.strides[last - 1], last == 2 ? y.sizes[0] : 1, rows, columns, depth},
               torch_threads(), *chosen);
    } catch (const std::bad_alloc&) {
        return false;
    }
    return !report.failed();
}

}  // namespace

Parallel torch_threads() {
    const auto run = [](void*, int64_t n, int64_t grain, void (*body)(int64_t, int64_t, void*), void* context) {
        parallel_for(0, n, grain, body, context);
    };
    return {run, thread_count(), nullptr};
}

Functions functions(const isa::Table& kernels) {
    chosen = &kernels;
    return {
        [](Handle out, Handle a, Handle b) { return computed(out, a, b) ? 0 : shim().aoti_torch_cpu_mm_out(out, a, b); },
        [](Handle out, Handle a, Handle b) { return computed(out, a, b) ? 0 : shim().aoti_torch_cpu_bmm_out(out, a, b); },
    };
}

}  // namespace opkit::product
