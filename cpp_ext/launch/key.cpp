#include "key.hpp"

namespace opkit::launch {
namespace {

uint64_t bits_of(double value) {
    uint64_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

// Bit 0: 1; bit 1: divisible by 16; bit 2: it fits in int32.
uint64_t class_of(int64_t value) {
    return uint64_t{value == 1} | uint64_t{value % 16 == 0} << 1 | uint64_t{value == static_cast<int32_t>(value)} << 2;
}

}  // namespace

bool beyond_int32(const opk_tensor& tensor) {
    int64_t last = 0;
    for (int64_t d = 0; d < tensor.rank; d++) {
        if (tensor.sizes[d] == 0) return false;
        last += (tensor.sizes[d] - 1) * (tensor.strides[d] < 0 ? -tensor.strides[d] : tensor.strides[d]);
    }
    return last >= INT32_MAX;
}

Key::Key(const Frame& frame) {
    add(static_cast<uint64_t>(frame.device));
    for (size_t i = 0; i < frame.sources->size(); i++) add_source(frame, i);
}

void Key::add_source(const Frame& frame, size_t i) {
    const Source& source = frame.source(i);
    if (source.tensor()) return add_tensor(frame.tensor(i), source.role);
    if (source.pointer != kPlain) {
        add(frame.absent(i));
        if (frame.absent(i)) return;
    }
    const opk_value value = frame.scalar(i);
    switch (source.role) {
        case Role::kInt: return add(class_of(value.i));
        case Role::kUnalignedInt: return add(class_of(value.i) & 5);
        case Role::kWidth: return add(class_of(value.i) & 4);
        case Role::kExact:
        case Role::kExactFloat: return add(source.real() ? bits_of(value.f) : static_cast<uint64_t>(value.i));
        case Role::kText: return add_text(static_cast<const char*>(value.p));
        case Role::kInts: {
            const int64_t count = frame.values[source.length].i;
            add(value.p == nullptr ? 0 : static_cast<uint64_t>(count) + 1);
            return add_all(static_cast<const int64_t*>(value.p), value.p == nullptr ? 0 : count);
        }
        default: return;
    }
}

void Key::add_tensor(const opk_tensor* tensor, Role role) {
    if (tensor == nullptr) return add(0);
    const bool aligned = role != Role::kAnyTensor && reinterpret_cast<uintptr_t>(tensor->data) % kAlignment == 0;
    add(1 | uint64_t{aligned} << 1 | static_cast<uint64_t>(tensor->dtype) << 2 | uint64_t{beyond_int32(*tensor)} << 31 |
        (role == Role::kInfo ? static_cast<uint64_t>(tensor->rank) << 32 : 0));
    if (role != Role::kInfo) return;
    add_all(tensor->sizes, tensor->rank);
    add_all(tensor->strides, tensor->rank);
}

void Key::add_all(const int64_t* values, int64_t count) {
    for (int64_t i = 0; i < count; i++) add(static_cast<uint64_t>(values[i]));
}

void Key::add_text(const char* text) {
    if (text == nullptr) return add(0);
    size_t left = std::strlen(text);
    add(left + 1);
    for (uint64_t word; left > 0; text += sizeof word) {
        const size_t bytes = left < sizeof word ? left : sizeof word;
        word = 0;
        std::memcpy(&word, text, bytes);
        add(word);
        left -= bytes;
    }
}

void Key::add_to_many(uint64_t word) {
    if (many_.empty()) many_.assign(few_, few_ + size_);
    many_.push_back(word);
    size_++;
}

uint64_t Key::hash() const {
    uint64_t hash = size_;
    for (const uint64_t *word = words(), *end = word + size_; word != end; word++) {
        hash = (hash ^ *word) * 0x9E3779B97F4A7C15u;
        hash ^= hash >> 29;
    }
    return hash ^ hash >> 32;
}

}  // namespace opkit::launch
