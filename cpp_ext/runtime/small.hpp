// An array whose size is known when it is made; short ones live on the stack, and only what is used is initialised.
#pragma once

#include <cstddef>
#include <memory>
#include <type_traits>

namespace opkit {

template <class T, size_t N>
class Small {
    static_assert(std::is_trivially_destructible_v<T>);

public:
    explicit Small(size_t size) : size_(size) {
        if (size > N) heap_ = std::make_unique<char[]>(size * sizeof(T));
        data_ = reinterpret_cast<T*>(heap_ ? heap_.get() : stack_);
        if constexpr (!std::is_trivially_default_constructible_v<T>)
            for (size_t i = 0; i < size; i++) new (data_ + i) T;
    }
    Small(const Small&) = delete;
    Small& operator=(const Small&) = delete;

    T* data() { return data_; }
    const T* data() const { return data_; }
    T& operator[](size_t i) { return data_[i]; }
    const T& operator[](size_t i) const { return data_[i]; }
    T* begin() { return data_; }
    T* end() { return data_ + size_; }
    size_t size() const { return size_; }

private:
    size_t size_;
    T* data_;
    alignas(T) char stack_[N * sizeof(T)];
    std::unique_ptr<char[]> heap_;
};

}  // namespace opkit
