#include "weights.hpp"

#include <array>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "../attention/half.hpp"
#include "../isa/scalar.hpp"
#include "../runtime/tensor.hpp"
#include "threads.hpp"

namespace opkit::model {
namespace {

constexpr int64_t kLeastWidened = 1 << 16;  // elements that take longer than it takes to wake a thread

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

const float* float8_values() {
    static const std::array<float, 256> values = [] {
        std::array<float, 256> found;
        for (size_t bits = 0; bits < found.size(); ++bits) found[bits] = of_float8(static_cast<uint8_t>(bits));
        return found;
    }();
    return values.data();
}

// A weight that is stored narrower. An element is multiplied by a scale: that of its row, and of its place among `inner` ones.
struct Widening {
    int32_t stored, made;
    const char* from;
    void* to;
    const float* scales;
    int64_t row, inner;
};

template <class Read, class Write>
void widen(const Widening& w, int64_t begin, int64_t end, const Read& read, const Write& write) {
    for (int64_t i = begin, last; i < end; i = last) {
        const float* scales = w.scales + i / w.row * w.inner;
        last = std::min(end, (i / w.row + 1) * w.row);
        if (w.inner == 1)
            for (int64_t at = i; at < last; ++at) write(at, read(at) * *scales);
        else
            for (int64_t at = i, place = i % w.inner; at < last; ++at, place = place + 1 < w.inner ? place + 1 : 0)
                write(at, read(at) * scales[place]);
    }
}

template <class Read>
void widen(const Widening& w, int64_t begin, int64_t end, const Read& read) {
    auto* halves = static_cast<uint16_t*>(w.to);
    if (w.made == OPK_FLOAT32)
        widen(w, begin, end, read, [&](int64_t i, float value) { static_cast<float*>(w.to)[i] = value; });
    else if (w.made == OPK_BFLOAT16)
        widen(w, begin, end, read, [&](int64_t i, float value) { halves[i] = isa::narrow_one(value); });
    else
        widen(w, begin, end, read, [&](int64_t i, float value) { halves[i] = attention::narrow_half(value); });
}

void widen(int64_t begin, int64_t end, void* context) {
    const Widening& w = *static_cast<const Widening*>(context);
    const auto* bytes = reinterpret_cast<const uint8_t*>(w.from);
    if (w.stored == OPK_INT8)
        widen(w, begin, end, [&](int64_t i) { return static_cast<float>(static_cast<int8_t>(bytes[i])); });
    else if (w.stored == OPK_BFLOAT16)
        widen(w, begin, end, [&](int64_t i) { return isa::widen_one(reinterpret_cast<const uint16_t*>(w.from)[i]); });
    else
        widen(w, begin, end, [bytes, values = float8_values()](int64_t i) { return values[bytes[i]]; });
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
    const float one = 1.0f;
    const float* scales = &one;
    int64_t inner = 1, row = std::max<int64_t>(1, count);
    if (const Json* scale = record.find("scale")) {
        int32_t dtype = 0;
        const Weight& found = find(scale->text(), &dtype);
        if (found.shape.size() > 1) inner = found.shape.back();
        if (dtype != OPK_FLOAT32 || weight.shape.empty() || inner < 1 ||
            static_cast<int64_t>(found.bytes.size) < 4 * weight.shape[0] * inner)
            throw std::runtime_error("a weight has too few scales");
        scales = reinterpret_cast<const float*>(found.bytes.data);
        const int64_t rows = std::max<int64_t>(1, weight.shape[0]);
        row = std::max<int64_t>(1, (count + rows - 1) / rows);
    }
    const std::string& name = narrowed->text();
    made.dtype = name == "float32" ? OPK_FLOAT32 : name == "bfloat16" ? OPK_BFLOAT16 : OPK_FLOAT16;
    if (stored != OPK_INT8 && stored != OPK_BFLOAT16 && stored != OPK_FLOAT8_E4M3FN)
        throw std::runtime_error(std::string("weights are not stored as ") + dtype_name(stored));
    if (made.dtype == OPK_FLOAT16 && name != "float16")
        throw std::runtime_error("a weight of " + name + " is stored narrower");
    made = Tensor::empty(made.described());
    Widening widening{stored, made.dtype, weight.bytes.data, made.data, scales, row, inner};
    for_range(0, count, kLeastWidened, widen, &widening);
    return made;
}

}  // namespace opkit::model
