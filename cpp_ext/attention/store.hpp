// Memory that grows and is reused: a thread that has its own allocates nothing that an earlier call has left.
#pragma once

#include <cstdint>
#include <new>

namespace opkit::attention {

class Store {
public:
    Store() = default;
    Store(const Store&) = delete;
    ~Store() { release(); }

    // At least so many bytes, aligned to 64; what was there is lost.
    char* of(int64_t bytes) {
        if (bytes > size_) {
            release();
            data_ = static_cast<char*>(::operator new(static_cast<size_t>(bytes), std::align_val_t{64}));
            size_ = bytes;
        }
        return data_;
    }

    // Frees what exceeds the most that a thread may hold between calls.
    void trim() {
        if (size_ > kKept) release();
    }

private:
    static constexpr int64_t kKept = int64_t{64} << 20;
    void release() {
        if (data_) ::operator delete(data_, std::align_val_t{64});
        data_ = nullptr;
        size_ = 0;
    }
    char* data_ = nullptr;
    int64_t size_ = 0;
};

// Pieces of a store, one after another, each aligned to 64 bytes.
class Pieces {
public:
    explicit Pieces(char* at) : at_(at) {}
    template <class T>
    T* take(int64_t count) {
        char* found = at_;
        at_ += (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
        return reinterpret_cast<T*>(found);
    }
    static constexpr int64_t bytes(int64_t count, int64_t size) { return (count * size + 63) / 64 * 64; }

private:
    char* at_;
};

}  // namespace opkit::attention
