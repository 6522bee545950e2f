#include "weights.hpp"

#include <cmath>
#include <cstring>
#include <stdexcept>

#include "../attention/half.hpp"
#include "../isa/scalar.hpp"
#include "../runtime/tensor.hpp"
#include "threads.hpp"

namespace opkit::model {
namespace {

int32_t dtype_of(const std::string& name) {
    static const std::pair<const char*, int32_t> known[] = {{"F64", OPK_FLOAT64},
                                                            {"F32", OPK_FLOAT32},
                                                            {"F16", OPK_FLOAT16},
                                                            {"BF16", OPK_BFLOAT16},
                                                            {"F8_E4M3", OPK_FLOAT8_E4M3FN},
                                                            {"F8_E5M2", OPK_FLOAT8_E5M2},
                                                            {"I64", OPK_INT64},
                                                            {"I32", OPK_INT32},
                                                            {"I16", OPK_INT16},
                                                            {"I8", OPK_INT8},
                                                            {"U8", OPK_UINT8},
                                                            {"BOOL", OPK_BOOL},
                                                            {"U16", OPK_UINT16},
                                                            {"U32", OPK_UINT32},
                                                            {"U64", OPK_UINT64},
                                                            {"C64", OPK_COMPLEX64}};
    for (const auto& [spelled, dtype] : known)
        if (name == spelled) return dtype;
    throw std::runtime_error("a weight has the unknown dtype " + name);
}

float of_float8(uint8_t bits) {  // e4m3fn: no infinities, and NaN where all bits but the sign are set
    const int exponent = bits >> 3 & 15, fraction = bits & 7;
    if ((bits & 127) == 127) return NAN;
    const float value = exponent ? std::ldexp(static_cast<float>(8 + fraction), exponent - 10)
                                 : std::ldexp(static_cast<float>(fraction), -9);
    return bits & 128 ? -value : value;
}

float widened(int32_t dtype, const char* data, int64_t at) {
    switch (dtype) {
        case OPK_INT8: return reinterpret_cast<const int8_t*>(data)[at];
        case OPK_BFLOAT16: return isa::widen_one(reinterpret_cast<const uint16_t*>(data)[at]);
        case OPK_FLOAT8_E4M3FN: return of_float8(static_cast<uint8_t>(data[at]));
        default: throw std::runtime_error(std::string("weights are not stored as ") + dtype_name(dtype));
    }
}

}  // namespace

Weights::Weights(const Archive& archive, bool verify, const Device& device)
    : device_(device), weights_(archive.weights(verify, static_cast<unsigned>(threads().count))) {}

const Weight& Weights::find(const std::string& name, int32_t* dtype) const {
    const auto found = weights_.find(name);
    if (found == weights_.end()) throw std::runtime_error("it has no weight " + name);
    const Weight& weight = found->second;
    *dtype = dtype_of(weight.dtype);
    int64_t bytes = item_size(*dtype);
    for (int64_t size : weight.shape)
        if (size < 0 || __builtin_mul_overflow(bytes, size, &bytes))
            throw std::runtime_error("the weight " + name + " is too large");
    if (bytes != static_cast<int64_t>(weight.bytes.size) ||
        reinterpret_cast<uintptr_t>(weight.bytes.data) % static_cast<uintptr_t>(item_size(*dtype)))
        throw std::runtime_error("the weight " + name + " is not within the file");
    return weight;
}

namespace {

std::string key_of(const Json& record) {
    std::string key;
    for (const char* field : {"at", "shape", "strides", "dtype"})
        if (const Json* value = record.find(field)) {
            if (value->is_text())
                key += value->text();
            else
                for (int64_t n : value->integers()) key += std::to_string(n) + ',';
            key += '\n';
        }
    return key;
}

}  // namespace

const Tensor& Weights::constant(const Json& record) {
    const std::string key = key_of(record);
    const auto known = made_.find(key);
    if (known != made_.end()) return known->second;
    Tensor made = make(record);
    return made_.emplace(key, device_.is_gpu() ? copied(made) : std::move(made)).first->second;
}

const Tensor& Weights::state(const Json& record) {
    const std::string key = key_of(record);
    const auto known = states_.find(key);
    if (known != states_.end()) return known->second;
    return states_.emplace(key, copied(constant(record))).first->second;
}

Tensor Weights::copied(const Tensor& from) const {
    opk_tensor layout = from.described();
    layout.device_index = device_.number();
    Tensor made = device_.empty(layout);
    device_.copy(from.described(), made.described());
    return made;
}

Tensor Weights::make(const Json& record) const {
    int32_t stored = 0;
    const Weight& weight = find(record.at("at").text(), &stored);
    const int64_t room = static_cast<int64_t>(weight.bytes.size) / item_size(stored);
    Tensor made;
    made.sizes = record.at("shape").integers();
    const auto rank = static_cast<int64_t>(made.sizes.size());
    made.strides = record.at("strides").integers();
    const bool fits = made.strides.size() == made.sizes.size() && span(made.sizes.data(), made.strides.data(), rank) <= room;
    if (!fits) throw std::runtime_error("a weight is not within " + record.at("at").text());
    const Json* narrowed = record.find("dtype");
    if (narrowed == nullptr) {
        made.dtype = stored;
        made.data = const_cast<char*>(weight.bytes.data);  // programs do not write to constants
        return made;
    }
    const int64_t count = span(made.sizes.data(), made.strides.data(), rank);
    // one scale for each row of what is stored, or for each place in its last dimension and each in its first
    const float* scales = nullptr;
    int64_t inner = 1;
    if (const Json* scale = record.find("scale")) {
        int32_t dtype = 0;
        const Weight& found = find(scale->text(), &dtype);
        if (found.shape.size() > 1) inner = found.shape.back();
        if (dtype != OPK_FLOAT32 || weight.shape.empty() || inner < 1 ||
            static_cast<int64_t>(found.bytes.size) < 4 * weight.shape[0] * inner)
            throw std::runtime_error("a weight has too few scales");
        scales = reinterpret_cast<const float*>(found.bytes.data);
    }
    const std::string& name = narrowed->text();
    made.dtype = name == "float32" ? OPK_FLOAT32 : name == "bfloat16" ? OPK_BFLOAT16 : OPK_FLOAT16;
    if (made.dtype == OPK_FLOAT16 && name != "float16")
        throw std::runtime_error("a weight of " + name + " is stored narrower");
    made = Tensor::empty(made.described());
    const int64_t row = scales ? count / std::max<int64_t>(1, weight.shape[0]) : 1;
    for (int64_t i = 0; i < count; ++i) {
        const float value = widened(stored, weight.bytes.data, i) * (scales ? scales[i / row * inner + i % inner] : 1.0f);
        if (made.dtype == OPK_FLOAT32)
            static_cast<float*>(made.data)[i] = value;
        else
            static_cast<uint16_t*>(made.data)[i] =
                made.dtype == OPK_BFLOAT16 ? isa::narrow_one(value) : attention::narrow_half(value);
    }
    return made;
}

}  // namespace opkit::model
