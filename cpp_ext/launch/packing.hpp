// The parameters of a compiled function, laid out for the driver.
#pragma once

#include <memory>
#include <vector>

#include "../runtime/small.hpp"
#include "tensor_map.hpp"

namespace opkit::launch {

enum class Kind : uint8_t {
    kPointer,
    kInteger,
    kHalf,
    kBfloat16,
    kFloat,
    kDouble,
    kConstant,
    kSize,
    kStride,
    kMap,
    kScratch,
    kProfileScratch,
    kOffset,
    kTotal
};

struct Parameter {
    const char* name;  // of the kind, as it was written
    Kind kind;
    int32_t bytes;
    int64_t source, detail;

    bool of_tensor() const { return kind == Kind::kPointer || kind == Kind::kSize || kind == Kind::kStride; }
    bool of_scalar() const { return kind >= Kind::kInteger && kind <= Kind::kDouble; }
    bool of_axis() const { return kind == Kind::kOffset || kind == Kind::kTotal; }
};

// Throws std::invalid_argument where there is no such kind.
Parameter parse_parameter(const std::string& kind, int64_t source, int64_t detail);

constexpr size_t kMostMaps = 16;

// The values of one launch. Numbers lie in the low bytes of their words: the driver reads as many as it needs.
struct Packed {
    explicit Packed(size_t count) : words(count), pointers(count) {}
    Small<uint64_t, 64> words;
    Small<void*, 64> pointers;
    EncodedMap maps[kMostMaps];
};

struct Memory {  // what a launch receives in addition to its arguments
    void* scratch;
    void* profile_scratch;
};

using Maps = std::vector<std::unique_ptr<TensorMap>>;

// Throws std::runtime_error where a tensor lacks a dimension that is asked for, or cannot be described for TMA.
void pack(const std::vector<Parameter>& parameters, const Maps& maps, const Driver& driver, const Frame& frame,
          const Memory& memory, const Extent& grid, Packed& packed);

uint16_t half_bits(double value);
uint16_t bfloat16_bits(double value);

}  // namespace opkit::launch
