// A GPU of compute capability 9.0 as the kernels in CUDA C++ see it, on one thread of a processor: threads of blocks, warps and
// named barriers, barriers in shared memory, TMA, and products of warpgroups. It says nothing of speed.
//
// Whatever is asynchronous happens at a random time: products when they are begun or when they are waited for, copies some time
// after they are begun, soon or late. Who waits for too little, or frees a buffer too early, gets wrong numbers in some order of
// events; who waits for what never comes gets an error.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <vector>

namespace machine {

constexpr uint32_t SHARED = 232448, BASE = 512;  // bytes that a block may have; where they begin

struct Index {
    unsigned x = 0, y = 0, z = 0;
};

// A barrier in shared memory: who has still to arrive in this phase, and how many bytes are still to come.
struct Barrier {
    int arrivals = 0, pending = 0;
    int64_t bytes = 0;
    uint32_t phase = 0;

    void settle() {
        if (pending == 0 && bytes == 0) phase ^= 1, pending = arrivals;
    }
};

// A product that was begun: 64 x N of 64 x 16 and 16 x N. A matrix is read along its rows or across them, by a descriptor.
struct Product {
    float* d;
    int columns, group;
    bool registers, a_across, b_across, add;
    uint32_t left[4];
    uint64_t a, b;
    int depth;                            // how many products each sum has
    float (*read)(const unsigned char*);  // an element in shared memory
    bool broadcast = false;  // numbers of columns, in place of a product
};

struct Thread;

struct Warp {
    Thread* lanes[32] = {};
    int arrived = 0, members = 0;
    unsigned pace = 1;  // of so many times that it could go on it does once
    uint64_t generation = 0;
    uint64_t values[2][32] = {};
};

struct Named {
    int arrived = 0;
    uint64_t generation = 0;
};

struct Block {
    Index index;
    std::vector<unsigned char> shared = std::vector<unsigned char>(SHARED + 1024);
    std::map<uint32_t, Barrier> barriers;
    std::map<int, Named> named;
    std::vector<Warp> warps;
    int threads = 0;
};

struct Thread {
    Index thread;
    Block* block = nullptr;
    Warp* warp = nullptr;
    ucontext_t context{};  // to begin with; then `place`, which takes no call of the system
    jmp_buf place;
    std::unique_ptr<char[]> stack;
    bool began = false;
    std::function<bool()> waits;  // for this to be true
    bool ended = false, breathes = false;  // breathes: it goes on by itself
    std::vector<Product> products;
    int groups = 0;  // of products, that were committed
    std::map<int, int> stores;  // of the copy engine that are under way, by the group
    int store_groups = 0;       // that were committed
};

struct Machine {
    jmp_buf scheduler;
    Thread* now = nullptr;
    Index grid;
    std::vector<std::function<void()>> copies;
    unsigned patience = 1;  // how many threads go on, on average, before a copy is made
    std::mt19937 random;
    std::exception_ptr error;
};

inline Machine& here() {
    static Machine machine;
    return machine;
}
inline Thread& self() { return *here().now; }

__attribute__((noinline, noipa)) inline void let_others(Thread& me) {
    if (!_setjmp(me.place)) _longjmp(here().scheduler, 1);
}
template <typename F>
void wait_until(F condition) {
    if (condition()) return;
    Thread& me = self();
    me.waits = condition;
    let_others(me);
}

// Let others go on, now and then.
inline void breathe() {
    if (here().random() % 4) return;
    self().waits = [left = here().random() % 32]() mutable { return left == 0 || --left == 0; };
    self().breathes = true;
    let_others(self());
}

inline void copy_later(std::function<void()> copy) { here().copies.push_back(std::move(copy)); }

inline unsigned char* at(Block& block, uint32_t address) {
    if (address < BASE || address >= BASE + SHARED) throw std::runtime_error("an address outside of shared memory");
    return block.shared.data() + (address - BASE);
}

// Where a byte of a matrix with a swizzle of 128 bytes lies.
inline uint32_t swizzled(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }

inline void meet_warp() {
    Warp& warp = *self().warp;
    const uint64_t generation = warp.generation;
    if (++warp.arrived == warp.members) warp.arrived = 0, warp.generation++;
    wait_until([&warp, generation] { return warp.generation != generation; });
}

// The values that the threads of a warp give.
template <typename V>
std::vector<V> exchange(V value) {
    Warp& warp = *self().warp;
    const auto side = warp.generation & 1;
    uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof(V));
    warp.values[side][self().thread.x % 32] = bits;
    meet_warp();
    std::vector<V> found(32);
    for (int i = 0; i < 32; i++) std::memcpy(&found[i], &warp.values[side][i], sizeof(V));
    return found;
}

inline void arrive_named(int number, int threads) {
    Named& barrier = self().block->named[number];
    if (++barrier.arrived == threads) barrier.arrived = 0, barrier.generation++;
}
inline void meet_named(int number, int threads) {
    Named& barrier = self().block->named[number];
    const uint64_t generation = barrier.generation;
    arrive_named(number, threads);
    wait_until([&barrier, generation] { return barrier.generation != generation; });
}

// ---- running ----------------------------------------------------------------------------------------------------------------

inline std::function<void()>& body() {
    static std::function<void()> kernel;
    return kernel;
}

inline void begin_thread() {
    try {
        body()();
    } catch (...) {
        here().error = std::current_exception();
    }
    self().ended = true;
    _longjmp(here().scheduler, 1);
}

inline bool run_a_copy(Machine& machine) {
    if (machine.copies.empty()) return false;
    const size_t chosen = machine.random() % machine.copies.size();
    auto copy = std::move(machine.copies[chosen]);
    machine.copies.erase(machine.copies.begin() + chosen);
    copy();
    return true;
}

// Let a thread run until it waits.
__attribute__((noinline, noipa)) inline void go_on(Machine& machine, Thread& thread) {
    if (_setjmp(machine.scheduler)) return;
    if (thread.began) _longjmp(thread.place, 1);
    thread.began = true;
    setcontext(&thread.context);
}

// Run a kernel's blocks, all at once, in an order that follows from `seed`; but for 0, some warps are slow.
inline void run(const unsigned (&size)[3], int threads, unsigned seed, std::function<void()> kernel) {
    Machine& machine = here();
    machine.random.seed(seed);
    machine.patience = 16u << machine.random() % 4 * 3;
    machine.grid = {size[0], size[1], size[2]};
    machine.copies.clear();
    machine.error = nullptr;
    body() = std::move(kernel);
    std::vector<std::unique_ptr<Block>> grid;
    std::vector<std::unique_ptr<Thread>> all;
    for (unsigned b = 0; b < size[0] * size[1] * size[2]; b++) {
        grid.push_back(std::make_unique<Block>());
        Block& block = *grid.back();
        block.index = {b % size[0], b / size[0] % size[1], b / size[0] / size[1]}, block.threads = threads, block.warps.resize(threads / 32);
        std::fill(block.shared.begin(), block.shared.end(), 0xFF);  // NaN: what was never written
        for (Warp& warp : block.warps) warp.pace = seed ? 1u << machine.random() % 5 : 1;
        for (int t = 0; t < threads; t++) {
            all.push_back(std::make_unique<Thread>());
            Thread& thread = *all.back();
            thread.thread.x = t, thread.block = &block, thread.warp = &block.warps[t / 32];
            thread.warp->lanes[t % 32] = &thread, thread.warp->members++;
            constexpr size_t STACK = 1 << 16;
            thread.stack.reset(new char[STACK]);
            getcontext(&thread.context);
            thread.context.uc_stack = {thread.stack.get(), 0, STACK};
            makecontext(&thread.context, reinterpret_cast<void (*)()>(begin_thread), 0);
        }
    }
    std::vector<Thread*> order;
    for (auto& thread : all) order.push_back(thread.get());
    while (!order.empty()) {
        bool moved = false;
        std::shuffle(order.begin(), order.end(), machine.random);
        for (Thread* thread : order) {
            if (machine.random() % machine.patience == 0) moved |= run_a_copy(machine);
            if (thread->waits && !thread->waits()) {
                moved |= thread->breathes;
                continue;
            }
            if (machine.random() % thread->warp->pace) {
                moved = true;
                continue;
            }
            thread->waits = nullptr, thread->breathes = false;
            machine.now = thread;
            go_on(machine, *thread);
            if (machine.error) std::rethrow_exception(machine.error);
            moved = true;
        }
        order.erase(std::remove_if(order.begin(), order.end(), [](Thread* thread) { return thread->ended; }), order.end());
        if (!moved && !run_a_copy(machine)) throw std::runtime_error("all threads wait for what never comes");
    }
    while (run_a_copy(machine)) {}
}

}  // namespace machine
