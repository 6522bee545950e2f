// What CUDA C++ has no words for on sm_90a: barriers in shared memory, TMA, and products of warpgroups, as one instruction each.
// PTX ISA 8.0, https://docs.nvidia.com/cuda/parallel-thread-execution.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#define SM90 static __device__ __forceinline__

namespace sm90 {

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

// ---- named barriers of a block's threads; 0 is __syncthreads' -------------------------------------------------------------

SM90 void named_sync(int number, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory"); }
SM90 void named_arrive(int number, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory"); }

// ---- registers of a warpgroup ---------------------------------------------------------------------------------------------

template <int COUNT>
SM90 void more_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT)); }
template <int COUNT>
SM90 void fewer_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT)); }

// ---- the copy engine (TMA) ------------------------------------------------------------------------------------------------

SM90 void prefetch_map(const CUtensorMap* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }

// A box of a tensor of four dimensions, whose first coordinate is that of the innermost one, to shared memory.
SM90 void load_box(uint32_t to, const CUtensorMap* map, uint32_t barrier, int c0, int c1, int c2, int c3) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(to),
        "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
        : "memory");
}

// Boxes of 64 columns beside one another, one after another: the third dimension counts them.
SM90 void load_boxes(uint32_t to, const CUtensorMap* map, uint32_t barrier, int row, int head, int batch) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %3, %5, %6}], [%2];" ::"r"(to),
        "l"(map), "r"(barrier), "r"(0), "r"(row), "r"(head), "r"(batch)
        : "memory");
}

// Bytes that follow one another, to shared memory.
SM90 void load_bytes(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

// Add floats that follow one another in shared memory to as many in global memory; one group of copies.
SM90 void add_floats(float* to, uint32_t from, uint32_t bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
                 : "memory");
}

SM90 void copies_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until all but PENDING groups have read their shared memory.
template <int PENDING>
SM90 void copies_wait_read() { asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory"); }
template <int PENDING>
SM90 void copies_wait() { asm volatile("cp.async.bulk.wait_group %0;" ::"n"(PENDING) : "memory"); }

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

#define SM90_D8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define SM90_D32_AT(i) SM90_D8(i), SM90_D8(i + 8), SM90_D8(i + 16), SM90_D8(i + 24)
#define SM90_D32 SM90_D32_AT(0)
#define SM90_D40 SM90_D32, SM90_D8(32)
#define SM90_D64 SM90_D32, SM90_D32_AT(32)
#define SM90_D88 SM90_D64, SM90_D8(64), SM90_D8(72), SM90_D8(80)
#define SM90_D128 SM90_D64, SM90_D32_AT(64), SM90_D32_AT(96)
#define SM90_R32 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define SM90_R40 SM90_R32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define SM90_R64 SM90_R40 ", %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define SM90_R88 SM90_R64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87"
#define SM90_R128 SM90_R88 ", %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

#define SM90_PRODUCT(TYPE, NAME, N, COUNT, P0, P1, P2, P3, P4, P5, P6)                                                       \
    template <>                                                                                                              \
    struct Product<TYPE, N> {                                                                                                \
        template <int A_ACROSS, int B_ACROSS>                                                                                \
        SM90 void ss(float (&d)[COUNT], uint64_t a, uint64_t b, int add) {                                                   \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P2 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N               \
                         "k16.f32." NAME "." NAME " {" SM90_R##COUNT "}, %" #P0 ", %" #P1 ", p, 1, 1, %" #P3 ", %" #P4 ";\n}" \
                         : SM90_D##COUNT                                                                                     \
                         : "l"(a), "l"(b), "r"(add), "n"(A_ACROSS), "n"(B_ACROSS));                                          \
        }                                                                                                                    \
        template <int B_ACROSS>                                                                                              \
        SM90 void rs(float (&d)[COUNT], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t b, int add) {           \
            asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P5 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N               \
                         "k16.f32." NAME "." NAME " {" SM90_R##COUNT "}, {%" #P0 ", %" #P1 ", %" #P2 ", %" #P3 "}, %" #P4    \
                         ", p, 1, 1, %" #P6 ";\n}"                                                                           \
                         : SM90_D##COUNT                                                                                     \
                         : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(add), "n"(B_ACROSS));                             \
        }                                                                                                                    \
    };
#define SM90_PRODUCTS(N, COUNT, ...)                                     \
    SM90_PRODUCT(__nv_bfloat16, "bf16", N, COUNT, __VA_ARGS__)           \
    SM90_PRODUCT(__half, "f16", N, COUNT, __VA_ARGS__)

SM90_PRODUCTS(64, 32, 32, 33, 34, 35, 36, 37, 38)
SM90_PRODUCTS(80, 40, 40, 41, 42, 43, 44, 45, 46)
SM90_PRODUCTS(128, 64, 64, 65, 66, 67, 68, 69, 70)
SM90_PRODUCTS(176, 88, 88, 89, 90, 91, 92, 93, 94)
SM90_PRODUCTS(256, 128, 128, 129, 130, 131, 132, 133, 134)

// ---- numbers --------------------------------------------------------------------------------------------------------------

SM90 float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Two floats, rounded to nearest, the first in the lower half.
SM90 uint32_t pack(float first, float second, __nv_bfloat16) {
    uint32_t both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
    return both;
}
SM90 uint32_t pack(float first, float second, __half) {
    uint32_t both;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
    return both;
}
template <typename T>
SM90 uint32_t pack(float first, float second) { return pack(first, second, T()); }

}  // namespace sm90
