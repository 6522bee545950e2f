// The rows of a warpgroup of the forward: their softmax, and their results.
#pragma once

#include "forward_tiles.cuh"

namespace {

using namespace sm90;

// ---- softmax: a thread has parts of two rows, which the four threads of a quad share ---------------------------------------

SM90 float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
}

SM90 float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffff, x, 1);
    return x + __shfl_xor_sync(0xffffffff, x, 2);
}

// -inf for what the thread's rows, `row` and `row + 8`, do not see of the keys from `at`.
template <bool BANDED, int N>
SM90 void mask(const Problem& problem, float (&s)[N], int row, int at, int keys) {
    const int column = at + threadIdx.x % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int i = row + 8 * half, end = keys - 1;
        const uint32_t before = BANDED ? columns_to(i + problem.lower - column - 1) : 0;
        hide(s, half, columns_to((BANDED ? min(i + problem.upper, end) : end) - column) & ~before);
    }
}

// -inf for what is beyond the spans of the thread's rows, `row` and `row + 8`, of the keys from `at`.
template <int N>
SM90 void hide_beyond(const Problem& problem, float (&s)[N], int batch, int row, int at) {
    const int2* spans = problem.lists.spans + batch * problem.lists.spans_batch;
    const int column = at + threadIdx.x % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int2 span = spans[min(row + 8 * half, problem.queries - 1)];
        hide(s, half, between(span.x & 0x7fffffff, span.y - 1, column));
    }
}

// -inf where a query and a key, from `at`, are of different segments; `first` is the first row of the warp's 16. A warp asks for each row
// who of 32 keys is of its segment.
template <int N>
SM90 void hide_others(const Problem& problem, float (&s)[N], int batch, int first, int at) {
    const int lane = threadIdx.x % LANES, row = first + lane % 16;  // what is not there is hidden elsewhere, or not stored
    const int *of_queries = problem.lists.of_queries + batch * problem.lists.queries_batch;
    const int *of_keys = problem.lists.of_keys + batch * problem.lists.keys_batch;
    const int mine = row < problem.queries ? of_queries[row * problem.lists.queries_row] : 0;
#pragma unroll
    for (int from = 0; from < 2 * N; from += LANES) {
        const int key = at + from + lane, theirs = key < problem.keys ? of_keys[key * problem.lists.keys_row] : 0;
        uint32_t seen[2] = {0, 0};  // by rows lane / 4, and 8 more
#pragma unroll
        for (int i = 0; i < 16; i++) {
            const uint32_t by = __ballot_sync(0xffffffff, theirs == __shfl_sync(0xffffffff, mine, i));
            if (lane / 4 == i % 8) seen[i / 8] = by;
        }
#pragma unroll
        for (int i = 0; i < LANES / 2; i++) {  // two keys of eight, for either row
            const int of_32 = i / 4 * 8 + 2 * (lane % 4) + i % 2;
            if (!(seen[i / 2 % 2] >> of_32 & 1)) s[from / 2 + i] = -INFINITY;
        }
    }
}

// Minus half of what a logit's tanh is less than 1. The factor of exponents is twice the cap then, and their offset is the cap.
SM90 float capped(const Problem& problem, float logit) { return -reciprocal_approx(exp2_approx(logit * problem.inner) + 1.f); }

template <int N>
SM90 void cap(const Problem& problem, float (&s)[N]) {
    if (!CAPPED) return;
#pragma unroll
    for (int i = 0; i < N; i++) s[i] = capped(problem, s[i]);
}

// What functions make of the logits of the thread's rows, `row` and `row + 8`, with the keys from `from`. ALL: there are these keys.
template <bool ALL, int N>
SM90 void score(const Problem& problem, float (&s)[N], int batch, int head, int row, int from) {
    const int column = from + threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < N; i++) {
        const int query = min(row + i / 2 % 2 * 8, problem.queries - 1), key = column + i / 4 * 8 + i % 2;
        s[i] = SCORE(problem, batch, head, query, ALL ? key : min(key, problem.keys - 1), s[i] * problem.inner);
    }
}
template <int N>
SM90 void score(const Problem& problem, float (&s)[N], int batch, int head, int row, int from) {
    if (KEYS_READ && from + 2 * N <= problem.keys) score<true>(problem, s, batch, head, row, from);
    else score<false>(problem, s, batch, head, row, from);
}

// What the powers of a row's logits are divided by: that of the greatest so far, which is kept in `top`. `by` is what earlier sums
// are times for that. All of a row's weights have the same factor of what rounding takes from a base, as earlier sums are times the
// quotient of rounded bases.
template <int N>
SM90 float base_of(const float (&s)[N], int half, float factor, float& top, float& by) {
    float most = fmaxf(s[2 * half], s[2 * half + 1]);
#pragma unroll
    for (int i = 1; i < N / 4; i++) most = fmaxf(most, fmaxf(s[4 * i + 2 * half], s[4 * i + 2 * half + 1]));
    most = fmaxf(top, quad_max(most));
    const float base = most == -INFINITY ? 0.f : rounded_product(most, factor);
    by = exp2_approx(rounded_product(top, factor) - base);
    top = most;
    return base;
}

// A row's logits become exponents.
template <int N>
SM90 void scale(float (&s)[N], int half, float factor, float base) {
#pragma unroll
    for (int i = 0; i < N / 4; i++)
#pragma unroll
        for (int j = 0; j < 2; j++) s[4 * i + 2 * half + j] = s[4 * i + 2 * half + j] * factor - base;
}

// A row's exponents become weights; their sum.
template <int N>
SM90 float weigh(float (&s)[N], int half) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < N / 4; i++)
#pragma unroll
        for (int j = 0; j < 2; j++) sum += s[4 * i + 2 * half + j] = exp2_approx(s[4 * i + 2 * half + j]);
    return sum;
}

template <int N>
SM90 void round_weights(const float (&s)[N], uint32_t (&p)[N / 2]) {
#pragma unroll
    for (int i = 0; i < N / 2; i++) p[i] = pack<T>(s[2 * i], s[2 * i + 1]);
}

// Up to 128 columns are multiplied without asking whether it is by 1: there is time for it during exponentials.
template <int N>
SM90 void rescale(float (&acc)[N], const float (&by)[2]) {
    if (N > 64 && __all_sync(0xffffffff, by[0] == 1.f && by[1] == 1.f)) return;
#pragma unroll
    for (int i = 0; i < N; i++) acc[i] *= by[i / 2 % 2];
}

// ---- results --------------------------------------------------------------------------------------------------------------

SM90 int owner(int group) { return blockIdx.x * OWNERS + group; }
SM90 int* owners(const Problem& problem) { return problem.counter + 2; }
SM90 int* marks(const Problem& problem) { return owners(problem) + gridDim.x * OWNERS; }

// Whether a row's logits are so large that its factor of rounding is not near 1, or that its sum overflowed. Rounded weights may overflow
// before their sum does: where a greater logit came after that, all of the row's results are NaN.
SM90 bool has_large_logits(float exponent, float total) {
    constexpr float LARGE = 1 << 24;
    return (fabsf(exponent) > LARGE && fabsf(exponent) < INFINITY) || total != total;
}

// Mark 64 rows that are `bad`, or of which some results are not numbers and may not be seen; `rows` is their number among all.
template <bool HIDDEN, int N>
SM90 void mark(const Problem& problem, const float (&acc)[N], bool bad, int group, int rows) {
    float sum = 0;
    if (HIDDEN) {
#pragma unroll
        for (int i = 0; i < N; i++) sum += acc[i];
    }
    if (sum == sum && !bad) return;
    marks(problem)[rows] = owner(group) + 1;
    owners(problem)[owner(group)] = 1;
}

// A row's sum of weights, with its sink; the greatest exponent, as the weights have it; and what results are times for it.
struct Sum {
    float exponent, sum, by;
};
SM90 Sum with_sink(const Problem& problem, int head, float exponent, float sum) {
    if (CAPPED) exponent += problem.offset;
    if (!SINKS) return {exponent, sum, 1.f};
    const float sink = problem.sinks[head] * LOG2E, most = fmaxf(exponent, sink), base = most == -INFINITY ? 0.f : most;
    const float by = exp2_approx(exponent - base);
    return {base, sum * by + exp2_approx(sink - base), by};
}

// Of a warp's 16 rows of results, times factors, the boxes that the copy engine stores: to shared memory, as it reads them.
template <typename L>
SM90 void store_boxes(const CUtensorMap* map, uint32_t results, const Tile& at, int row, const float (&acc)[L::DV / 2],
                      const float (&by)[2]) {
    constexpr int BOX = 16 * ROW_BYTES;
    const int lane = threadIdx.x % LANES;
    const uint32_t to = results + threadIdx.x / LANES * (L::RESULT_BOXES * BOX), of_row = to + lane / 4 * ROW_BYTES + lane % 4 * 4;
    if (lane == 0) stores_read();  // those of the tile before
    __syncwarp();
#pragma unroll
    for (int n = 0; n < min(L::RESULT_BOXES * 8, L::DV / 8); n++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            store_one(of_row + n / 8 * BOX + 8 * half * ROW_BYTES + ((n % 8 ^ lane / 4) << 4),
                      pack<Result>(acc[4 * n + 2 * half] * by[half], acc[4 * n + 2 * half + 1] * by[half]));
    fence_stores();
    __syncwarp();
    if (lane != 0) return;
#pragma unroll
    for (int box = 0; box < L::RESULT_BOXES; box++)
        store_box(map, to + box * BOX, row, ODD_VALUES ? 0 : box, at.head, at.batch, ODD_VALUES ? box * COLUMNS : 0);
    stores_commit();
}

template <typename L, bool BANDED>
SM90 void finish(const Problem& problem, const CUtensorMap* map, uint32_t results, const Tile& at, float factor, int group,
                 const float (&acc)[L::DV / 2], const float (&top)[2], const float (&total)[2]) {
    const int lane = threadIdx.x % LANES, warp = threadIdx.x % WARPGROUP / LANES;
    const int row = at.row + group * GROUP_ROWS + warp * 16 + lane / 4;
    const int of_all = at.batch * problem.heads + at.head;
    float by[2];
    bool bad = false;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float sum = quad_sum(total[half]), exponent = rounded_product(top[half], factor);
        bad |= has_large_logits(exponent, sum) || acc[2 * half] != acc[2 * half];
        const Sum all = with_sink(problem, at.head, exponent, sum);
        by[half] = all.sum == 0.f ? 0.f : values_by(problem, at.batch, at.head) * all.by / all.sum;
        if (lane % 4 == 0 && row + 8 * half < problem.queries)
            problem.lse[int64_t(of_all) * problem.queries + row + 8 * half] = (all.exponent + log2f(all.sum)) * LN2;
    }
    mark<BANDED || LENGTHS || PROGRAM>(problem, acc, bad, group, of_all * problem.blocks * L::GROUPS + (at.row / GROUP_ROWS + group));
    if constexpr (L::RESULT_BOXES > 0) store_boxes<L>(map, results, at, row - lane / 4, acc, by);
    store<Result, L::RESULT_BOXES * COLUMNS>(problem.out, at.batch, at.head, row, problem.queries, problem.value_size, acc, by);
}

// ---- rows that are computed again: a value that is not a number reaches only the rows that see it, and huge logits are exact ----

template <typename E, int N>
SM90 void read_row(float (&x)[N], const Rows& rows, int batch, int head, int i, int size) {
    const E* at = first_of<const E>(rows, batch, head) + i * rows.row;
#pragma unroll
    for (int n = 0; n < N; n++) {
        const int column = n * LANES + threadIdx.x % LANES;
        x[n] = column < size ? float(at[column]) : 0.f;
    }
}

// Whether a query sees a key by a program, or they are of one segment, if there are any.
template <typename L, bool BANDED>
SM90 bool sees(const Problem& problem, int batch, int head, int i, int j) {
    if constexpr (PROGRAM) return seen_columns<1, BANDED>(problem, {batch, head, i, j}).of[0] & 1;
    if constexpr (!L::LISTED) return true;
    const Lists& lists = problem.lists;
    return lists.of_queries[batch * lists.queries_batch + i * lists.queries_row] ==
           lists.of_keys[batch * lists.keys_batch + j * lists.keys_row];
}

// A row's logit with key `j`, or -inf where it does not see the key. `q` is the row.
template <typename L, bool BANDED, int N>
SM90 float logit_of(const Problem& problem, const float (&q)[N], int batch, int head, int i, int j) {
    if (!sees<L, BANDED>(problem, batch, head, i, j)) return -INFINITY;
    float k[N], logit = 0;
    read_row<Key>(k, problem.k, batch, head / problem.group, j, problem.head_size);
    for (int n = 0; n < N; n++) logit += q[n] * k[n];
    for (int bit = 16; bit > 0; bit /= 2) logit += __shfl_xor_sync(0xffffffff, logit, bit);
    if (SCORED) return SCORE(problem, batch, head, i, j, logit * problem.inner);
    return CAPPED ? capped(problem, logit) : logit;
}

// The results of one row, by one warp. Differences from the greatest logit are taken before they are multiplied.
template <typename L, bool BANDED>
SM90 void recompute_row(const Problem& problem, int of_all, int i) {
    const int batch = of_all / problem.heads, head = of_all % problem.heads, key_head = head / problem.group;
    const int first = max(i + problem.lower, 0), end = min(i + problem.upper, keys_of(problem, batch) - 1);
    const float factor = factor_of(problem, batch, head), offset = CAPPED ? problem.offset : 0.f;
    constexpr int N = (L::D + LANES - 1) / LANES, NV = L::DV / LANES;
    float q[N], v[NV], sums[NV] = {}, top = -INFINITY, total = 0;
    read_row<Key>(q, problem.q, batch, head, i, problem.head_size);
    for (int j = first; j <= end; j++) top = fmaxf(top, logit_of<L, BANDED>(problem, q, batch, head, i, j));
    const float sink = SINKS ? (problem.sinks[head] * LOG2E - offset) / factor : -INFINITY;  // as logits are
    top = fmaxf(top, sink);
    const float base = top == -INFINITY ? 0.f : top;
    if (SINKS) total = exp2_approx((sink - base) * factor);
    for (int j = first; j <= end; j++) {
        if (!sees<L, BANDED>(problem, batch, head, i, j)) continue;
        const float weight = exp2_approx((logit_of<L, BANDED>(problem, q, batch, head, i, j) - base) * factor);
        read_row<T>(v, problem.v, batch, key_head, j, problem.value_size);
        total += weight;
        for (int n = 0; n < NV; n++) sums[n] += weight * v[n];
    }
    const float by = total == 0.f ? 0.f : values_by(problem, batch, head) / total;
    Result* out = first_of<Result>(problem.out, batch, head) + i * problem.out.row;
    for (int n = 0; n < NV; n++) {
        const int column = n * LANES + threadIdx.x % LANES;
        if (column < problem.value_size) out[column] = Result(sums[n] * by);
    }
    if (threadIdx.x % LANES == 0)
        problem.lse[int64_t(of_all) * problem.queries + i] = (rounded_product(top, factor) + offset + log2f(total)) * LN2;
}

// Compute again what this warpgroup has marked.
template <typename L, bool BANDED>
SM90 void recompute_rows(const Problem& problem, int group) {
    const int warp = threadIdx.x % WARPGROUP / LANES;
    if (L::RESULT_BOXES > 0 && threadIdx.x % LANES == 0) stores_done<0>();  // of the same rows
    named_sync(MEETING + group, WARPGROUP);
    volatile int* mine = owners(problem) + owner(group);
    if (*mine == 0) return;
    const int of_head = problem.blocks * L::GROUPS, count = problem.tiles * L::GROUPS;
    for (int place = 0; place < count; place++) {
        volatile int* mark = marks(problem) + place;
        if (*mark != owner(group) + 1) continue;
        const int row = place % of_head * GROUP_ROWS, end = min(row + GROUP_ROWS, problem.queries);
        for (int i = row + warp; i < end; i += WARPGROUP / LANES) recompute_row<L, BANDED>(problem, place / of_head, i);
        named_sync(MEETING + group, WARPGROUP);  // all have seen the mark
        if (threadIdx.x % WARPGROUP == 0) *mark = 0;
    }
    named_sync(MEETING + group, WARPGROUP);
    if (threadIdx.x % WARPGROUP == 0) *mine = 0;
}

}  // namespace
