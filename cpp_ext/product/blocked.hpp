// What products and convolutions share: how a product is divided into blocks, for the caches, and into tasks, for the threads.
#pragma once

#include <atomic>
#include <cstdint>

#include "product.hpp"

namespace opkit::product {

constexpr int64_t kMaxRows = 144, kMaxDepth = 768;  // of a block: x and two panels stay in a second-level cache of 1 MiB
constexpr int64_t kMaxSum = 256;                   // numbers that are summed one after the other: the error grows with them
constexpr int64_t kMaxTaps = 1536;                  // numbers of all taps: rows share most of them
constexpr int64_t kMinShared = 1 << 17;             // multiply-adds that take longer than it takes to wake a thread

// Products, as many as `groups`, that differ in where their operands are.
struct Blocked {
    const float* x;
    const float* packed;
    const float* bias;
    const float* addend;
    float* y;
    int64_t x_pitch, addend_pitch, y_pitch;
    int64_t x_group, packed_group, bias_group, addend_group, y_group;
    int64_t groups, rows, line, columns, taps, depth;  // lines and taps as in a Block
    Activation activation;
    // Copies a part of x of a group to rows that are `pitch` apart, or finds the places of taps [begin, end), where `zeros` has the
    // depth of a tap. Without both, x is read where it is.
    void (*copy)(const void* context, int64_t group, int64_t row, int64_t rows, int64_t begin, int64_t end, float* out, int64_t pitch);
    void (*find)(const void* context, int64_t group, int64_t row, int64_t rows, int64_t begin, int64_t end, const float** out,
                 const float* zeros);
    const void* context;
};

void multiply(const Blocked& call, const Parallel& parallel, const isa::Table& kernels);

// Images are channels-last.
void winograd(const Convolution& call, const Parallel& parallel, const isa::Table& kernels);

// to[columns][rows] = from[rows][columns].
void transpose_rows(const float* from, int64_t from_pitch, int64_t rows, int64_t columns, float* to, int64_t to_pitch);

// Memory of this thread, of 64-byte alignment, until its next call.
float* scratch(int64_t floats);

// Memory of a call.
class Memory {
public:
    explicit Memory(int64_t floats);
    ~Memory();
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;
    float* data() const { return data_; }

private:
    float* data_;
};

// Calls work(n) for each n below count: each thread takes the next until none is left.
template <class Work>
void deal(const Parallel& parallel, int64_t count, const Work& work) {
    if (count <= 1 || parallel.threads <= 1) {
        for (int64_t n = 0; n < count; ++n) work(n);
        return;
    }
    struct Shared {
        std::atomic<int64_t> next{0};
        int64_t count;
        const Work* work;
    } shared;
    shared.count = count;
    shared.work = &work;
    const int64_t workers = count < parallel.threads ? count : parallel.threads;
    parallel.run(parallel.self, workers, 1, [](int64_t, int64_t, void* context) {
        auto& all = *static_cast<Shared*>(context);
        for (int64_t n; (n = all.next++) < all.count;) (*all.work)(n);
    }, &shared);
}

}  // namespace opkit::product
