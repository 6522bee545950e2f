// What queries see, as bits of keys: what hides logits, and the parts of which a mask's program is put together, of which
// opkit/attn/gpu/hopper/forward_kinds.py writes an expression, MASK_PROGRAM.
#pragma once

#include "forward_tiles.cuh"

namespace {

using namespace sm90;

// Of a thread's columns 8 * i + j of a row, j < 2, those up to `last`: bits 2 * i + j, of which several are tested at once.
SM90 uint32_t columns_to(int last) {
    const int count = last < 0 ? 0 : min(last / 8 * 2 + min(last % 8 + 1, 2), 32);
    return count < 32 ? (1u << count) - 1 : ~0u;
}

template <int N>
SM90 void hide(float (&s)[N], int half, uint32_t seen) {
    static_assert(N / 2 <= 32);
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
        float& logit = s[i / 2 * 4 + 2 * half + i % 2];
        logit = seen >> i & 1 ? logit : -INFINITY;
    }
}

// Some columns, COUNT as columns_to counts them from `column` on, or that one, of two rows: `row` and `row + 8`; what is seen of each.
struct Place {
    int batch, head, row, column;
};
struct Seen {
    uint32_t of[2];
    __device__ __forceinline__ Seen operator~() const { return {{~of[0], ~of[1]}}; }
    __device__ __forceinline__ Seen operator&(const Seen& x) const { return {{of[0] & x.of[0], of[1] & x.of[1]}}; }
    __device__ __forceinline__ Seen operator|(const Seen& x) const { return {{of[0] | x.of[0], of[1] | x.of[1]}}; }
};
template <int COUNT>
SM90 int column_of(int i) { return COUNT == 1 ? 0 : i / 2 * 8 + i % 2; }

SM90 int64_t start_of(const Slot& slot, const Place& at) { return at.batch * slot.batch + at.head * slot.head; }
SM90 int row_of(const Problem& problem, const Place& at, int half) { return min(at.row + 8 * half, problem.queries - 1); }
SM90 int number_of(const Problem& problem, const Slot& slot, const Place& at, int half) {  // of a query
    return static_cast<const int*>(slot.data)[start_of(slot, at) + row_of(problem, at, half) * slot.query];
}

// Whether two neighbours can be read at once, of so many bytes, of all columns.
template <int COUNT>
SM90 bool two_at_once(const Problem& problem, const Slot& slot, const Place& at, const void* row, int bytes) {
    if (COUNT == 1 || slot.key != 1 || reinterpret_cast<uintptr_t>(row) % bytes) return false;
    return at.column + column_of<COUNT>(COUNT - 1) < problem.keys;
}

SM90 uint32_t between(int first, int last, int column) { return columns_to(last - column) & ~columns_to(first - 1 - column); }
SM90 Seen in_band(const Place& at, int lower, int upper) {
    return {{between(at.row + lower, at.row + upper, at.column), between(at.row + 8 + lower, at.row + 8 + upper, at.column)}};
}
SM90 Seen in_band(const Problem& problem, const Place& at, int n) {
    return in_band(at, problem.mask.numbers[n], problem.mask.numbers[n + 1]);
}
SM90 Seen in_band_at(const Problem& problem, const Place& at, int slot, int n) {
    constexpr int64_t FAR = 1 << 30;
    Seen seen;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int64_t place = int64_t(at.row) + 8 * half + number_of(problem, problem.mask.slots[slot], at, half);
        const auto near = [&](int by) { return int(min(max(place + by, -FAR), FAR)); };
        seen.of[half] = between(near(problem.mask.numbers[n]), near(problem.mask.numbers[n + 1]), at.column);
    }
    return seen;
}
SM90 Seen before(int length, const Place& at) {
    const uint32_t seen = columns_to(length - 1 - at.column);
    return {{seen, seen}};
}
SM90 Seen before_length(const Problem& problem, const Place& at, int slot) {
    const Slot& lengths = problem.mask.slots[slot];
    return before(static_cast<const int*>(lengths.data)[start_of(lengths, at)], at);
}
template <int COUNT>
SM90 Seen of_segment(const Problem& problem, const Place& at, int of_queries, int of_keys) {
    const Slot& slot = problem.mask.slots[of_keys];
    const Slot& own = problem.mask.slots[of_queries];
    const int mine[] = {number_of(problem, own, at, 0), number_of(problem, own, at, 1)};
    const int* theirs = static_cast<const int*>(slot.data) + start_of(slot, at);
    Seen seen = {};
    const auto compare = [&](int i, int number) {
        if (number == mine[0]) seen.of[0] |= 1u << i;
        if (number == mine[1]) seen.of[1] |= 1u << i;
    };
    if (two_at_once<COUNT>(problem, slot, at, theirs, sizeof(int2))) {
#pragma unroll
        for (int i = 0; i < COUNT; i += 2) {
            const int2 two = *reinterpret_cast<const int2*>(theirs + at.column + column_of<COUNT>(i));
            compare(i, two.x), compare(i + 1, two.y);
        }
        return seen;
    }
#pragma unroll 8
    for (int i = 0; i < COUNT; i++) compare(i, theirs[min(at.column + column_of<COUNT>(i), problem.keys - 1) * slot.key]);
    return seen;
}
template <int COUNT>
SM90 Seen where_true(const Problem& problem, const Place& at, int number) {
    const Slot& slot = problem.mask.slots[number];
    Seen seen = {};
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const uint8_t* bools = static_cast<const uint8_t*>(slot.data) + start_of(slot, at) + row_of(problem, at, half) * slot.query;
        if (two_at_once<COUNT>(problem, slot, at, bools, 2)) {
#pragma unroll
            for (int i = 0; i < COUNT; i += 2) {
                const uint32_t two = *reinterpret_cast<const uint16_t*>(bools + at.column + column_of<COUNT>(i));
                seen.of[half] |= ((two | two >> 7) & 3) << i;  // bools are 0 or 1
            }
            continue;
        }
#pragma unroll 8
        for (int i = 0; i < COUNT; i++)
            if (bools[min(at.column + column_of<COUNT>(i), problem.keys - 1) * slot.key]) seen.of[half] |= 1u << i;
    }
    return seen;
}

// The functions of users, of which a mask's program and SCORE may consist.
#ifdef USER_FUNCTIONS
USER_FUNCTIONS
#endif

// Where a function of query and key is true.
template <int COUNT, class Function>
SM90 Seen where_holds(const Problem& problem, const Place& at, const Function& function) {
    Seen seen = {};
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int row = row_of(problem, at, half);
#pragma unroll 8
        for (int i = 0; i < COUNT; i++)
            if (function(row, min(at.column + column_of<COUNT>(i), problem.keys - 1))) seen.of[half] |= 1u << i;
    }
    return seen;
}

// Which of some columns two rows see.
template <int COUNT, bool BANDED>
SM90 Seen seen_columns(const Problem& problem, const Place& at) {
    Seen seen = before(keys_of(problem, at.batch), at);
    if (BANDED) seen = seen & in_band(at, problem.lower, problem.upper);
#ifdef MASK_PROGRAM
    seen = seen & (MASK_PROGRAM);
#endif
    return seen;
}

// -inf for what the thread's rows, `row` and `row + 8`, do not see of the keys from `from` by a program.
template <bool BANDED, int N>
SM90 void hide_unseen(const Problem& problem, float (&s)[N], int batch, int head, int row, int from) {
    const Seen seen = seen_columns<N / 2, BANDED>(problem, {batch, head, row, from + int(threadIdx.x) % 4 * 2});
    hide(s, 0, seen.of[0]), hide(s, 1, seen.of[1]);
}

}  // namespace
