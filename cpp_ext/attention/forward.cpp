#include "forward_call.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>

#include "store.hpp"
#include "workers.hpp"

namespace opkit::attention {
namespace {

constexpr int64_t kRows = 96;      // of a block: a multiple of every ISA's group
constexpr int64_t kFloatRows = 12; // a multiple of the groups of float32

// How the keys and values of a head lie when they are packed.
struct Packing {
    explicit Packing(const Call& call)
        : tiles((call.keys + kKeys - 1) / kKeys),
          of_keys(key_words(call.paired(), call.head)),
          of_values(value_words(call.paired(), call.columns)) {}
    int64_t bytes() const { return rounded_up(4 * tiles * (of_keys + of_values) + tiles, 64); }
    uint32_t* keys(char* memory) const { return reinterpret_cast<uint32_t*>(memory); }
    uint32_t* values(char* memory) const { return keys(memory) + tiles * of_keys; }
    uint8_t* unclean(char* memory) const { return reinterpret_cast<uint8_t*>(values(memory) + tiles * of_values); }
    int64_t tiles, of_keys, of_values;
};

void pack_tile(const Call& call, const Packing& packing, int64_t batch, int64_t head, int64_t tile, char* memory) {
    const int64_t first = tile * kKeys, count = std::min(kKeys, call.keys - first);
    uint32_t* values = packing.values(memory) + tile * packing.of_values;
    pack_keys(*call.kernels, rows_of(call.k, batch, head, first, count, call.head), packing.keys(memory) + tile * packing.of_keys);
    pack_values(*call.kernels, rows_of(call.v, batch, head, first, count, call.columns), kKeys, false, values);
    packing.unclean(memory)[tile] = !call.mask.empty() && any_unclean(values, packing.of_values, call.paired());
}

// A block of query rows, and what decides which keys its tiles see.
struct TileContext {
    const Call& call;
    Tile tile;
    uint64_t* scratch;
};

State prepare(void* context, int64_t number, uint64_t* visible, float* biases) {
    auto& tile_context = *static_cast<TileContext*>(context);
    tile_context.tile.key = number * kKeys;
    tile_context.tile.keys = std::min(kKeys, tile_context.call.keys - tile_context.tile.key);
    const State state = tile_context.call.mask.look(tile_context.tile, tile_context.scratch, visible);
    if (state != kHidden && tile_context.call.biases.adds()) tile_context.call.biases.write(tile_context.tile, biases);
    return state;
}

void apply(void* context, int64_t number, int64_t first, int64_t rows, float* scores, int64_t pitch) {
    const auto& tile_context = *static_cast<const TileContext*>(context);
    Tile tile = tile_context.tile;
    tile.row += first;
    tile.rows = rows;
    tile.key = number * kKeys;
    tile.keys = std::min(kKeys, tile_context.call.keys - tile.key);
    tile_context.call.biases.apply(tile, scores, pitch);
}

void run_block(const Call& call, const Packing& packing, char* packed, Tile tile) {
    thread_local Store store;
    const int64_t columns = padded_columns(call.columns), memory = block_memory(tile.rows, call.head, call.biases.adds());
    const int64_t bits = call.mask.scratch(tile.rows), summed = rounded_up(tile.rows, kMostRows) * columns;
    const int64_t copied = call.q.type == Type::Float ? 0 : tile.rows * call.head;
    Pieces pieces(store.of(Pieces::bytes(memory, 1) + Pieces::bytes(summed, 4) + Pieces::bytes(bits, 8) +
                           2 * Pieces::bytes(tile.rows, 4) + Pieces::bytes(copied, 4)));
    char* inside = pieces.take<char>(memory);
    auto* sums = pieces.take<float>(summed);
    TileContext tile_context{call, tile, pieces.take<uint64_t>(bits)};
    auto *lse = pieces.take<float>(tile.rows), *log_totals = pieces.take<float>(tile.rows);
    const Rows queries =
        widened(*call.kernels, rows_of(call.q, tile.batch, tile.head, tile.row, tile.rows, call.head), pieces.take<float>(copied));
    const float sink = call.sinks ? call.sinks[tile.head] : -std::numeric_limits<float>::infinity();
    const Block block{queries.data, queries.stride, tile.rows, call.head, packing.keys(packed), packing.of_keys, call.keys,
                      packing.values(packed), packing.unclean(packed), columns, 0, packing.tiles, prepare, &tile_context, call.scale,
                      call.softcap, call.biases.adds(), sink, sums, lse, call.log_totals ? log_totals : nullptr, inside,
                      call.biases.applies() ? apply : nullptr};
    (call.paired() ? call.kernels->attention_bf16 : call.kernels->attention_f32)(block);
    const int64_t size = call.q.type == Type::Float ? 4 : 2;
    for (int64_t i = 0; i < tile.rows && call.out; ++i) {
        const int64_t at = tile.batch * call.out_stride[0] + tile.head * call.out_stride[1] + (tile.row + i) * call.out_stride[2];
        write_row(*call.kernels, sums + i * columns, call.columns, call.q.type, static_cast<char*>(call.out) + at * size);
    }
    const int64_t first = (tile.batch * call.heads + tile.head) * call.queries + tile.row;
    std::copy_n(lse, tile.rows, call.lse + first);
    if (call.log_totals) std::copy_n(log_totals, tile.rows, call.log_totals + first);
}

// Blocks of a query head, the last rows first: under a causal mask they have most to do.
struct Blocks {
    explicit Blocks(const Call& call)
        : count(std::max<int64_t>(1, (call.queries + kRows - 1) / kRows)),
          rows(std::min(kRows, rounded_up((call.queries + count - 1) / count, together(call)))),
          queries(call.queries) {
        count = (queries + rows - 1) / rows;
    }
    Tile tile(int64_t batch, int64_t head, int64_t number) const {
        const int64_t first = (count - 1 - number) * rows;
        return {batch, head, first, std::min(rows, queries - first), 0, 0};
    }
    static int64_t together(const Call& call) { return call.paired() ? call.kernels->pair_rows : kFloatRows; }
    int64_t count, rows, queries;
};

// Each thread takes heads of keys: it packs one, and does all its queries, while what it packed is in its cache.
void by_heads(const Call& call, const Packing& packing, const Blocks& blocks, int64_t workers) {
    const int64_t group = call.heads / call.kv_heads;
    deal(call.batch * call.kv_heads, workers, [&](int64_t unit) {
        thread_local Store store;
        const int64_t batch = unit / call.kv_heads, kv = unit % call.kv_heads;
        char* packed = store.of(packing.bytes());
        for (int64_t tile = 0; tile < packing.tiles; ++tile) pack_tile(call, packing, batch, kv, tile, packed);
        for (int64_t n = 0; n < group * blocks.count; ++n)
            run_block(call, packing, packed, blocks.tile(batch, kv * group + n % group, n / group));
        store.trim();
    });
}

// Few heads: all threads pack as many as there are threads, then share their blocks.
void by_blocks(const Call& call, const Packing& packing, const Blocks& blocks, int64_t workers) {
    thread_local Store store;
    const int64_t units = call.batch * call.kv_heads, group = call.heads / call.kv_heads;
    const int64_t wave = std::min<int64_t>(units, workers);
    char* packed = store.of(wave * packing.bytes());
    for (int64_t first = 0; first < units; first += wave) {
        const int64_t count = std::min(wave, units - first);
        deal(count * packing.tiles, workers, [&](int64_t n) {
            const int64_t unit = first + n / packing.tiles;
            pack_tile(call, packing, unit / call.kv_heads, unit % call.kv_heads, n % packing.tiles,
                      packed + n / packing.tiles * packing.bytes());
        });
        deal(count * group * blocks.count, workers, [&](int64_t n) {
            const int64_t local = n % (count * group), unit = first + local / group;
            run_block(call, packing, packed + local / group * packing.bytes(),
                      blocks.tile(unit / call.kv_heads, unit % call.kv_heads * group + local % group, n / (count * group)));
        });
    }
    store.trim();
}

}  // namespace

void forward(const Call& call) {
    if (call.batch == 0 || call.heads == 0 || call.queries == 0) return;
    const Packing packing(call);
    const Blocks blocks(call);
    const int64_t units = call.batch * call.kv_heads, workers = workers_for(multiply_adds(call));
    if (units % workers == 0 || units >= 4 * workers)
        by_heads(call, packing, blocks, workers);
    else
        by_blocks(call, packing, blocks, workers);
}

}  // namespace opkit::attention
