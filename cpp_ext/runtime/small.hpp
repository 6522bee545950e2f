// An array whose size is known when it is made; short ones live on the stack.
#pragma once

#include <cstddef>
#include <memory>

namespace opkit {

template <class T, size_t N>
class Small {
public:
    explicit Small(size_t size) : size_(size) {
        if (size > N) heap_ = std::make_unique<T[]>(size);
    }
    T* data() { return heap_ ? heap_.get() : stack_; }
    T& operator[](size_t i) { return data()[i]; }
    T* begin() { return data(); }
    T* end() { return data() + size_; }
    size_t size() const { return size_; }

private:
    size_t size_;
    T stack_[N];
    std::unique_ptr<T[]> heap_;
};

}  // namespace opkit
