// Attention forward by AMX. What forward.hpp says holds, but for the order: 32 rows go over kChunk tiles of keys before the next
// ones do, so that their queries and sums stay in the first cache, and keys and values come from the second.
//
// Per row and tile of 64 keys: 128 * (head + columns) FLOPs, that is (head + columns) / 8 cycles of the matrix unit at 1,024 FLOPs a
// cycle, 16 at a head of 64; and 4 vectors of softmax, about 24 cycles of two vector ports. The two do not overlap on a Xeon of the
// fourth generation: a TDPBF16PS between rows of softmax costs its 16 cycles and more, so products and softmax alternate. Measured
// there, cycles a row and tile: head 64: scores 13, softmax 25, values 16; head 128: 22, 25, 32, and 40 more where keys and values
// (32 KiB a tile) come from the second cache, which is what limits it from there on. Sums of values stay in memory, as a product of
// 64 keys reads and writes each of their tiles once.
#pragma once

#include "amx_product.hpp"
#include "amx_softmax.hpp"
#include "forward.hpp"
#include "pairs_avx512.hpp"

namespace opkit::attention::amx {
namespace {

constexpr int64_t kRows = 32;                // that are computed together
constexpr int64_t kChunk = kTilesAhead;      // tiles
constexpr int64_t kScorePitch = kKeys + 16;  // floats; rows of scores, cells and queries begin at other places of a page than those
constexpr int64_t kCellPitch = kKeys / 2 + 16;  // of keys and values do: loads wait for stores with the same twelve bits of address

// Some rows against one tile of keys.
struct Item {
    int64_t tile, first, rows;
    const uint64_t* visible;   // null: everything
    const float* biases;
};

// The memory of a block, cut up.
struct Memory {
    explicit Memory(const Block& block) : rows(rounded_up(block.rows, kRows)), pitch(rounded_up(block.head, isa::kTileK) + isa::kTileK) {
        char* at = static_cast<char*>(block.memory);
        const auto take = [&at](int64_t bytes) {
            char* found = at;
            at += rounded_up(bytes, 64);
            return found;
        };
        queries = reinterpret_cast<uint16_t*>(take(2 * rows * pitch));
        scores = reinterpret_cast<float*>(take(4 * kRows * kScorePitch));
        cells = reinterpret_cast<uint32_t*>(take(4 * kRows * kCellPitch));
        total = reinterpret_cast<float*>(take(64 * rows));
        base = reinterpret_cast<float*>(take(4 * rows));
        correction = reinterpret_cast<float*>(take(4 * rows));
        for (auto& one : visible) one = reinterpret_cast<uint64_t*>(take(8 * rows));
        if (block.biased)
            for (auto& one : biases) one = reinterpret_cast<float*>(take(4 * rows * kKeys));
    }
    int64_t rows, pitch;
    uint16_t* queries;
    float *scores, *total, *base, *correction, *biases[kChunk] = {};
    uint32_t* cells;
    uint64_t* visible[kChunk];
};

inline bool is_plain(const Block& block) { return !block.biased && !block.apply && !(block.softcap > 0) && block.scale > 0 && !block.log_totals; }

void begin(const Block& block, const Memory& memory) {
    const auto* rows = static_cast<const uint16_t*>(block.queries);
    const float sink = block.sink * (is_plain(block) ? kLog2E : 1.0f);
    const bool sunk = block.sink > -__builtin_inff();
    __builtin_memset(memory.queries, 0, static_cast<size_t>(2 * memory.rows * memory.pitch));
    __builtin_memset(memory.total, 0, static_cast<size_t>(64 * memory.rows));
    __builtin_memset(block.sums, 0, static_cast<size_t>(4 * memory.rows * block.columns));
    __builtin_memset(memory.cells, 0, static_cast<size_t>(4 * kRows * kCellPitch));
    for (int64_t i = 0; i < block.rows; ++i) {
        __builtin_memcpy(memory.queries + i * memory.pitch, rows + i * block.query_pitch, static_cast<size_t>(2 * block.head));
        memory.base[i] = sunk ? sink : kLowest;
        memory.total[16 * i] = sunk ? kWeight : 0.0f;
    }
}

void end(const Block& block, const Memory& memory) {
    const float unit = is_plain(block) ? kLn2 : 1.0f;
    for (int64_t i = 0; i < block.rows; ++i) {
        const float total = _mm512_reduce_add_ps(_mm512_loadu_ps(memory.total + 16 * i));
        const __m512 inverse = _mm512_set1_ps(total == 0.0f ? 0.0f : 1.0f / total);
        float* row = block.sums + i * block.columns;
        for (int64_t c = 0; c < block.columns; c += 16) _mm512_storeu_ps(row + c, _mm512_mul_ps(_mm512_loadu_ps(row + c), inverse));
        const float base = memory.base[i] * unit, log_total = total == 0.0f ? 0.0f : __builtin_logf(total / kWeight);
        block.lse[i] = total == 0.0f ? -__builtin_inff() : block.log_totals ? base : base + log_total;
        if (block.log_totals) block.log_totals[i] = log_total;
    }
}

void multiply_keys(const Block& block, const Memory& memory, const Item& item) {
    const Left queries{memory.queries + item.first * memory.pitch, 2 * memory.pitch, rounded_up(block.head, isa::kTileK) / isa::kTileK};
    const Right keys{block.keys + item.tile * block.of_keys, 4 * kKeys};
    multiply(queries, keys, {memory.scores, 4 * kScorePitch, kKeys, item.rows > isa::kTile, false});
}

void add_values(const Block& block, const Memory& memory, const Item& item) {
    const Left powers{memory.cells, 4 * kCellPitch, kKeys / isa::kTileK};
    const Right values{block.values + item.tile * (kKeys / 2) * block.columns, 4 * block.columns};
    multiply(powers, values, {block.sums + item.first * block.columns, 4 * block.columns, block.columns, item.rows > isa::kTile, true});
}

// Scores of a row as they are defined.
void adjust(const Block& block, const float* biases, float* scores) {
    const __m512 scale = _mm512_set1_ps(block.scale), cap = _mm512_set1_ps(block.softcap);
    const __m512 inverse = _mm512_set1_ps(block.softcap > 0 ? 1.0f / block.softcap : 0.0f);
    for (int64_t at = 0; at < kKeys; at += 16) {
        __m512 score = _mm512_mul_ps(_mm512_loadu_ps(scores + at), scale);
        if (block.softcap > 0) score = _mm512_mul_ps(hyperbolic_tangent<Vectors>(_mm512_mul_ps(score, inverse)), cap);
        if (biases) score = _mm512_add_ps(score, _mm512_loadu_ps(biases + at));
        _mm512_storeu_ps(scores + at, score);
    }
}

template <bool PLAIN, bool PARTIAL>
bool soften_rows(const Block& block, const Memory& memory, const Item& item) {
    const float factor = block.scale * kLog2E;
    bool moved = false;
    if (!PLAIN)
        for (int64_t i = 0; i < item.rows; ++i) adjust(block, item.biases ? item.biases + i * kKeys : nullptr, memory.scores + i * kScorePitch);
    if (!PLAIN && block.apply) block.apply(block.context, item.tile, item.first, item.rows, memory.scores, kScorePitch);
    for (int64_t i = 0; i < item.rows; ++i) {
        const int64_t at = item.first + i;
        float* row = memory.scores + i * kScorePitch;
        const RowState state{memory.base + at, memory.total + 16 * at, memory.correction + at};
        memory.correction[at] = 1.0f;
        moved |= soften<PLAIN, PARTIAL>(row, factor, PARTIAL ? item.visible[i] : 0, state, memory.cells + i * kCellPitch);
    }
    return moved;
}

// Softmax of an item. Returns whether a base has moved.
bool soften_item(const Block& block, const Memory& memory, const Item& item) {
    if (is_plain(block)) return item.visible ? soften_rows<true, true>(block, memory, item) : soften_rows<true, false>(block, memory, item);
    return item.visible ? soften_rows<false, true>(block, memory, item) : soften_rows<false, false>(block, memory, item);
}

void correct(const Block& block, const Memory& memory, const Item& item) {
    for (int64_t i = item.first; i < item.first + item.rows; ++i) {
        if (memory.correction[i] == 1.0f) continue;
        const __m512 factor = _mm512_set1_ps(memory.correction[i]);
        float* row = block.sums + i * block.columns;
        for (int64_t c = 0; c < block.columns; c += 16) _mm512_storeu_ps(row + c, _mm512_mul_ps(_mm512_loadu_ps(row + c), factor));
    }
}

// Where values that are no numbers are hidden from some rows: see forward.hpp.
__attribute__((noinline)) void add_visible(const Block& block, const Memory& memory, const Item& item) {
    const uint32_t* values = block.values + item.tile * (kKeys / 2) * block.columns;
    for (int64_t i = 0; i < item.rows; ++i)
        for (int64_t key = 0; key < kKeys; ++key) {
            if (!(item.visible[i] >> key & 1)) continue;
            const float weight = half_of(memory.cells[i * kCellPitch + key / 2], key);
            float* row = block.sums + (item.first + i) * block.columns;
            for (int64_t c = 0; c < block.columns; ++c) row[c] += weight * half_of(values[key / 2 * block.columns + c], key);
        }
}

void run_item(const Block& block, const Memory& memory, const Item& item) {
    multiply_keys(block, memory, item);
    if (soften_item(block, memory, item)) correct(block, memory, item);
    if (item.visible && block.unclean[item.tile])
        add_visible(block, memory, item);
    else
        add_values(block, memory, item);
}

// Tiles that are prepared together: those that any row sees.
struct Chunk {
    int64_t tiles[kChunk], count = 0;
    State states[kChunk];
};

int64_t fill(Chunk& chunk, const Block& block, const Memory& memory, int64_t tile) {
    for (chunk.count = 0; tile < block.last && chunk.count < kChunk; ++tile) {
        const int64_t n = chunk.count;
        chunk.states[n] = block.prepare(block.context, tile, memory.visible[n], memory.biases[n]);
        chunk.tiles[n] = tile;
        chunk.count += chunk.states[n] != kHidden;
    }
    return tile;
}

void run_chunk(const Block& block, const Memory& memory, const Chunk& chunk) {
    for (int64_t first = 0; first < block.rows; first += kRows) {
        const int64_t rows = block.rows - first < kRows ? block.rows - first : kRows;
        for (int64_t n = 0; n < chunk.count; ++n) {
            const uint64_t* visible = chunk.states[n] == kPartial ? memory.visible[n] + first : nullptr;
            if (visible && span_of(visible, rows).empty()) continue;
            run_item(block, memory, {chunk.tiles[n], first, rows, visible, block.biased ? memory.biases[n] + first * kKeys : nullptr});
        }
    }
}

void attend(const Block& block) {
    const Memory memory(block);
    const isa::WholeTiles tiles;
    begin(block, memory);
    Chunk chunk;
    for (int64_t tile = block.first; tile < block.last;) {
        tile = fill(chunk, block, memory, tile);
        run_chunk(block, memory, chunk);
    }
    end(block, memory);
}

}  // namespace
}  // namespace opkit::attention::amx
