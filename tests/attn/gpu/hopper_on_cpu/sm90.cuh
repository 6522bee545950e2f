// What opkit/attn/gpu/hopper/cuda/sm90.cuh has, on the machine of machine.hpp.
#pragma once

#include "cuda.h"

#define SM90 static inline
#define SM90_NUMBERS(NAME, ...) \
    extern "C" { extern const int NAME##_numbers[] = {__VA_ARGS__}; extern const int NAME##_count = sizeof(NAME##_numbers) / 4; }
#define SM90_KERNEL(NAME, BOUNDS, CALL, ...)                                                                                  \
    SM90_NUMBERS(NAME, __VA_ARGS__)                                                                                           \
    extern "C" int NAME(const Problem* problem, const Described* described, int count, const unsigned* grid, unsigned seed) { \
        return launch<Problem, Maps>(CALL, problem, described, count, grid, NAME##_numbers[0], NAME##_numbers[1], seed);      \
    }

namespace sm90 {

using Half = ::__half;
using Bfloat16 = ::__nv_bfloat16;
using machine::self;
using T = ELEMENT;

SM90 unsigned char* dynamic_shared() { return self().block->shared.data(); }
SM90 uint32_t shared(const void* at) {
    return machine::BASE + static_cast<uint32_t>(static_cast<const unsigned char*>(at) - self().block->shared.data());
}

// ---- barriers -------------------------------------------------------------------------------------------------------------------

SM90 machine::Barrier& barrier_at(machine::Block& block, uint32_t address) {
    const auto found = block.barriers.find(address);
    if (found == block.barriers.end()) throw std::runtime_error("a barrier that nobody made");
    return found->second;
}
SM90 void barrier_init(uint32_t barrier, uint32_t arrivals) {
    self().block->barriers[barrier] = {int(arrivals), int(arrivals), 0, 0};
}
SM90 void barriers_ready() {}
SM90 void arrive(uint32_t barrier) {
    auto& found = barrier_at(*self().block, barrier);
    if (found.pending-- == 0) throw std::runtime_error("a barrier at which too many arrive");
    found.settle();
    machine::breathe();
}
SM90 void expect_bytes(uint32_t barrier, uint32_t bytes) {
    barrier_at(*self().block, barrier).bytes += bytes;
    arrive(barrier);
}
SM90 void wait(uint32_t barrier, uint32_t parity) {
    auto& found = barrier_at(*self().block, barrier);
    machine::wait_until([&found, parity] { return found.phase != parity; });
}
SM90 bool elected() { return threadIdx.x % 32 == 0; }
SM90 int thread_now() { return threadIdx.x; }
SM90 void named_sync(int number, int threads) { machine::meet_named(number, threads); }
SM90 void named_arrive(int number, int threads) { machine::arrive_named(number, threads); }
template <int COUNT>
SM90 void more_registers() {}
template <int COUNT>
SM90 void fewer_registers() {}

// ---- copies -----------------------------------------------------------------------------------------------------------------------

SM90 void prefetch_map(const CUtensorMap*) {}
// Goes through the elements of a box: where each is in the tensor, null outside of it, and where in shared memory.
template <typename F>
void each_element(machine::Block& block, const CUtensorMap& map, std::array<int, 5> first, uint32_t shared, F copy) {
    const int* box = map.box;
    const int count = box[0] * box[1] * box[2] * box[3] * box[4];
    for (int number = 0; number < count; number++) {
        int64_t offset = 0;
        bool inside = true;
        for (int d = 0, rest = number; d < 5; rest /= box[d++]) {
            const int64_t place = first[d] + rest % box[d];
            inside &= place >= 0 && place < map.sizes[d], offset += place * map.strides[d];
        }
        copy(inside ? const_cast<unsigned char*>(map.data) + offset : nullptr,
             machine::at(block, machine::swizzled(shared + map.element * number)));
    }
}
SM90 void load_box(uint32_t to, const CUtensorMap* map, uint32_t barrier, int row, int box, int head, int batch, int column = 0) {
    machine::Block& block = *self().block;
    machine::copy_later([=, &block, map = *map] {  // which lives longer than the thread here, as it does there
        each_element(block, map, {column, row, box, head, batch}, to, [&map](const unsigned char* from, unsigned char* at) {
            if (from) std::memcpy(at, from, map.element);
            else std::memset(at, 0, map.element);
        });
        const int* size = map.box;
        barrier_at(block, barrier).bytes -= map.element * size[0] * size[1] * size[2] * size[3] * size[4];
        barrier_at(block, barrier).settle();
    });
}
SM90 void load_boxes(uint32_t to, const CUtensorMap* map, uint32_t barrier, int row, int head, int batch) {
    load_box(to, map, barrier, row, 0, head, batch);
}

SM90 void load_bytes(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
    machine::Block& block = *self().block;
    machine::copy_later([=, &block] {
        std::memcpy(machine::at(block, to), from, bytes);
        barrier_at(block, barrier).bytes -= bytes;
        barrier_at(block, barrier).settle();
    });
}

// Stores are copies; a thread counts its own, by the times that it committed some.
template <typename F>
SM90 void store_later(F copy) {
    auto& me = self();
    const int group = me.store_groups;
    me.stores[group]++;
    machine::copy_later([copy, &me, group] {
        copy();
        if (--me.stores[group] == 0) me.stores.erase(group);
    });
}
SM90 void store_bytes(void* to, uint32_t from, uint32_t bytes) {
    machine::Block& block = *self().block;
    store_later([=, &block] { std::memcpy(to, machine::at(block, from), bytes); });
}
SM90 void store_box(const CUtensorMap* map, uint32_t from, int row, int box, int head, int batch, int column = 0) {
    machine::Block& block = *self().block;
    store_later([=, &block, map = *map] {
        each_element(block, map, {column, row, box, head, batch}, from, [&map](unsigned char* to, const unsigned char* at) {
            if (to) std::memcpy(to, at, map.element);
        });
    });
}
SM90 void stores_commit() { self().store_groups++; }
template <int LATER>
SM90 void stores_done() {
    auto& me = self();
    machine::wait_until([&me] { return me.stores.empty() || me.stores.begin()->first >= me.store_groups - LATER; });
}
SM90 void stores_read() { stores_done<0>(); }
SM90 void fence_stores() {}

// ---- products ---------------------------------------------------------------------------------------------------------------------

SM90 void products_fence() {}

SM90 uint64_t along_rows(uint32_t at) { return (uint64_t(64) << 32) | (uint64_t(1) << 16) | ((at & 0x3FFFF) >> 4); }
SM90 uint64_t across_rows(uint32_t at, uint32_t next) {
    return (uint64_t(64) << 32) | (uint64_t(next >> 4) << 16) | ((at & 0x3FFFF) >> 4);
}
SM90 uint64_t further(uint64_t matrix, uint32_t bytes) { return matrix + (bytes >> 4); }

// Numbers of 8 bits.
struct E4M3 {
    uint8_t bits;
    explicit operator float() const {
        const int power = bits >> 3 & 15, rest = bits & 7;
        if ((bits & 127) == 127) return NAN;
        const float size = power ? std::ldexp(8.f + rest, power - 10) : std::ldexp(float(rest), -9);
        return bits & 128 ? -size : size;
    }
};
struct E5M2 {
    uint8_t bits;
    explicit operator float() const {
        const uint16_t half = uint16_t(bits) << 8;
        _Float16 found;
        std::memcpy(&found, &half, 2);
        return float(found);
    }
};

template <typename E>
SM90 uint32_t widened(uint32_t both) {
    const _Float16 two[] = {_Float16(float(E{uint8_t(both)})), _Float16(float(E{uint8_t(both >> 8)}))};
    uint32_t found;
    std::memcpy(&found, two, 4);
    return found;
}

template <typename E>
SM90 float read(const unsigned char* at) {
    E found;
    std::memcpy(&found, at, sizeof(E));
    return float(found);
}
SM90 float element(const machine::Product& product, uint64_t matrix, bool across, int i, int k) {
    const uint32_t start = (matrix & 0x3FFF) << 4, next = (matrix >> 16 & 0x3FFF) << 4, group = (matrix >> 32 & 0x3FFF) << 4;
    const uint32_t place = across ? i / 64 * next + i % 64 * 2 + k / 8 * group + k % 8 * 128 : i / 8 * group + i % 8 * 128 + k * (32 / product.depth);
    return product.read(machine::at(*self().block, machine::swizzled(start + place)));
}
template <typename E>
SM90 float half_of(uint32_t both, int which) {
    const uint16_t bits = both >> 16 * which;
    E found;
    std::memcpy(&found, &bits, 2);
    return float(found);
}

// What a thread has of a product, d, once all of its warp have begun it.
template <typename E>
SM90 void finish(const machine::Product& product, size_t number) {
    const int lane = threadIdx.x % 32, first = threadIdx.x % 128 / 32 * 16 + lane / 4;
    if (product.broadcast) {
        for (int c = 0; c < product.columns / 4; c++) {
            float parts[3];
            const int column = c / 2 * 8 + lane % 4 * 2 + c % 2;
            std::memcpy(parts, machine::at(*self().block, ((product.b & 0x3FFF) << 4) + column * 16), 12);
            for (int h = 0; h < 2; h++) product.d[c / 2 * 4 + 2 * h + c % 2] = parts[0] + parts[1] + parts[2];
        }
        return;
    }
    const int depth = product.depth;
    std::vector<float> right(product.columns / 4 * depth);
    for (int c = 0; c < product.columns / 4; c++)
        for (int k = 0; k < depth; k++)
            right[c * depth + k] = element(product, product.b, product.b_across, c / 2 * 8 + lane % 4 * 2 + c % 2, k);
    for (int h = 0; h < 2; h++) {
        float left[32];
        for (int k = 0; k < depth; k++) {
            const auto& mate = self().warp->lanes[lane / 4 * 4 + k % 8 / 2]->products[number];
            left[k] = product.registers ? half_of<E>(mate.left[k / 8 * 2 + h], k % 2) : element(product, product.a, product.a_across, first + 8 * h, k);
        }
        for (int c = 0; c < product.columns / 4; c++) {
            double sum = 0;
            for (int k = 0; k < depth; k++) sum += double(left[k]) * right[c * depth + k];
            float& d = product.d[c / 2 * 4 + 2 * h + c % 2];
            d = float(sum + (product.add ? d : 0));
        }
    }
}

// Of the products that were begun those of all groups but the last `pending`.
template <typename E>
SM90 void finish_all(int pending) {
    auto& me = self();
    size_t count = 0;
    while (count < me.products.size() && me.products[count].group < me.groups - pending) count++;
    machine::meet_warp();
    for (size_t i = 0; i < count; i++) finish<E>(me.products[i], i);
    machine::meet_warp();
    me.products.erase(me.products.begin(), me.products.begin() + count);
}
SM90 void products_commit() {
    self().groups++;
    if (machine::exchange(machine::here().random())[0] % 2) finish_all<T>(0);
}
template <int PENDING>
SM90 void products_wait() { finish_all<T>(PENDING); }

template <typename V>
SM90 void hold(V&) {}

template <typename E, int N>
struct Product {
    template <int A_ACROSS, int B_ACROSS>
    SM90 void ss(float (&d)[N / 2], uint64_t a, uint64_t b, int add) {
        self().products.push_back({d, N, self().groups, false, A_ACROSS != 0, B_ACROSS != 0, add != 0, {}, a, b, 32 / sizeof(E), read<E>});
    }
    template <int A_ACROSS, int B_ACROSS>
    SM90 void first(float (&d)[N / 2], uint64_t a, uint64_t b) { ss<A_ACROSS, B_ACROSS>(d, a, b, 0); }
    template <int B_ACROSS>
    SM90 void rs(float (&d)[N / 2], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t b, int add) {
        self().products.push_back({d, N, self().groups, true, false, B_ACROSS != 0, add != 0, {a0, a1, a2, a3}, 0, b, 16, read<E>});
    }
};

SM90 uint64_t numbers_of_columns(uint32_t at, uint32_t zeros) { return uint64_t(zeros >> 4) << 16 | at >> 4; }
template <int N>
SM90 void broadcast(float (&d)[N], uint64_t numbers) {
    self().products.push_back({d, 2 * N, self().groups, false, false, false, false, {}, 0, numbers, 0, nullptr, true});
}

// ---- products of a warp -------------------------------------------------------------------------------------------------------------

template <bool ACROSS>
SM90 void load_matrices(uint32_t (&x)[4], uint32_t at) {
    const int lane = threadIdx.x % 32;
    const auto places = machine::exchange(at);
    for (int matrix = 0; matrix < 4; matrix++)
        for (int i = 0; i < 2; i++) {
            const int row = ACROSS ? 2 * (lane % 4) + i : lane / 4, column = ACROSS ? lane / 4 : 2 * (lane % 4) + i;
            uint16_t element;
            std::memcpy(&element, machine::at(*self().block, places[8 * matrix + row] + column * 2), 2);
            x[matrix] = i ? x[matrix] | uint32_t(element) << 16 : element;
        }
    machine::meet_warp();
}
template <typename E>
SM90 void multiply_add(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    const int lane = threadIdx.x % 32;
    std::vector<uint32_t> left[4], right[2] = {machine::exchange(b0), machine::exchange(b1)};
    for (int i = 0; i < 4; i++) left[i] = machine::exchange(a[i]);
    for (int i = 0; i < 4; i++) {
        double sum = d[i];
        for (int k = 0; k < 16; k++)
            sum += double(half_of<E>(left[k / 8 * 2 + i / 2][lane / 4 * 4 + k % 8 / 2], k % 2)) *
                   half_of<E>(right[k / 8][(lane % 4 * 2 + i % 2) * 4 + k % 8 / 2], k % 2);
        d[i] = float(sum);
    }
}

SM90 void launches_before_done() {}
SM90 void next_launch_may_begin() {}

// ---- memory -------------------------------------------------------------------------------------------------------------------------

SM90 void store_across(uint32_t at, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    const int lane = threadIdx.x % 32;
    const auto places = machine::exchange(at);
    const uint32_t given[] = {a, b, c, d};
    for (int matrix = 0; matrix < 4; matrix++)
        for (int i = 0; i < 2; i++) {
            const uint16_t element = given[matrix] >> 16 * i;
            std::memcpy(machine::at(*self().block, places[8 * matrix + 2 * (lane % 4) + i] + lane / 4 * 2), &element, 2);
        }
    machine::meet_warp();
}
SM90 int4 load_four(uint32_t at) {
    int4 x;
    std::memcpy(&x, machine::at(*self().block, at), 16);
    return x;
}
SM90 void store_four(uint32_t at, int4 x) { std::memcpy(machine::at(*self().block, at), &x, 16); }
SM90 float load_one(uint32_t at) {
    float x;
    std::memcpy(&x, machine::at(*self().block, at), 4);
    return x;
}
SM90 float2 load_two(uint32_t at) { return {load_one(at), load_one(at + 4)}; }
SM90 void store_one(uint32_t at, uint32_t x) { std::memcpy(machine::at(*self().block, at), &x, 4); }
SM90 void store_one(uint32_t at, float x) { std::memcpy(machine::at(*self().block, at), &x, 4); }
SM90 void add_four(float* to, float a, float b, float c, float d) { to[0] += a, to[1] += b, to[2] += c, to[3] += d; }

SM90 void add_count(int* count, int x) {
    *count += x;
    machine::breathe();
}
SM90 void wait_count(const int* count, int so_many) {
    machine::wait_until([=] { return *count >= so_many; });
}

// ---- numbers ----------------------------------------------------------------------------------------------------------------------

SM90 float exp2_approx(float x) {
    const float y = std::exp2(x);
    return y < 1.17549435e-38f ? 0 : y;
}
SM90 float reciprocal_approx(float x) { return 1 / x; }
SM90 float rounded_product(float a, float b) { return a * b; }
template <typename E>
SM90 uint32_t pack(float first, float second) {
    const E both[] = {E(first), E(second)};
    uint32_t found;
    std::memcpy(&found, both, 4);
    return found;
}

}  // namespace sm90
