#include "sources.hpp"

#include <stdexcept>

namespace opkit::launch {

Role parse_role(const std::string& name) {
    static constexpr struct {
        const char* name;
        Role role;
    } kRoles[] = {
        {"tensor", Role::kTensor},
        {"tensor_any", Role::kAnyTensor},
        {"info", Role::kInfo},
        {"int", Role::kInt},
        {"int_noalign", Role::kUnalignedInt},
        {"int_width", Role::kWidth},
        {"exact", Role::kExact},
        {"float", Role::kFloat},
        {"float_exact", Role::kExactFloat},
        {"bool", Role::kBool},
        {"text", Role::kText},
        {"ints", Role::kInts},
    };
    std::string known;
    for (const auto& row : kRoles) {
        if (name == row.name) return row.role;
        known += std::string(known.empty() ? "" : ", ") + row.name;
    }
    throw std::invalid_argument("\"" + name + "\" is no role of a source; the roles are " + known);
}

opk_value Frame::pointed(int32_t kind, const void* value) {
    opk_value result;
    result.i = 0;
    if (value == nullptr) return result;
    switch (kind) {
        case OPK_KIND_FLOAT: result.f = *static_cast<const double*>(value); break;
        case OPK_KIND_BOOL: result.i = *static_cast<const uint8_t*>(value); break;
        case OPK_KIND_DTYPE: result.i = *static_cast<const int32_t*>(value); break;
        default: result.i = *static_cast<const int64_t*>(value);
    }
    return result;
}

const Source& source_at(const Sources& sources, int64_t number) {
    if (number < 0 || static_cast<size_t>(number) >= sources.size())
        throw std::invalid_argument("an entry asks for the source " + std::to_string(number) + " of " +
                                    std::to_string(sources.size()));
    return sources[static_cast<size_t>(number)];
}

void require_tensor(const Sources& sources, int64_t number, const char* what) {
    const Source& source = source_at(sources, number);
    if (!source.tensor())
        throw std::invalid_argument(std::string(what) + " asks for a tensor, and " + source.name + " is none");
}

// By torch's numbers, as in c10/core/ScalarType.h of torch 2.13.
int64_t element_bytes(int32_t dtype) {
    static constexpr int8_t kBytes[] = {
        1, 1, 2, 4, 8, 2, 4, 8, 4, 8, 16, 1,              // uint8 to bool
        1, 1, 4, 2, 1, 1, 1, 1, 1, 1, 2,                  // qint8 to bits16, bfloat16 among them
        1, 1, 1, 1, 2, 4, 8,                              // float8_e5m2 to uint64
        1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1,  1, 1, 1, 1, 1,  // uint1 to float4_e2m1fn_x2
    };
    static_assert(sizeof kBytes == 46);
    if (dtype < 0 || dtype >= static_cast<int32_t>(sizeof kBytes))
        throw std::runtime_error("torch's element type " + std::to_string(dtype) + " is not known to opkit");
    return kBytes[dtype];
}

int64_t extent_bytes(const opk_tensor& tensor) {
    int64_t last = 0;
    for (int64_t d = 0; d < tensor.rank; d++) {
        if (tensor.sizes[d] == 0) return 0;
        last += (tensor.sizes[d] - 1) * tensor.strides[d];
    }
    return (last + 1) * element_bytes(tensor.dtype);
}

bool dense(const opk_tensor& tensor) {
    int64_t left = 0, filled = 1;
    for (int64_t d = 0; d < tensor.rank; d++) {
        if (tensor.sizes[d] == 0) return true;
        left += tensor.sizes[d] != 1;
    }
    while (left-- > 0) {  // the dimension that lies just outside what is filled so far
        int64_t next = 0;
        while (next < tensor.rank && (tensor.sizes[next] == 1 || tensor.strides[next] != filled)) next++;
        if (next == tensor.rank) return false;
        filled *= tensor.sizes[next];
    }
    return true;
}

}  // namespace opkit::launch
