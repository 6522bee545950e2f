// Attention of few queries to many keys (decoding), for any ISA.
//
// For r rows (query heads of a KV head, times queries), n keys, sizes d and dv: 2 r n (d + dv) FLOPs on n (d + dv) elements, each
// read once for all rows: r FLOPs for each byte of bf16. DecodeMemory limits it up to about 16 rows of bf16. The keys of a sequence are
// divided into parts, which are computed independently and merged: FlashDecoding (Dao, Haziza, Massa, Sizov 2023), online
// softmax within a part: FlashAttention-2 (Dao 2023).
//
// A tile of up to kTileKeys keys at a time, those of a multiple of kTileKeys and on: logits, exps, sums of values; the next tile's rows
// are prefetched meanwhile. Tiles that no row sees are skipped. Hidden keys do not leak, whatever they hold: those that no row sees are
// not read, and where rows of a tile see different keys, each row's sums are of the keys that it sees.
#pragma once

#include "decode_softmax.hpp"
#include "decode_values.hpp"

namespace opkit::attention {
namespace {

alignas(64) constexpr unsigned char kNoRow[4 * kLargestHead + 64] = {};

// Where a tile's rows are, and what is seen of them. After the last key and for keys that no row sees: rows that may be read, and count
// for nothing.
struct DecodeTile {
    const unsigned char* k[kTileKeys + 16];
    const unsigned char* v[kTileKeys + 16];
    float k_scale[kTileKeys], v_scale[kTileKeys];
    int64_t begin, keys;
    uint64_t* visible;  // a word for each row
    uint64_t some;      // what some row sees
    bool same;          // every row sees the same
};

inline void locate(const DecodeRows& rows, int64_t page, int64_t slot, int64_t count, const unsigned char** at, float* scales) {
    const unsigned char* row = rows.data + page * rows.page + slot * rows.token;
    for (int64_t i = 0; i < count; ++i, row += rows.token) at[i] = row;
    if (!rows.scale) return;
    const float* scale = rows.scale + page * rows.scale_page + slot * rows.scale_token;
    for (int64_t i = 0; i < count; ++i, scale += rows.scale_token) scales[i] = *scale;
}

inline uint64_t bits_before(int64_t n) { return n >= kTileKeys ? ~uint64_t{0} : n <= 0 ? 0 : (uint64_t{1} << n) - 1; }

// Gives a tile that begins at a key; it ends before the next multiple of kTileKeys.
inline void place(const DecodeTask& task, int64_t begin, DecodeTile& tile) {
    const int64_t room = kTileKeys - begin % kTileKeys;
    tile.begin = begin;
    tile.keys = task.end - begin < room ? task.end - begin : room;
    tile.some = bits_before(tile.keys);
}

inline void locate(const DecodeTask& task, DecodeTile& tile) {
    for (int64_t i = 0; i < tile.keys;) {
        const int64_t index = (tile.begin + i) / task.page_size, slot = (tile.begin + i) % task.page_size;
        const int64_t left = task.page_size - slot, count = left < tile.keys - i ? left : tile.keys - i;
        const int64_t page = task.pages ? task.pages[index] : 0;
        locate(task.k, page, slot, count, tile.k + i, tile.k_scale + i);
        locate(task.v, page, slot, count, tile.v + i, tile.v_scale + i);
        i += count;
    }
    for (int64_t i = tile.keys; i < kTileKeys + 16; ++i) tile.k[i] = tile.v[i] = kNoRow;
    for (int64_t i = tile.keys; i < kTileKeys; ++i) tile.k_scale[i] = tile.v_scale[i] = 1.0f;
    for (uint64_t left = ~tile.some & bits_before(tile.keys); left; left &= left - 1) {
        const int i = __builtin_ctzll(left);
        tile.k[i] = tile.v[i] = kNoRow;
        tile.k_scale[i] = tile.v_scale[i] = 1.0f;
    }
}

inline void prefetch_rows(const unsigned char* const* rows, int64_t count, int64_t bytes) {
    for (int64_t i = 0; i < count; ++i) prefetch(rows[i], bytes);
}

constexpr int64_t kWeightsPitch = kTileKeys + 16;  // zeros after the weights of a whole tile

// The memory of a part, from the task's workspace.
template <class K, class W>
struct DecodeMemory {
    using V = typename K::V;
    using Weight = typename W::Weight;
    int64_t rows, padded, cells_pitch, sums_pitch;
    uint32_t* cells;
    float *sums, *logits, *factor, *decay, *maximum, *total;
    Weight* weights;
    uint64_t* visible;  // of two tiles

    explicit DecodeMemory(const DecodeTask& task) : rows(task.group * task.queries), padded(padded_rows(rows)) {
        cells_pitch = rounded_up(task.k.size, 64);
        sums_pitch = rounded_up(task.v.size, 64);
        auto* next = static_cast<float*>(task.workspace);
        const auto take = [&](int64_t count) { return (next += padded * count) - padded * count; };
        cells = reinterpret_cast<uint32_t*>(take(cells_pitch));
        sums = take(sums_pitch);
        logits = take(kTileKeys);
        weights = reinterpret_cast<Weight*>(take(kWeightsPitch));
        visible = reinterpret_cast<uint64_t*>(take(4));
        factor = take(1), decay = take(1), maximum = take(1), total = take(1);
    }
};

template <class K, class W>
void start(const DecodeTask& task, const DecodeMemory<K, W>& m) {
    const auto bytes = [&](int64_t count) { return static_cast<size_t>(4 * m.padded * count); };
    __builtin_memset(m.sums, 0, bytes(m.sums_pitch));
    __builtin_memset(m.weights, 0, bytes(kWeightsPitch));
    __builtin_memset(m.decay, 0, bytes(1));
    if (m.padded > m.rows) __builtin_memset(m.cells, 0, bytes(m.cells_pitch));
    for (int64_t r = 0; r < m.rows; ++r) {
        const auto* q = task.q + r / task.queries * task.q_head + r % task.queries * task.q_token;
        m.factor[r] = K::prepare(q, task.q_type, task.k.size, m.cells + r * m.cells_pitch) * task.scale;
        m.maximum[r] = -__builtin_inff();
        m.total[r] = 0.0f;
    }
}

// Calls block<ROWS>(first row) until all rows are done: ROWS is a power of two, at most MOST.
template <int MOST, class F>
inline __attribute__((always_inline)) int64_t blocks(int64_t row, int64_t rows, const F& block) {
    for (; row + MOST <= rows; row += MOST) block.template operator()<MOST>(row);
    if constexpr (MOST > 1) return blocks<MOST / 2>(row, rows, block);
    return row;
}

template <class K, class W>
struct ScoreRows {
    const DecodeTask& task;
    const DecodeMemory<K, W>& m;
    const unsigned char *const *rows, *const *next;
    int64_t key;
    template <int ROWS>
    void operator()(int64_t row) const {
        score<K, ROWS>(rows, row == 0 ? next : nullptr, task.k.size * task.kv_bytes, m.cells + row * m.cells_pitch,
                       m.cells_pitch, m.logits + row * kTileKeys + key);
    }
};

template <class K, class W>
struct WeighRows {
    const DecodeTask& task;
    const DecodeMemory<K, W>& m;
    const unsigned char *const *rows, *const *next;
    int64_t keys;
    template <int ROWS>
    void operator()(int64_t row) const {
        weigh<W, ROWS>({rows, row == 0 ? next : nullptr, keys, task.v.size * task.kv_bytes,
                        m.weights + row * kWeightsPitch, kWeightsPitch, m.sums + row * m.sums_pitch, m.sums_pitch,
                        m.decay + row});
    }
};

// Finds what the rows see of a tile.
template <class K, class W>
void look(const DecodeTask& task, const DecodeMemory<K, W>& m, DecodeTile& tile) {
    const uint64_t all = tile.some;
    tile.same = true;
    tile.some = 0;
    if (task.look && !task.look(task, tile.begin, tile.keys, tile.visible)) return;
    const uint64_t inside = all & bits_before(task.length - tile.begin);
    for (int64_t query = 0; query < task.queries; ++query) {
        const int64_t first = query + task.lower - tile.begin, last = query + task.upper - tile.begin;
        const uint64_t banded = inside & bits_before(last + 1) & ~bits_before(first);
        for (int64_t r = query; r < m.rows; r += task.queries) {
            tile.visible[r] = task.look ? tile.visible[r] & banded : banded;
            tile.same &= tile.visible[r] == tile.visible[0];
            tile.some |= tile.visible[r];
        }
    }
}

// Finds the first tile from a key on that some row sees. Gives whether there is one.
template <class K, class W>
bool find(const DecodeTask& task, const DecodeMemory<K, W>& m, int64_t begin, DecodeTile& tile) {
    for (int64_t at = begin; at < task.end; at += tile.keys) {
        place(task, at, tile);
        look(task, m, tile);
        if (!tile.some) continue;
        locate(task, tile);
        return true;
    }
    return false;
}

template <class K, class W>
void update_rows(const DecodeTask& task, const DecodeMemory<K, W>& m, DecodeTile& tile) {
    using V = typename K::V;
    const auto row = [&](int64_t r) {
        return TileRow{m.logits + r * kTileKeys, tile.keys, tile.visible[r], task.apply != nullptr, m.factor[r], task.softcap,
                       task.k.scale ? tile.k_scale : nullptr, task.v.scale ? tile.v_scale : nullptr};
    };
    if (task.apply) {
        for (int64_t r = 0; r < m.rows; ++r) scale_logits<V>(row(r));
        task.apply(task, tile.begin, tile.keys, m.logits);
    }
    for (int64_t r = 0; r < m.rows; ++r)
        m.decay[r] = update<W>(row(r), m.maximum[r], m.total[r], m.weights + r * kWeightsPitch);
}

// Each row by itself, of the keys that it sees; what stands after them in its list of rows is zeros, for products of two keys.
template <class K, class W>
void weigh_visible(const DecodeTask& task, const DecodeMemory<K, W>& m, const DecodeTile& tile) {
    const unsigned char* rows[kTileKeys + 2];
    for (int64_t r = 0; r < m.rows; ++r) {
        auto* weights = m.weights + r * kWeightsPitch;
        int64_t keys = 0;
        for (uint64_t left = tile.visible[r]; left; left &= left - 1) {
            const int key = __builtin_ctzll(left);
            rows[keys] = tile.v[key];
            weights[keys++] = weights[key];
        }
        rows[keys] = rows[keys + 1] = kNoRow;
        weights[keys] = {};
        WeighRows<K, W>{task, m, rows, nullptr, keys}.template operator()<1>(r);
    }
}

template <class K, class W>
void attend_tile(const DecodeTask& task, const DecodeMemory<K, W>& m, DecodeTile& tile, const DecodeTile* next) {
    using V = typename K::V;
    for (int64_t key = 0; key < tile.keys; key += V::kLanes)
        blocks<V::kMaxRows>(0, m.padded, ScoreRows<K, W>{task, m, tile.k + key, next ? next->k + key : nullptr, key});
    update_rows(task, m, tile);
    if (tile.same) {
        blocks<8>(0, m.padded, WeighRows<K, W>{task, m, tile.v, next ? next->v : nullptr, tile.keys});
    } else {
        if (next) prefetch_rows(next->v, next->keys, task.v.size * task.kv_bytes);
        weigh_visible(task, m, tile);
    }
}

template <class K, class W>
void finish(const DecodeTask& task, const DecodeMemory<K, W>& m) {
    for (int64_t r = 0; r < m.rows; ++r) {
        W::order(m.sums + r * m.sums_pitch, m.sums_pitch);
        __builtin_memcpy(task.sum + r * task.v.size, m.sums + r * m.sums_pitch, static_cast<size_t>(4 * task.v.size));
        task.maximum[r] = m.maximum[r];
        task.total[r] = m.total[r];
    }
}

template <class K, class W>
void attend_part(const DecodeTask& task) {
    const DecodeMemory<K, W> m(task);
    DecodeTile tiles[2];
    tiles[0].visible = m.visible, tiles[1].visible = m.visible + m.padded;
    bool found = find(task, m, task.begin, tiles[0]);
    if (found && !(task.prefetched && tiles[0].begin == task.begin)) {
        prefetch_rows(tiles[0].k, tiles[0].keys, task.k.size * task.kv_bytes);
        prefetch_rows(tiles[0].v, tiles[0].keys, task.v.size * task.kv_bytes);
    }
    start(task, m);
    for (int which = 0; found; which ^= 1) {
        DecodeTile &tile = tiles[which], *next = &tiles[which ^ 1];
        found = find(task, m, tile.begin + tile.keys, *next);
        if (!found && task.following) {
            place(*task.following, task.following->begin, *next);
            locate(*task.following, *next);
        } else if (!found) {
            next = nullptr;
        }
        attend_tile(task, m, tile, next);
    }
    finish(task, m);
}

template <class V, class T>
void attend_float(const DecodeTask& task) {
    attend_part<KeysFloat<V, T>, ValuesFloat<V, T>>(task);
}

template <class V>
void attend_decode(const DecodeTask* task) {
    if (task->kv_type == kF32) attend_float<V, F32>(*task);
    if (task->kv_type == kBf16) attend_float<V, Bf16>(*task);
    if (task->kv_type == kF16) attend_float<V, F16>(*task);
    if (task->kv_type == kI8) attend_part<KeysInt8<V>, ValuesFloat<V, I8>>(*task);
    if (task->kv_type == kF8) attend_float<V, F8>(*task);
}

}  // namespace
}  // namespace opkit::attention
