// What of a call decides which entry serves it.
#pragma once

#include <cstring>
#include <vector>

#include "sources.hpp"

namespace opkit::launch {

constexpr uintptr_t kAlignment = 16;  // in bytes; what Triton distinguishes of addresses

// Whether some element lies further from the first than an int32 counts.
bool beyond_int32(const opk_tensor& tensor);

class Key {
public:
    explicit Key(const Frame& frame);
    Key(const Key&) = delete;
    Key& operator=(const Key&) = delete;

    const uint64_t* words() const { return many_.empty() ? few_ : many_.data(); }
    size_t size() const { return size_; }
    uint64_t hash() const;

    bool operator==(const std::vector<uint64_t>& other) const {
        return size_ == other.size() && std::memcmp(words(), other.data(), size_ * sizeof(uint64_t)) == 0;
    }

private:
    static constexpr size_t kFew = 96;

    void add(uint64_t word) {
        if (size_ < kFew)
            few_[size_++] = word;
        else
            add_to_many(word);
    }
    void add_to_many(uint64_t word);
    void add_source(const Frame& frame, size_t source);
    void add_tensor(const opk_tensor* tensor, Role role);
    void add_all(const int64_t* values, int64_t count);
    void add_text(const char* text);

    size_t size_ = 0;
    std::vector<uint64_t> many_;  // all words, once there are more than few
    uint64_t few_[kFew];
};

}  // namespace opkit::launch
