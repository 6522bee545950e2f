// Attention for sm_90a in CUDA C++, of elements T, which who includes this file names: __nv_bfloat16 or __half.
//
// One thread loads by TMA, and warpgroups multiply, 64 rows of queries each. A block takes tiles, some rows of one head each,
// from a counter until there are no more. The keys of a tile are visited from the last to the first. The product of queries with
// the next keys is begun before the softmax of these keys, beside the product with the values of those before (the method is
// that of FlashAttention-3, Shah et al., 2024, section 3).
#pragma once

#include <cstdint>

#include "tensors.cuh"

namespace {

using namespace sm90;

constexpr int LANES = 32, WARPGROUP = 128, GROUP_ROWS = 64;
constexpr int OWNERS = 4;                     // marks of a block beside those of its tiles
constexpr int MEETING = 1;                    // the first of the named barriers that the threads of one warpgroup use
constexpr float LN2 = 0.6931471805599453f, LOG2E = 1.4426950408889634f;

// A call. Query i sees key j if lower <= j - i <= upper, where there is a band. opkit/attn/gpu/hopper/forward_cuda.py fills it.
struct Problem {
    Rows q, k, v, out;
    float* lse;    // (batch, heads, queries), dense
    int* counter;  // of tiles, of blocks that have ended, marks of warpgroups, and marks of 64 rows each; zeros
    int batch, heads, group, queries, keys, head_size, value_size, lower, upper, banded;
    int section;  // heads whose tiles are interleaved, so that their keys stay in the L2 cache
    int blocks;   // tiles of a head
    int tiles;
    int processors, device;
    float factor;  // of logits, whose exponentials' base is 2
};

// A block of queries of a head, and the steps of keys that it needs; `last` is the first one that is taken. No steps: no tile.
struct alignas(16) Tile {
    int batch, head, row, first, last, steps, unused[2];
};

// How the work of a block is laid out: warpgroups that multiply, with 64 queries of a tile each; keys of a step; buffers for these,
// and for values; and registers of a thread that multiplies, and of one that loads. Two tiles' queries have buffers.
template <int D_, int GROUPS_, int KEYS_, int STAGES_, int REGISTERS_, int LOADER_REGISTERS_>
struct Layout {
    static constexpr int D = D_, GROUPS = GROUPS_, KEYS = KEYS_, STAGES = STAGES_, TILES = 2;
    static constexpr int REGISTERS = REGISTERS_, LOADER_REGISTERS = LOADER_REGISTERS_;
    static constexpr int ROWS = GROUPS * GROUP_ROWS, THREADS = (GROUPS + 1) * WARPGROUP, BOXES = D / COLUMNS;
    static constexpr int ROWS_BYTES = ROWS * D * 2, KEYS_BYTES = KEYS * D * 2;
    static constexpr int BARRIERS = 2 * (2 * TILES + 2 * STAGES);
    static constexpr int BYTES = TILES * (ROWS_BYTES + sizeof(Tile)) + 2 * STAGES * KEYS_BYTES + BARRIERS * 8;
    static constexpr int SHARED = BYTES + 1024;  // boxes begin at multiples of 1024
};

// The layout for heads of 64. Three warpgroups, since exponentials take most of the time there.
using Narrow = Layout<64, 3, 128, 3, 160, 32>;

// Buffers that one side fills and the other empties, in turn. `full` and `empty` are the addresses of the first barriers.
template <int COUNT, int BYTES>
struct Ring {
    uint32_t buffers, full, empty;
    int index = 0;
    uint32_t phase = 0;

    __device__ __forceinline__ uint32_t buffer() const { return buffers + index * BYTES; }
    __device__ __forceinline__ uint32_t filled() const { return full + index * 8; }
    __device__ __forceinline__ void wait_full() const { wait(full + index * 8, phase); }
    __device__ __forceinline__ void wait_empty() const { wait(empty + index * 8, phase ^ 1); }
    __device__ __forceinline__ void next() {
        index++;
        if (index == COUNT) index = 0, phase ^= 1;
    }
    // A warp, all of whose threads have waited for the buffer, no longer needs it.
    __device__ __forceinline__ void free() {
        if (threadIdx.x % LANES == 0) arrive(empty + index * 8);
        next();
    }
};

template <typename L>
struct Shared {
    Ring<L::TILES, L::ROWS_BYTES> rows;
    Ring<L::STAGES, L::KEYS_BYTES> keys, values;
    Ring<L::TILES, 0> turns;  // of the tiles
    Tile* tiles;
};

template <typename L>
SM90 Shared<L> shared_of(unsigned char* bytes) {
    const uint32_t rows = shared(bytes), keys = rows + L::TILES * L::ROWS_BYTES;
    const uint32_t values = keys + L::STAGES * L::KEYS_BYTES, tiles = values + L::STAGES * L::KEYS_BYTES;
    const uint32_t of_rows = tiles + L::TILES * sizeof(Tile), of_keys = of_rows + 2 * L::TILES * 8;
    const uint32_t of_values = of_keys + 2 * L::STAGES * 8, of_turns = of_values + 2 * L::STAGES * 8;
    return {{rows, of_rows, of_rows + L::TILES * 8},
            {keys, of_keys, of_keys + L::STAGES * 8},
            {values, of_values, of_values + L::STAGES * 8},
            {0, of_turns, of_turns + L::TILES * 8},
            reinterpret_cast<Tile*>(bytes + (tiles - rows))};
}

template <int COUNT, int BYTES>
SM90 void initialize(const Ring<COUNT, BYTES>& ring, int readers) {
    for (int i = 0; i < COUNT; i++) {
        barrier_init(ring.full + i * 8, 1);
        barrier_init(ring.empty + i * 8, readers);
    }
}

// ---- tiles ----------------------------------------------------------------------------------------------------------------

struct Reach {
    int first, last;
};

// The steps of keys that some rows need; at least one, if only to see nothing.
template <typename L, bool BANDED>
SM90 Reach reach_of(const Problem& problem, int row, int rows) {
    if (!BANDED) return {0, (problem.keys - 1) / L::KEYS};
    const int end = min(row + rows, problem.queries) - 1;
    const int last = max(min(end + problem.upper, problem.keys - 1), 0) / L::KEYS;
    return {min(max(row + problem.lower, 0) / L::KEYS, last), last};
}

// Under a band the last rows of all heads of a section come first: of a causal one they have the most to do.
template <typename L, bool BANDED>
SM90 Tile tile_of(const Problem& problem, int number) {
    if (number >= problem.tiles) return {};
    const int size = problem.section * problem.blocks, first = number / size * problem.section, rest = number % size;
    const int width = min(problem.section, problem.tiles / problem.blocks - first);
    const int of_all = first + (BANDED ? rest % width : rest / problem.blocks);
    const int row = (BANDED ? problem.blocks - 1 - rest / width : rest % problem.blocks) * L::ROWS;
    const Reach reach = reach_of<L, BANDED>(problem, row, L::ROWS);
    return {of_all / problem.heads, of_all % problem.heads, row, reach.first, reach.last, reach.last - reach.first + 1};
}

// ---- loading --------------------------------------------------------------------------------------------------------------

template <int BYTES, int COUNT>
SM90 void fill(Ring<COUNT, BYTES>& ring, const CUtensorMap* map, int batch, int head, int row) {
    ring.wait_empty();
    expect_bytes(ring.filled(), BYTES);
    load_boxes(ring.buffer(), map, ring.filled(), row, head, batch);
    ring.next();
}

template <typename L>
SM90 void announce(Shared<L>& shared, const Tile& tile) {
    shared.turns.wait_empty();
    shared.tiles[shared.turns.index] = tile;
    arrive(shared.turns.filled());
    shared.turns.next();
}

// Hand out tiles, and load their queries, and keys and values from the last to the first, values a step late.
template <typename L, bool BANDED>
SM90 void load(const Problem& problem, Shared<L> shared, const CUtensorMap* q, const CUtensorMap* k, const CUtensorMap* v) {
    Tile tile = tile_of<L, BANDED>(problem, blockIdx.x);
    while (tile.steps > 0) {
        const int following = atomicAdd(problem.counter, 1) + gridDim.x, key_head = tile.head / problem.group;
        announce(shared, tile);
#pragma unroll 1
        for (int step = tile.last; step >= tile.first; step--) {
            fill(shared.keys, k, tile.batch, key_head, step * L::KEYS);
            if (step == tile.last) fill(shared.rows, q, tile.batch, tile.head, tile.row);
            else fill(shared.values, v, tile.batch, key_head, (step + 1) * L::KEYS);
        }
        fill(shared.values, v, tile.batch, key_head, tile.first * L::KEYS);
        tile = tile_of<L, BANDED>(problem, following);
    }
    announce(shared, tile);
    // The last block to end leaves the counter as it found it: zeros.
    __threadfence();
    if (atomicAdd(problem.counter + 1, 1) == gridDim.x - 1) problem.counter[0] = problem.counter[1] = 0;
}

// ---- products -------------------------------------------------------------------------------------------------------------

// Begin the product of a warpgroup's queries, at `q`, with keys.
template <typename L>
SM90 void multiply_keys(float (&s)[L::KEYS / 2], uint32_t q, uint32_t k) {
    constexpr int PARTS = L::D / 16;
    uint64_t rows[PARTS], keys[PARTS];
#pragma unroll
    for (int i = 0; i < PARTS; i++) {
        const uint32_t box = i / 4, within = i % 4 * 32;
        rows[i] = further(along_rows(q), box * (L::ROWS * ROW_BYTES) + within);
        keys[i] = further(along_rows(k), box * (L::KEYS * ROW_BYTES) + within);
    }
    hold(rows);
    hold(keys);
    products_fence();
#pragma unroll
    for (int i = 0; i < PARTS; i++) Product<T, L::KEYS>::template ss<0, 0>(s, rows[i], keys[i], i > 0);
    products_commit();
}

// Begin the product of weights with values.
template <typename L>
SM90 void multiply_values(float (&acc)[L::D / 2], const uint32_t (&p)[L::KEYS / 4], uint32_t v) {
    constexpr int PARTS = L::KEYS / 16;
    uint64_t values[PARTS];
#pragma unroll
    for (int i = 0; i < PARTS; i++) values[i] = further(across_rows(v, L::KEYS * ROW_BYTES), i * (16 * ROW_BYTES));
    hold(values);
    products_fence();
#pragma unroll
    for (int i = 0; i < PARTS; i++)
        Product<T, L::D>::template rs<1>(acc, p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3], values[i], 1);
    products_commit();
}

// ---- softmax: a thread has parts of two rows, which the four threads of a quad share ---------------------------------------

SM90 float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
}

SM90 float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffff, x, 1);
    return x + __shfl_xor_sync(0xffffffff, x, 2);
}

template <int N>
SM90 void hide(float (&s)[N], int half, int first, int last) {
#pragma unroll
    for (int i = 0; i < N / 4; i++)
#pragma unroll
        for (int j = 0; j < 2; j++) {
            float& logit = s[4 * i + 2 * half + j];
            const int column = 8 * i + j;
            logit = column >= first && column <= last ? logit : -INFINITY;
        }
}

// -inf for what the thread's rows, `row` and `row + 8`, do not see of the keys from `at`.
template <bool BANDED, int N>
SM90 void mask(const Problem& problem, float (&s)[N], int row, int at) {
    const int column = at + threadIdx.x % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int i = row + 8 * half, end = problem.keys - 1;
        hide(s, half, BANDED ? i + problem.lower - column : 0, (BANDED ? min(i + problem.upper, end) : end) - column);
    }
}

// Logits become weights, which are divided by the greatest one of their row; `by` is what earlier sums are times for that.
template <int N>
SM90 void weigh(float (&s)[N], float factor, float (&top)[2], float (&total)[2], float (&by)[2]) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float most = fmaxf(s[2 * half], s[2 * half + 1]);
#pragma unroll
        for (int i = 1; i < N / 4; i++) most = fmaxf(most, fmaxf(s[4 * i + 2 * half], s[4 * i + 2 * half + 1]));
        most = fmaxf(top[half], quad_max(most));
        const float base = most == -INFINITY ? 0.f : most * factor;
        by[half] = exp2_approx(top[half] * factor - base);
        top[half] = most;
        float sum = 0;
#pragma unroll
        for (int i = 0; i < N / 4; i++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                float& weight = s[4 * i + 2 * half + j];
                weight = exp2_approx(weight * factor - base);
                sum += weight;
            }
        total[half] = total[half] * by[half] + sum;
    }
}

template <int N>
SM90 void round_weights(const float (&s)[N], uint32_t (&p)[N / 2]) {
#pragma unroll
    for (int i = 0; i < N / 2; i++) p[i] = pack<T>(s[2 * i], s[2 * i + 1]);
}

// Few columns are multiplied without asking whether it is by 1.
template <int N>
SM90 void rescale(float (&acc)[N], const float (&by)[2]) {
    if (N > 32 && __all_sync(0xffffffff, by[0] == 1.f && by[1] == 1.f)) return;
#pragma unroll
    for (int i = 0; i < N; i++) acc[i] *= by[i / 2 % 2];
}

// ---- results --------------------------------------------------------------------------------------------------------------

SM90 int owner(int group) { return blockIdx.x * OWNERS + group; }
SM90 int* owners(const Problem& problem) { return problem.counter + 2; }
SM90 int* marks(const Problem& problem) { return owners(problem) + gridDim.x * OWNERS; }

// Mark 64 rows of which some results are not numbers; `rows` is their number among all.
template <int N>
SM90 void mark(const Problem& problem, const float (&acc)[N], int group, int rows) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < N; i++) sum += acc[i];
    if (sum == sum) return;
    marks(problem)[rows] = owner(group) + 1;
    owners(problem)[owner(group)] = 1;
}

template <typename L, bool BANDED>
SM90 void finish(const Problem& problem, const Tile& at, int group, const float (&acc)[L::D / 2], const float (&top)[2],
                 const float (&total)[2]) {
    const int lane = threadIdx.x % LANES, warp = threadIdx.x % WARPGROUP / LANES;
    const int row = at.row + group * GROUP_ROWS + warp * 16 + lane / 4;
    const int of_all = at.batch * problem.heads + at.head;
    float by[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float sum = quad_sum(total[half]);
        by[half] = sum == 0.f ? 0.f : 1.f / sum;
        if (lane % 4 == 0 && row + 8 * half < problem.queries)
            problem.lse[int64_t(of_all) * problem.queries + row + 8 * half] = (top[half] * problem.factor + log2f(sum)) * LN2;
    }
    if (BANDED) mark(problem, acc, group, of_all * problem.blocks * L::GROUPS + (at.row / GROUP_ROWS + group));
    store(problem.out, at.batch, at.head, row, problem.queries, problem.value_size, acc, by);
}

// ---- results that are not numbers, computed again so that a value reaches only the rows that see it ------------------------

template <int D>
SM90 void read_row(float (&x)[D / LANES], const Rows& rows, int batch, int head, int i, int size) {
    const T* at = first_of<const T>(rows, batch, head) + i * rows.row;
#pragma unroll
    for (int n = 0; n < D / LANES; n++) {
        const int column = n * LANES + threadIdx.x % LANES;
        x[n] = column < size ? float(at[column]) : 0.f;
    }
}

// The results of one row, by one warp.
template <int D>
SM90 void mend_row(const Problem& problem, int of_all, int i) {
    const int batch = of_all / problem.heads, head = of_all % problem.heads, key_head = head / problem.group;
    const float power = problem.lse[int64_t(of_all) * problem.queries + i] * LOG2E, base = power == -INFINITY ? 0.f : power;
    const int end = min(i + problem.upper, problem.keys - 1);
    float q[D / LANES], x[D / LANES], sums[D / LANES] = {};
    read_row<D>(q, problem.q, batch, head, i, problem.head_size);
    for (int j = max(i + problem.lower, 0); j <= end; j++) {
        float logit = 0;
        read_row<D>(x, problem.k, batch, key_head, j, problem.head_size);
        for (int n = 0; n < D / LANES; n++) logit += q[n] * x[n];
        for (int bit = 16; bit > 0; bit /= 2) logit += __shfl_xor_sync(0xffffffff, logit, bit);
        const float weight = exp2_approx(logit * problem.factor - base);
        read_row<D>(x, problem.v, batch, key_head, j, problem.value_size);
        for (int n = 0; n < D / LANES; n++) sums[n] += weight * x[n];
    }
    T* out = first_of<T>(problem.out, batch, head) + i * problem.out.row;
    for (int n = 0; n < D / LANES; n++) {
        const int column = n * LANES + threadIdx.x % LANES;
        if (column < problem.value_size) out[column] = T(sums[n]);
    }
}

// Compute again what this warpgroup has marked.
template <typename L>
SM90 void mend(const Problem& problem, int group) {
    const int warp = threadIdx.x % WARPGROUP / LANES;
    named_sync(MEETING + group, WARPGROUP);
    volatile int* mine = owners(problem) + owner(group);
    if (*mine == 0) return;
    const int of_head = problem.blocks * L::GROUPS, count = problem.tiles * L::GROUPS;
    for (int place = 0; place < count; place++) {
        volatile int* mark = marks(problem) + place;
        if (*mark != owner(group) + 1) continue;
        const int row = place % of_head * GROUP_ROWS, end = min(row + GROUP_ROWS, problem.queries);
        for (int i = row + warp; i < end; i += WARPGROUP / LANES) mend_row<L::D>(problem, place / of_head, i);
        named_sync(MEETING + group, WARPGROUP);  // all have seen the mark
        if (threadIdx.x % WARPGROUP == 0) *mark = 0;
    }
    named_sync(MEETING + group, WARPGROUP);
    if (threadIdx.x % WARPGROUP == 0) *mine = 0;
}

// ---- multiplying ----------------------------------------------------------------------------------------------------------

// What a warpgroup has to do of a tile: its steps, the first one's keys being the last, and how many of others there are before
// and after them.
struct Work {
    Tile tile;
    int step, steps, before, after;
};

template <typename L, bool BANDED>
SM90 Work work_of(const Problem& problem, Shared<L>& shared, int group) {
    shared.turns.wait_full();
    const Tile tile = shared.tiles[shared.turns.index];
    __syncwarp();
    shared.turns.free();
    const Reach own = reach_of<L, BANDED>(problem, tile.row + group * GROUP_ROWS, GROUP_ROWS);
    const int last = max(min(own.last, tile.last), tile.first), first = min(max(own.first, tile.first), last);
    return {tile, last, last - first + 1, tile.last - last, first - tile.first};
}

template <typename R>
SM90 void skip(R& ring, int count) {
    for (; count > 0; count--) {
        ring.wait_full();
        __syncwarp();
        ring.free();
    }
}

// Wait for what a tile's first product reads.
template <typename L>
SM90 void first_there(Shared<L>& shared, const Work& work) {
    skip(shared.keys, work.before);
    shared.rows.wait_full();
    shared.keys.wait_full();
}

// Begin the product of a tile's queries with the next keys.
template <typename L>
SM90 void multiply_next(Shared<L>& shared, float (&s)[L::KEYS / 2], int group) {
    multiply_keys<L>(s, shared.rows.buffer() + group * GROUP_ROWS * ROW_BYTES, shared.keys.buffer());
}

// Whether some of 64 queries from `row` do not see some of the keys from `at`.
template <typename L>
SM90 bool partial(const Problem& problem, int row, int at) {
    return at + L::KEYS - 1 - row > problem.upper || at - row - (GROUP_ROWS - 1) < problem.lower;
}

// The results of 64 rows of each tile. A product is begun, what is there meanwhile is done, and then it is waited for.
template <typename L, bool BANDED>
SM90 void multiply(const Problem& problem, Shared<L> shared, int group) {
    const int first_row = group * GROUP_ROWS;
    const int thread_row = first_row + threadIdx.x % WARPGROUP / LANES * 16 + threadIdx.x % LANES / 4;
    float s[L::KEYS / 2], acc[L::D / 2], top[2], total[2], by[2];
    uint32_t p[L::KEYS / 4];
    Work work = work_of<L, BANDED>(problem, shared, group);
    if (work.tile.steps > 0) {
        first_there(shared, work);
        multiply_next(shared, s, group);
        products_wait<0>();
        hold(s);
    }
    while (work.tile.steps > 0) {
        shared.keys.free();
        skip(shared.values, work.before);
        if (work.steps == 1) shared.rows.free();
        else shared.keys.wait_full();
        const int row = work.tile.row + thread_row;
        if (BANDED || (work.step + 1) * L::KEYS > problem.keys) mask<BANDED>(problem, s, row, work.step * L::KEYS);
        top[0] = top[1] = -INFINITY;
        total[0] = total[1] = 0;
        weigh(s, problem.factor, top, total, by);
        round_weights(s, p);
#pragma unroll
        for (int i = 0; i < L::D / 2; i++) acc[i] = 0;
#pragma unroll 1
        for (int i = 1; i < work.steps; i++) {
            const int at = (work.step - i) * L::KEYS;
            multiply_next(shared, s, group);
            shared.values.wait_full();
            multiply_values<L>(acc, p, shared.values.buffer());
            products_wait<1>();
            hold(s);
            shared.keys.free();
            if (BANDED && partial<L>(problem, work.tile.row + first_row, at)) mask<BANDED>(problem, s, row, at);
            weigh(s, problem.factor, top, total, by);
            // With no branch here ptxas moves the wait for the product above the exponentials; with one before them it reckons
            // the maxima of both rows first, where those of the second can be reckoned beside exponentials of the first.
            if (i + 1 < work.steps) shared.keys.wait_full();
            else shared.rows.free();
            products_wait<0>();
            hold(acc);
            hold(p);
            shared.values.free();
            round_weights(s, p);
            rescale(acc, by);
        }
        skip(shared.keys, work.after);
        const Work done = work;
        work = work_of<L, BANDED>(problem, shared, group);
        if (work.tile.steps > 0) first_there(shared, work);
        shared.values.wait_full();
        multiply_values<L>(acc, p, shared.values.buffer());
        multiply_next(shared, s, group);  // of the next tile; of none, if there is none
        products_wait<1>();
        hold(acc);
        hold(p);
        shared.values.free();
        skip(shared.values, done.after);
        finish<L, BANDED>(problem, done.tile, group, acc, top, total);
        products_wait<0>();
        hold(s);
    }
    if (BANDED) mend<L>(problem, group);
}

template <typename L, bool BANDED>
__global__ void __launch_bounds__(L::THREADS, 1)
    attention(const __grid_constant__ Problem problem, const __grid_constant__ CUtensorMap q,
              const __grid_constant__ CUtensorMap k, const __grid_constant__ CUtensorMap v) {
    unsigned char* bytes = dynamic_shared();
    Shared<L> shared = shared_of<L>(bytes + (-sm90::shared(bytes) & 1023));
    constexpr int WARPS = L::GROUPS * WARPGROUP / LANES;
    if (threadIdx.x == 0) {
        prefetch_map(&q), prefetch_map(&k), prefetch_map(&v);
        initialize(shared.rows, WARPS);
        initialize(shared.keys, WARPS);
        initialize(shared.values, WARPS);
        initialize(shared.turns, WARPS);
        barriers_ready();
    }
    __syncthreads();
    // From the first lane, so that the compiler knows that it is the same for a warp.
    const int group = __shfl_sync(0xffffffff, threadIdx.x / WARPGROUP, 0);
    if (group == L::GROUPS) {
        fewer_registers<L::LOADER_REGISTERS>();
        if (threadIdx.x == L::GROUPS * WARPGROUP) load<L, BANDED>(problem, shared, &q, &k, &v);
    } else {
        more_registers<L::REGISTERS>();
        multiply<L, BANDED>(problem, shared, group);
    }
}

}  // namespace
