// What CUDA C++ has no words for on sm_90a: barriers in shared memory, TMA, and products of warpgroups, as one instruction each.
// PTX ISA 8.0, https://docs.nvidia.com/cuda/parallel-thread-execution.
#pragma once

#include <cstdint>

#define SM90 static __device__ __forceinline__

// Whole numbers that who launches a kernel has to know, as a constant in the compiled file.
#define SM90_NUMBERS(NAME, ...) extern "C" __device__ const int NAME##_numbers[] = {__VA_ARGS__};
// A kernel under a plain name, of so many threads a block; threads, dynamic shared memory and more of it are its numbers.
#define SM90_KERNEL(NAME, BOUNDS, CALL, ...)                                                   \
    SM90_NUMBERS(NAME, __VA_ARGS__)                                                            \
    extern "C" __global__ void __launch_bounds__ BOUNDS                                        \
        NAME(const __grid_constant__ Problem problem, const __grid_constant__ Maps maps) {     \
        CALL(problem, maps);                                                                   \
    }

// How TMA finds a tensor, which the driver writes: cuda.h, which a torch that is installed need not have, says no more.
struct alignas(64) CUtensorMap {
    uint64_t opaque[16];
};

namespace sm90 {

// Elements of 16 bits; what a float becomes is rounded to nearest.
struct Half {
    uint16_t bits;
    Half() = default;
    __device__ __forceinline__ explicit Half(float x) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x)); }
    __device__ __forceinline__ explicit operator float() const { return widened(bits); }
    static __device__ __forceinline__ float widened(uint16_t bits) {
        float x;
        asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
        return x;
    }
};
struct Bfloat16 {
    uint16_t bits;
    Bfloat16() = default;
    __device__ __forceinline__ explicit Bfloat16(float x) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x)); }
    __device__ __forceinline__ explicit operator float() const { return __uint_as_float(uint32_t(bits) << 16); }
};

// The shared memory that a launch asks for, and an address in it as instructions take it.
SM90 unsigned char* dynamic_shared() {
    extern __shared__ unsigned char bytes[];
    return bytes;
}
SM90 uint32_t shared(const void* at) { return static_cast<uint32_t>(__cvta_generic_to_shared(at)); }

// ---- barriers in shared memory (mbarrier), by their addresses ------------------------------------------------------------

SM90 void barrier_init(uint32_t barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

// After the last barrier_init, before other threads and the copy engine use the barriers.
SM90 void barriers_ready() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

SM90 void arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrive, and say how many bytes the copy engine will bring before the phase is over.
SM90 void expect_bytes(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Wait until the phase of this parity is over.
SM90 void wait(uint32_t barrier, uint32_t parity) {
    asm volatile(
        "{\n.reg .pred p;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@p bra done;\nbra again;\ndone:\n}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

// Whether this is the one thread of a warp, all of whose threads ask. ptxas knows that it is one.
SM90 bool elected() {
    uint32_t found;
    asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;\n}" : "=r"(found));
    return found;
}

// threadIdx.x, read anew: what is computed of it is not computed before, to be kept in a register.
SM90 int thread_now() {
    int x;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
    return x;
}

// ---- named barriers of a block's threads; 0 is __syncthreads' -------------------------------------------------------------

SM90 void named_sync(int number, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory"); }
// Meet there, without waiting for the others.
SM90 void named_arrive(int number, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory"); }

// ---- registers of a warpgroup ---------------------------------------------------------------------------------------------

template <int COUNT>
SM90 void more_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT)); }
template <int COUNT>
SM90 void fewer_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT)); }

// ---- the copy engine (TMA) ------------------------------------------------------------------------------------------------

SM90 void prefetch_map(const CUtensorMap* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }

// Boxes of 64 columns next to one another, one after another, from a box on: the third dimension counts them.
SM90 void load_box(uint32_t to, const CUtensorMap* map, uint32_t barrier, int row, int box, int head, int batch, int column = 0) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(to),
        "l"(map), "r"(barrier), "r"(column), "r"(row), "r"(box), "r"(head), "r"(batch)
        : "memory");
}
SM90 void load_boxes(uint32_t to, const CUtensorMap* map, uint32_t barrier, int row, int head, int batch) {
    load_box(to, map, barrier, row, 0, head, batch);
}

// Bytes that follow one another, to shared memory.
SM90 void load_bytes(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

// From shared memory: bytes that follow one another, and a box of 64 columns. A thread waits for those that it began: until all are
// read, or until all are there for others but those of the last few times that it committed some.
SM90 void store_bytes(void* to, uint32_t from, uint32_t bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes) : "memory");
}
SM90 void store_box(const CUtensorMap* map, uint32_t from, int row, int box, int head, int batch, int column = 0) {
    asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(map), "r"(from),
                 "r"(column), "r"(row), "r"(box), "r"(head), "r"(batch)
                 : "memory");
}
SM90 void stores_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
SM90 void stores_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
template <int LATER>
SM90 void stores_done() { asm volatile("cp.async.bulk.wait_group %0;" ::"n"(LATER) : "memory"); }

// Between ordinary stores to shared memory and the tensor cores or the copy engine, which read them by another way.
SM90 void fence_stores() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- products of a warpgroup (wgmma) --------------------------------------------------------------------------------------

SM90 void products_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
SM90 void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>
SM90 void products_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory"); }

// Keeps the compiler from moving reads and writes of registers that a product works on.
template <int N>
SM90 void hold(float (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}
template <int N>
SM90 void hold(uint32_t (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+r"(d[i])::"memory");
}

template <int N>
SM90 void hold(uint64_t (&d)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) asm volatile("" : "+l"(d[i])::"memory");
}

// Matrices lie in shared memory as TMA stores boxes of 64 elements of 16 bits with a swizzle of 128 bytes: atoms of 8 rows of
// 128 bytes, at addresses that 1024 divides. A matrix that is read along its rows (its sums run over the 64 elements) goes from
// one group of 8 rows to the next in 1024 bytes; 16 elements further are 32 bytes further.
SM90 uint64_t along_rows(uint32_t at) { return (uint64_t(1) << 62) | (uint64_t(64) << 32) | (uint64_t(1) << 16) | ((at & 0x3FFFF) >> 4); }
// One that is read across its rows (its sums run over the rows) has its next 64 columns `next` bytes further; 16 rows are 2048.
SM90 uint64_t across_rows(uint32_t at, uint32_t next) {
    return (uint64_t(1) << 62) | (uint64_t(64) << 32) | (uint64_t(next >> 4) << 16) | ((at & 0x3FFFF) >> 4);
}

// The same matrix so many bytes further.
SM90 uint64_t further(uint64_t matrix, uint32_t bytes) { return matrix + (bytes >> 4); }

// d = a b (+ d, where `add`), 64 x N in float of 64 x 16 and 16 x N. A thread's d[4 j + 2 h + i] is of row 16 warp + lane / 4 + 8 h
// and column 8 j + 2 (lane % 4) + i. ss: a and b by descriptors, ACROSS 1 for one that is across_rows. rs: a in registers, two
// elements each, which are like d of 16 columns.
template <typename T, int N>
struct Product;

#define SM90_8(op, i) op(d[i]), op(d[i + 1]), op(d[i + 2]), op(d[i + 3]), op(d[i + 4]), op(d[i + 5]), op(d[i + 6]), op(d[i + 7])
#define SM90_32(op, i) SM90_8(op, i), SM90_8(op, i + 8), SM90_8(op, i + 16), SM90_8(op, i + 24)
#define SM90_OF_8(op) SM90_8(op, 0)
#define SM90_OF_16(op) SM90_8(op, 0), SM90_8(op, 8)
#define SM90_OF_32(op) SM90_32(op, 0)
#define SM90_OF_40(op) SM90_32(op, 0), SM90_8(op, 32)
#define SM90_OF_48(op) SM90_OF_40(op), SM90_8(op, 40)
#define SM90_OF_64(op) SM90_32(op, 0), SM90_32(op, 32)
#define SM90_OF_96(op) SM90_OF_64(op), SM90_32(op, 64)
#define SM90_OF_128(op) SM90_OF_96(op), SM90_32(op, 96)
#define SM90_R8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define SM90_R16 SM90_R8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define SM90_R32 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define SM90_R40 SM90_R32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define SM90_R48 SM90_R40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define SM90_R64 SM90_R32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define SM90_R96 SM90_R64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define SM90_R128 SM90_R96 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

#define SM90_PRODUCT(TYPE, NAME, N, COUNT, P0, P1, P2, P3, P4, P5, P6)                                                       \
    template <>                                                                                                              \
    struct Product<TYPE, N> {                                                                                                \
        template <int A_ACROSS, int B_ACROSS>                                                                                \
        SM90 void ss(float (&d)[COUNT], uint64_t a, uint64_t b, int add) {                                                   \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P2 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N               \
                         "k16.f32." NAME "." NAME " {" SM90_R##COUNT "}, %" #P0 ", %" #P1 ", p, 1, 1, %" #P3 ", %" #P4 ";\n}" \
                         : SM90_OF_##COUNT("+f")                                                                             \
                         : "l"(a), "l"(b), "r"(add), "n"(A_ACROSS), "n"(B_ACROSS));                                          \
        }                                                                                                                    \
        template <int A_ACROSS, int B_ACROSS>                                                                                \
        SM90 void first(float (&d)[COUNT], uint64_t a, uint64_t b) {                                                         \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, 0, 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME      \
                         "." NAME " {" SM90_R##COUNT "}, %" #P0 ", %" #P1 ", p, 1, 1, %" #P2 ", %" #P3 ";\n}"                \
                         : SM90_OF_##COUNT("=f")                                                                             \
                         : "l"(a), "l"(b), "n"(A_ACROSS), "n"(B_ACROSS));                                                    \
        }                                                                                                                    \
        template <int B_ACROSS>                                                                                              \
        SM90 void rs(float (&d)[COUNT], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t b, int add) {           \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P5 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N               \
                         "k16.f32." NAME "." NAME " {" SM90_R##COUNT "}, {%" #P0 ", %" #P1 ", %" #P2 ", %" #P3 "}, %" #P4    \
                         ", p, 1, 1, %" #P6 ";\n}"                                                                           \
                         : SM90_OF_##COUNT("+f")                                                                             \
                         : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(add), "n"(B_ACROSS));                             \
        }                                                                                                                    \
    };
#define SM90_PRODUCTS(...)                              \
    SM90_PRODUCT(Bfloat16, "bf16", __VA_ARGS__)    \
    SM90_PRODUCT(Half, "f16", __VA_ARGS__)

SM90_PRODUCTS(16, 8, 8, 9, 10, 11, 12, 13, 14)
SM90_PRODUCTS(32, 16, 16, 17, 18, 19, 20, 21, 22)
SM90_PRODUCTS(64, 32, 32, 33, 34, 35, 36, 37, 38)
SM90_PRODUCTS(80, 40, 40, 41, 42, 43, 44, 45, 46)
SM90_PRODUCTS(96, 48, 48, 49, 50, 51, 52, 53, 54)
SM90_PRODUCTS(128, 64, 64, 65, 66, 67, 68, 69, 70)
SM90_PRODUCTS(192, 96, 96, 97, 98, 99, 100, 101, 102)
SM90_PRODUCTS(256, 128, 128, 129, 130, 131, 132, 133, 134)

// Of numbers of 8 bits, 64 x 32 and 32 x N, both read along their rows: 32 of these are 32 bytes, as 16 of 16 bits are.
#define SM90_BYTE(TYPE, NAME)                                                                                     \
    struct TYPE {                                                                                                 \
        uint8_t bits;                                                                                             \
        static __device__ __forceinline__ uint32_t two(uint16_t both) {                                           \
            uint32_t found;                                                                                       \
            asm("cvt.rn.f16x2." NAME "x2 %0, %1;" : "=r"(found) : "h"(both));                                     \
            return found;                                                                                         \
        }                                                                                                         \
        __device__ __forceinline__ explicit operator float() const { return Half::widened(uint16_t(two(bits))); } \
    };
SM90_BYTE(E4M3, "e4m3")
SM90_BYTE(E5M2, "e5m2")
// Two of them, in the lower half of `both`, as float16.
template <typename E>
SM90 uint32_t widened(uint32_t both) { return E::two(uint16_t(both)); }
#define SM90_PRODUCT_OF_BYTES(TYPE, NAME, N, COUNT, P0, P1, P2)                                                          \
    template <>                                                                                                          \
    struct Product<TYPE, N> {                                                                                            \
        template <int, int>                                                                                              \
        SM90 void ss(float (&d)[COUNT], uint64_t a, uint64_t b, int add) {                                               \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P2 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N           \
                         "k32.f32." NAME "." NAME " {" SM90_R##COUNT "}, %" #P0 ", %" #P1 ", p, 1, 1;\n}"                \
                         : SM90_OF_##COUNT("+f")                                                                         \
                         : "l"(a), "l"(b), "r"(add));                                                                    \
        }                                                                                                                \
    };
#define SM90_PRODUCTS_OF_BYTES(...)                 \
    SM90_PRODUCT_OF_BYTES(E4M3, "e4m3", __VA_ARGS__) \
    SM90_PRODUCT_OF_BYTES(E5M2, "e5m2", __VA_ARGS__)

SM90_PRODUCTS_OF_BYTES(64, 32, 32, 33, 34)
SM90_PRODUCTS_OF_BYTES(80, 40, 40, 41, 42)
SM90_PRODUCTS_OF_BYTES(128, 64, 64, 65, 66)

// Numbers of columns, as three floats of few bits each and a zero, 16 bytes a column at `at`; `zeros` bytes further there are as
// many zeros. broadcast: d of 64 rows, each of which has these numbers: ones times the three (in TF32, exact). Without a load a
// thread, and in the order of products.
SM90 uint64_t numbers_of_columns(uint32_t at, uint32_t zeros) {
    return (uint64_t(128 >> 4) << 32) | (uint64_t(zeros >> 4) << 16) | ((at & 0x3FFFF) >> 4);
}
#define SM90_BROADCAST(N, COUNT, P0, P1, P2)                                                                                 \
    SM90 void broadcast(float (&d)[COUNT], uint64_t numbers) {                                                               \
        const uint32_t one = threadIdx.x % 4 < 3 ? 0x3F800000 : 0;                                                           \
        asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, 0, 0;\nwgmma.mma_async.sync.aligned.m64n" #N                          \
                     "k8.f32.tf32.tf32 {" SM90_R##COUNT "}, {%" #P0 ", %" #P0 ", %" #P1 ", %" #P1 "}, %" #P2 ", p, 1, 1;\n}" \
                     : SM90_OF_##COUNT("=f")                                                                                 \
                     : "r"(one), "r"(0), "l"(numbers));                                                                      \
    }
SM90_BROADCAST(64, 32, 32, 33, 34)
SM90_BROADCAST(128, 64, 64, 65, 66)

// ---- products of a warp (mma) ----------------------------------------------------------------------------------------------

// Four matrices of 8 x 8 elements of 16 bits, whose rows lie at the addresses of lanes 0-7, 8-15, 16-23 and 24-31. A thread gets of
// each elements 2 (lane % 4) and the next of row lane / 4; ACROSS: of column lane / 4.
template <bool ACROSS>
SM90 void load_matrices(uint32_t (&x)[4], uint32_t at) {
    if constexpr (ACROSS)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared::cta.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                     : "r"(at)
                     : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared::cta.b16 {%0, %1, %2, %3}, [%4];"
                     : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                     : "r"(at)
                     : "memory");
}

// d += a b, 16 x 8 in float of 16 x 16 and 16 x 8. A thread's d[2 h + i] is of row lane / 4 + 8 h and column 2 (lane % 4) + i; its a[h]
// of row lane / 4 + 8 h and columns 2 (lane % 4) and the next, a[2 + h] of 8 columns further; b0 and b1 are as a[0] and a[2], of what
// b has as columns.
#define SM90_MULTIPLY_ADD(TYPE, NAME)                                                                                       \
    SM90 void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, TYPE) {                         \
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." NAME "." NAME                                                \
                     ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                                 \
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                       \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));                                       \
    }
SM90_MULTIPLY_ADD(Bfloat16, "bf16")
SM90_MULTIPLY_ADD(Half, "f16")
template <typename T>
SM90 void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) { multiply_add(d, a, b0, b1, T()); }

// ---- launches that begin before those that they depend on have ended --------------------------------------------------------

// Wait until the launches before this one have ended and what they wrote is there; let the next one begin, and wait in turn.
SM90 void launches_before_done() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
SM90 void next_launch_may_begin() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// ---- memory ---------------------------------------------------------------------------------------------------------------

// Four matrices of 8 x 8 elements of 16 bits to shared memory, across: a thread has elements 2 (lane % 4) and the next of column
// lane / 4 of each; their rows go to the addresses of lanes 0-7, 8-15, 16-23 and 24-31.
SM90 void store_across(uint32_t at, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared::cta.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(a), "r"(b), "r"(c),
                 "r"(d)
                 : "memory");
}
SM90 int4 load_four(uint32_t at) {
    int4 x;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "r"(at) : "memory");
    return x;
}
SM90 void store_four(uint32_t at, int4 x) {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}
SM90 float load_one(uint32_t at) {
    float x;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(at) : "memory");
    return x;
}
SM90 float2 load_two(uint32_t at) {
    float2 x;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x.x), "=f"(x.y) : "r"(at) : "memory");
    return x;
}
SM90 void store_one(uint32_t at, uint32_t x) { asm volatile("st.shared.b32 [%0], %1;" ::"r"(at), "r"(x) : "memory"); }
SM90 void store_one(uint32_t at, float x) { asm volatile("st.shared.f32 [%0], %1;" ::"r"(at), "f"(x) : "memory"); }
// Add four floats to global memory, without waiting.
SM90 void add_four(float* to, float a, float b, float c, float d) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}

// ---- counts in global memory, by which blocks wait for one another -----------------------------------------------------------

// Add, after what this thread has written and what is known to it of others' writing.
SM90 void add_count(int* count, int x) {
    asm volatile("red.release.gpu.global.add.s32 [%0], %1;" ::"l"(count), "r"(x) : "memory");
}

// Wait until so many were added. What was written before is there then for who reads it by way of the L2 cache alone: for the copy
// engine, and for sums that are added to. It is no acquire, which would empty the L1 cache, where all threads of the multiprocessor
// have registers that they have put aside.
SM90 void wait_count(const int* count, int so_many) {
    for (int found;;) {
        asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(found) : "l"(count) : "memory");
        if (found >= so_many) break;
        __nanosleep(100);
    }
    asm volatile("fence.proxy.async;" ::: "memory");
}

// ---- numbers --------------------------------------------------------------------------------------------------------------

#define SM90_OF_ONE(NAME, INSTRUCTION) \
    SM90 float NAME(float x) { float y; asm(INSTRUCTION " %0, %1;" : "=f"(y) : "f"(x)); return y; }
SM90_OF_ONE(exp2_approx, "ex2.approx.ftz.f32")
SM90_OF_ONE(reciprocal_approx, "rcp.approx.ftz.f32")

// A product that is rounded: the compiler does not make it part of a sum.
SM90 float rounded_product(float a, float b) { return __fmul_rn(a, b); }

// Two floats, rounded to nearest, the first in the lower half.
#define SM90_PACK(TYPE, NAME)                                                            \
    SM90 uint32_t pack(float first, float second, TYPE) {                                \
        uint32_t both;                                                                   \
        asm("cvt.rn." NAME "x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first)); \
        return both;                                                                     \
    }
SM90_PACK(Bfloat16, "bf16")
SM90_PACK(Half, "f16")
template <typename T>
SM90 uint32_t pack(float first, float second) { return pack(first, second, T()); }

}  // namespace sm90
