// What a launcher is called with: one value for each source, as the runtime's trampolines receive them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "../../opkit/kernels/include/opkit.h"

namespace opkit::launch {

// By what of its value a source distinguishes calls; see Launcher in opkit/_core.pyi.
enum class Role : uint8_t {
    kTensor,
    kAnyTensor,
    kInfo,
    kInt,
    kUnalignedInt,
    kWidth,
    kExact,
    kFloat,
    kExactFloat,
    kBool,
    kText,
    kInts
};

// Throws std::invalid_argument where there is no such role.
Role parse_role(const std::string& name);

constexpr int32_t kPlain = -1;

struct Source {
    Role role;
    std::string name;             // of the argument or output
    int32_t kind = OPK_KIND_INT;  // an opk_kind
    int32_t pointer = kPlain;     // an opk_kind: the value is a pointer to one such, null for None
    size_t length = 0;            // of a list: which value holds its length
    bool output = false;          // a new tensor

    bool tensor() const { return role <= Role::kInfo; }
    bool real() const { return kind == OPK_KIND_FLOAT; }
};

using Sources = std::vector<Source>;

// These throw std::invalid_argument where there is no such source, or where it is no tensor; `what` asks for it.
const Source& source_at(const Sources& sources, int64_t number);
void require_tensor(const Sources& sources, int64_t number, const char* what);

// One call.
struct Frame {
    const opk_value* values;  // of the sources, then of the lists' lengths
    const Sources* sources;
    int32_t device;  // -1: the CPU
    void* stream;

    const Source& source(size_t i) const { return (*sources)[i]; }
    const opk_tensor* tensor(size_t i) const { return static_cast<const opk_tensor*>(values[i].p); }
    bool absent(size_t i) const { return source(i).pointer != kPlain && values[i].p == nullptr; }

    // The value of a scalar; 0 for None.
    opk_value scalar(size_t i) const {
        return source(i).pointer == kPlain ? values[i] : pointed(source(i).pointer, values[i].p);
    }

    static opk_value pointed(int32_t kind, const void* value);
};

int64_t element_bytes(int32_t dtype);

// From the first byte of a tensor to behind the last: gaps between its elements count.
int64_t extent_bytes(const opk_tensor& tensor);

// Whether its elements fill that extent, each in a place of its own, in whatever order.
bool dense(const opk_tensor& tensor);

}  // namespace opkit::launch
