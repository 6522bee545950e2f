// Of CUDA C++ and its libraries what the kernels for sm_90a use, on the machine of machine.hpp.
#pragma once

#include "machine.hpp"

#define __device__
#define __forceinline__ inline
#define __noinline__

struct Coordinate {
    unsigned (*ask)();
    operator unsigned() const { return ask(); }
};
struct Coordinates {
    Coordinate x, y, z;
};
#define COORDINATES(of) {{[] { return machine::of.x; }}, {[] { return machine::of.y; }}, {[] { return machine::of.z; }}}
static const Coordinates threadIdx = COORDINATES(self().thread), blockIdx = COORDINATES(self().block->index);
static const Coordinates gridDim = COORDINATES(here().grid);

// ---- CUDA C++ -----------------------------------------------------------------------------------------------------------------

struct uint4 {
    uint32_t x, y, z, w;
};
struct int4 {
    int x, y, z, w;
};
struct int2 {
    int x, y;
};
struct uint2 {
    uint32_t x, y;
};
struct float2 {
    float x, y;
};
struct float4 {
    float x, y, z, w;
};
static inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

template <typename A, typename B>
static inline auto min(A a, B b) { return a < b ? a : b; }
template <typename A, typename B>
static inline auto max(A a, B b) { return a > b ? a : b; }

struct __nv_bfloat16 {
    uint16_t bits = 0;
    __nv_bfloat16() = default;
    explicit __nv_bfloat16(float x) {
        uint32_t all;
        std::memcpy(&all, &x, 4);
        bits = x != x ? 0x7FFF : (all + 0x7FFF + (all >> 16 & 1)) >> 16;
    }
    explicit operator float() const {
        const uint32_t all = uint32_t(bits) << 16;
        float x;
        std::memcpy(&x, &all, 4);
        return x;
    }
};
using __half = _Float16;

template <typename V>
static inline V __shfl_xor_sync(unsigned, V value, int bits) { return machine::exchange(value)[(threadIdx.x % 32) ^ bits]; }
template <typename V>
static inline V __shfl_sync(unsigned, V value, int lane) { return machine::exchange(value)[lane]; }
static inline unsigned __ballot_sync(unsigned, bool value) {
    const auto all = machine::exchange(int(value));
    unsigned bits = 0;
    for (int i = 0; i < 32; i++) bits |= unsigned(all[i]) << i;
    return bits;
}
static inline int __ffs(unsigned bits) { return __builtin_ffs(int(bits)); }
static inline int __clz(int bits) { return bits == 0 ? 32 : __builtin_clz(unsigned(bits)); }
static inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned(uint64_t(a) * b >> 32); }
static inline bool __all_sync(unsigned, bool value) {
    const auto all = machine::exchange(int(value));
    return std::all_of(all.begin(), all.end(), [](int each) { return each; });
}
static inline bool __any_sync(unsigned all, bool value) { return !__all_sync(all, !value); }
static inline float __fmul_rn(float x, float y) {
    volatile float product = x * y;  // so that it is not fused with what follows
    return product;
}
static inline uint32_t __float_as_uint(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}
static inline float __uint_as_float(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}
static inline void __syncwarp() { machine::meet_warp(); }
static inline void __syncthreads() { machine::meet_named(0, machine::self().block->threads); }
static inline void __threadfence() {}
static inline int atomicAdd(int* at, int x) {
    const int before = *at;
    *at += x;
    return before;
}

static inline float __int_as_float(int bits) { return __uint_as_float(bits); }
static inline int __float_as_int(float x) { return int(__float_as_uint(x)); }

// ---- the host ------------------------------------------------------------------------------------------------------------------

// A tensor of elements of some bytes, the innermost dimension first, and the boxes that are copied of it.
struct CUtensorMap {
    const unsigned char* data;
    int element;
    int64_t sizes[5], strides[5];  // strides in bytes
    int box[5];
};

// As the driver makes one; false where it would refuse.
static inline bool describe(CUtensorMap& map, void* data, int element, const int64_t* sizes, const int64_t* strides, const int* box) {
    map = {static_cast<const unsigned char*>(data), element, {}, {}, {}};
    bool fits = reinterpret_cast<uintptr_t>(data) % 16 == 0 && box[0] * element <= 128;
    for (int i = 0; i < 5; i++) {
        map.sizes[i] = sizes[i], map.box[i] = box[i], map.strides[i] = i ? strides[i - 1] : element;
        fits &= sizes[i] > 0 && sizes[i] <= int64_t(1) << 32 && box[i] > 0 && box[i] <= 256;
        fits &= i == 0 || (strides[i - 1] % 16 == 0 && strides[i - 1] >= 0 && strides[i - 1] < int64_t(1) << 40);
    }
    return fits;
}

// A launch, as opkit's extension makes it: of a tensor for TMA the place of its rows in the problem, the size of an element, sizes and box.
struct Described {
    int64_t place, element, sizes[5];
    int box[5];
};

template <typename Problem, typename Maps>
int launch(void (*kernel)(const Problem&, const Maps&), const Problem* problem, const Described* described, int count,
           const unsigned* grid, int threads, int shared, unsigned seed) {
    Maps maps;
    for (int i = 0; i < count; i++) {
        int64_t rows[4];  // address, and strides by batch, head and row
        std::memcpy(rows, reinterpret_cast<const char*>(problem) + described[i].place, sizeof(rows));
        const int64_t element = described[i].element, strides[] = {rows[3] * element, 128, rows[2] * element, rows[1] * element};
        CUtensorMap& map = reinterpret_cast<CUtensorMap*>(&maps)[i];
        if (!describe(map, reinterpret_cast<void*>(rows[0]), int(element), described[i].sizes, strides, described[i].box)) return 1;
    }
    if (shared > int(machine::SHARED) || count * sizeof(CUtensorMap) != sizeof(Maps)) return 1;
    try {
        const unsigned size[] = {grid[0], grid[1], grid[2]};
        machine::run(size, threads, seed, [&] { kernel(*problem, maps); });
        return 0;
    } catch (const std::exception& error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 719;
    }
}
