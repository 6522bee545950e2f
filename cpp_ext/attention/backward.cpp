#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "backward_call.hpp"
#include "store.hpp"
#include "workers.hpp"

namespace opkit::attention {
namespace {

constexpr int64_t kUnits = 16;  // of work at least, where there are keys enough: more threads than that share fewer heads

// How work is cut: the tiles of a head of keys in pieces, by the shape alone. Each piece has sums of its own for the queries.
struct Cut {
    explicit Cut(const Call& call)
        : heads(call.batch * call.kv_heads),
          tiles((call.keys + kKeys - 1) / kKeys),
          blocks((call.queries + kBackwardRows - 1) / kBackwardRows),
          columns(padded_columns(call.head)),
          value_columns(padded_columns(call.columns)) {
        const int64_t wanted = heads >= kUnits ? 1 : (kUnits + heads - 1) / heads;
        of_piece = (tiles + wanted - 1) / wanted;
        pieces = (tiles + of_piece - 1) / of_piece;
    }
    int64_t heads, tiles, blocks, columns, value_columns, of_piece, pieces;
    int64_t sums() const { return blocks * kBackwardRows * columns; }  // floats, of the queries of a head
};

// Of one query head: its rows and their gradients as kernels read them.
struct Queries {
    char *cells, *gradient_cells;
    uint32_t *words, *gradient_words;
    const uint32_t **block_words, **block_gradient_words;  // of each block: there or, where these are the same, in its cells
    int64_t of_cells, of_gradient_cells, of_words, of_gradient_words;  // of a block

    Queries(const Call& call, const Cut& cut, Pieces& pieces) {
        of_cells = 4 * kBackwardRows * rounded_up(call.head, kWidest);
        of_gradient_cells = 4 * kBackwardRows * rounded_up(call.columns, kWidest);
        of_words = value_words(call.paired(), call.head, kBackwardRows);
        of_gradient_words = value_words(call.paired(), call.columns, kBackwardRows);
        cells = pieces.take<char>(of_cells * cut.blocks);
        gradient_cells = pieces.take<char>(of_gradient_cells * cut.blocks);
        words = pieces.take<uint32_t>(of_words * cut.blocks);
        gradient_words = pieces.take<uint32_t>(of_gradient_words * cut.blocks);
        block_words = pieces.take<const uint32_t*>(cut.blocks);
        block_gradient_words = pieces.take<const uint32_t*>(cut.blocks);
    }
    static int64_t bytes(const Call& call, const Cut& cut) {
        const int64_t row = 8 * (rounded_up(call.head, kWidest) + rounded_up(call.columns, kWidest));
        return cut.blocks * (kBackwardRows * row + 16) + 6 * 64;
    }
};

// Of one head of keys: some of its tiles.
struct Keys {
    uint32_t *keys, *values, *words;
    float *sums, *value_sums;
    int64_t of_keys, of_values, of_words;

    Keys(const Call& call, const Cut& cut, Pieces& pieces)
        : of_keys(key_words(call.paired(), call.head)),
          of_values(key_words(call.paired(), call.columns)),
          of_words(value_words(call.paired(), call.head)) {
        keys = pieces.take<uint32_t>(of_keys * cut.of_piece);
        values = pieces.take<uint32_t>(of_values * cut.of_piece);
        words = pieces.take<uint32_t>(of_words * cut.of_piece);
        sums = pieces.take<float>(kKeys * cut.columns * cut.of_piece);
        value_sums = pieces.take<float>(kKeys * cut.value_columns * cut.of_piece);
    }
    static int64_t bytes(const Call& call, const Cut& cut) {
        const int64_t words = key_words(call.paired(), call.head) + key_words(call.paired(), call.columns) +
                              value_words(call.paired(), call.head);
        return 4 * cut.of_piece * (words + kKeys * (cut.columns + cut.value_columns)) + 5 * 64;
    }
};

void pack_queries(const Call& call, const Gradients& arrays, const Cut& cut, const Queries& to, int64_t batch, int64_t head) {
    thread_local Store store;
    const auto fill = call.paired() ? call.kernels->attention_cells_bf16 : call.kernels->attention_cells_f32;
    const auto pack = [&](const Operand& operand, int64_t elements, int64_t block, bool clean, char* cells, uint32_t* words) {
        const bool same = !call.paired() && elements == padded_columns(elements);
        const int64_t first = block * kBackwardRows, count = std::min(kBackwardRows, call.queries - first);
        auto* copy = reinterpret_cast<float*>(store.of(4 * count * elements));
        const Rows rows = widened(*call.kernels, rows_of(operand, batch, head, first, count, elements), copy);
        fill(rows.data, rows.stride, count, elements, cells);
        const auto* filled = reinterpret_cast<const uint32_t*>(cells);
        if (same && !(clean && any_unclean(filled, count * elements, false))) return filled;
        pack_values(*call.kernels, rows, rounded_up(count, kMostRows), clean, words);
        return static_cast<const uint32_t*>(words);
    };
    for (int64_t n = 0; n < cut.blocks; ++n) {
        to.block_words[n] = pack(call.q, call.head, n, true, to.cells + n * to.of_cells, to.words + n * to.of_words);
        to.block_gradient_words[n] = pack(arrays.gradient, call.columns, n, false, to.gradient_cells + n * to.of_gradient_cells,
                                          to.gradient_words + n * to.of_gradient_words);
    }
}

// What is no finite number among keys counts where it is seen, by its scores; in the sum over keys it would reach every row.
void pack_piece(const Call& call, const Keys& to, int64_t batch, int64_t head, int64_t first, int64_t count) {
    for (int64_t n = 0; n < count; ++n) {
        const int64_t key = (first + n) * kKeys, keys = std::min(kKeys, call.keys - key);
        const Rows rows = rows_of(call.k, batch, head, key, keys, call.head);
        pack_keys(*call.kernels, rows, to.keys + n * to.of_keys);
        pack_values(*call.kernels, rows, kKeys, true, to.words + n * to.of_words);
        pack_keys(*call.kernels, rows_of(call.v, batch, head, key, keys, call.columns), to.values + n * to.of_values);
    }
}

using Sums = std::vector<Biases::Sum>;

// Some rows against a tile of keys, for users' functions and gradients of biases.
struct TileContext {
    const Call& call;
    const Sums& sums;
    Tile tile;
    Tile part(int64_t first, int64_t rows) const { return {tile.batch, tile.head, tile.row + first, rows, tile.key, tile.keys}; }
};

void apply(void* context, int64_t, int64_t first, int64_t rows, float* scores, int64_t pitch) {
    const auto& at = *static_cast<const TileContext*>(context);
    at.call.biases.apply(at.part(first, rows), scores, pitch);
}

void differentiate(void* context, int64_t first, int64_t rows, const float* before, float* gradients, const uint64_t* seen) {
    const auto& at = *static_cast<const TileContext*>(context);
    at.call.biases.differentiate(at.part(first, rows), before, gradients, seen, at.sums);
}

// All blocks of a query head against one tile of keys; without `query_sums` for the gradients of biases alone.
void run_tile(const Call& call, const Gradients& arrays, const Cut& cut, const Queries& queries, const Keys& keys, int64_t batch,
              int64_t head, int64_t tile, int64_t local, float* query_sums, const Sums& sums) {
    thread_local Store store;
    const int64_t bits = call.mask.scratch(kBackwardRows);
    Pieces pieces(store.of(Pieces::bytes(kBackwardMemory, 1) + Pieces::bytes(bits, 8) + Pieces::bytes(kBackwardRows, 8) +
                           Pieces::bytes(kBackwardRows * kKeys, 4)));
    auto* memory = pieces.take<char>(kBackwardMemory);
    auto *scratch = pieces.take<uint64_t>(bits), *visible = pieces.take<uint64_t>(kBackwardRows);
    auto* biases = pieces.take<float>(kBackwardRows * kKeys);
    const auto kernel = call.paired() ? call.kernels->attention_backward_bf16 : call.kernels->attention_backward_f32;
    for (int64_t block = 0; block < cut.blocks; ++block) {
        const int64_t row = block * kBackwardRows, rows = std::min(kBackwardRows, call.queries - row);
        const Tile where{batch, head, row, rows, tile * kKeys, std::min(kKeys, call.keys - tile * kKeys)};
        const State state = call.mask.look(where, scratch, visible);
        if (state == kHidden) continue;
        if (call.biases.adds()) call.biases.write(where, biases);
        TileContext context{call, sums, where};
        const bool differentiates = call.biases.applies() || !sums.empty();
        const int64_t at = (batch * call.heads + head) * call.queries + row;
        kernel({queries.cells + block * queries.of_cells, queries.gradient_cells + block * queries.of_gradient_cells,
                queries.block_words[block], queries.block_gradient_words[block],
                keys.keys + local * keys.of_keys, keys.values + local * keys.of_values, keys.words + local * keys.of_words, rows,
                call.head, call.columns, cut.columns, cut.value_columns, arrays.lse + at, arrays.delta + at,
                arrays.log_totals ? arrays.log_totals + at : nullptr, state == kPartial ? visible : nullptr, call.biases.adds() ? biases : nullptr, call.scale, call.softcap,
                query_sums ? query_sums + row * cut.columns : nullptr, keys.sums + local * kKeys * cut.columns,
                keys.value_sums + local * kKeys * cut.value_columns, memory, differentiates ? apply : nullptr,
                differentiates ? differentiate : nullptr, &context});
    }
}

// Rows of sums times a scale to a tensor's.
void write_rows(const Call& call, const Operand& to, int64_t batch, int64_t head, int64_t first, int64_t count, int64_t elements,
                float* sums, int64_t pitch, float scale) {
    const int64_t size = to.type == Type::Float ? 4 : 2;
    auto* data = static_cast<char*>(const_cast<void*>(to.data)) + (batch * to.stride[0] + head * to.stride[1]) * size;
    for (int64_t i = 0; i < count; ++i, sums += pitch) {
        char* row = data + (first + i) * to.stride[2] * size;
        auto* scaled = to.type == Type::Float ? reinterpret_cast<float*>(row) : sums;
        for (int64_t c = 0; c < elements; ++c) scaled[c] = sums[c] * scale;
        if (to.type != Type::Float) write_row(*call.kernels, sums, elements, to.type, row);
    }
}

// The sums of a bias tensor's gradient: one for each piece of work that may write the same elements as another.
struct Copies {
    Copies(const Call& call, const Cut& cut, const BiasGradient& of)
        : by_piece(of.by_key ? 0 : 1),
          by_head(of.by_head ? 0 : of.by_key ? 1 : cut.pieces),
          by_batch(of.by_batch ? 0 : (of.by_key ? 1 : cut.pieces) * (of.by_head ? 1 : call.kv_heads)),
          count((of.by_key ? 1 : cut.pieces) * (of.by_head ? 1 : call.kv_heads) * (of.by_batch ? 1 : call.batch)) {
        if (of.data && count > 1) sums.resize(static_cast<size_t>(count * of.elements));
    }
    double* at(const BiasGradient& of, int64_t batch, int64_t kv, int64_t piece) {
        return count == 1 ? of.data : sums.data() + (batch * by_batch + kv * by_head + piece * by_piece) * of.elements;
    }
    int64_t by_piece, by_head, by_batch, count;
    std::vector<double> sums;
};

// The gradients of biases in a call.
struct BiasSums {
    BiasSums(const Call& call, const Cut& cut, const std::vector<BiasGradient>& wanted) : wanted(wanted) {
        for (const BiasGradient& of : wanted) copies.emplace_back(call, cut, of);
    }
    Sums at(int64_t batch, int64_t kv, int64_t piece) {
        Sums sums;
        for (size_t n = 0; n < wanted.size(); ++n) {
            const int64_t* s = wanted[n].stride;
            sums.push_back({wanted[n].data ? copies[n].at(wanted[n], batch, kv, piece) : nullptr, {s[0], s[1], s[2], s[3]}});
        }
        return sums;
    }
    // Adds up the copies, in their order.
    void merge(int64_t workers) {
        constexpr int64_t kPart = 4096;
        for (size_t n = 0; n < wanted.size(); ++n) {
            const BiasGradient& of = wanted[n];
            if (!of.data || copies[n].count == 1) continue;
            deal((of.elements + kPart - 1) / kPart, workers, [&](int64_t part) {
                for (int64_t copy = 0; copy < copies[n].count; ++copy)
                    for (int64_t at = part * kPart; at < std::min(of.elements, (part + 1) * kPart); ++at)
                        of.data[at] += copies[n].sums[static_cast<size_t>(copy * of.elements + at)];
            });
        }
    }
    const std::vector<BiasGradient>& wanted;
    std::vector<Copies> copies;
};

// The sums of a block of queries of a head, over the pieces in their order.
void merge(const Call& call, const Gradients& arrays, const Cut& cut, int64_t batch, int64_t head, int64_t block, float* sums) {
    const int64_t row = block * kBackwardRows, rows = std::min(kBackwardRows, call.queries - row), n = rows * cut.columns;
    sums += row * cut.columns;
    for (int64_t piece = 1; piece < cut.pieces; ++piece)
        for (int64_t i = 0; i < n; ++i) sums[i] += sums[piece * cut.sums() + i];
    write_rows(call, arrays.q, batch, head, row, rows, call.head, sums, cut.columns, call.scale);
}

// A piece of a head of keys, against all queries of the heads that read it.
// `query_sums`: of all pieces, where a head has several.
void run_piece(const Call& call, const Gradients& arrays, const Cut& cut, int64_t unit, float* query_sums, BiasSums& of_biases) {
    thread_local Store store;
    const int64_t piece = unit % cut.pieces, kv = unit / cut.pieces % call.kv_heads, batch = unit / cut.pieces / call.kv_heads;
    const int64_t group = call.heads / call.kv_heads, first = piece * cut.of_piece, count = std::min(cut.of_piece, cut.tiles - first);
    const int64_t own = arrays.q.data && cut.pieces == 1 ? cut.sums() : 0;
    Pieces pieces(store.of(Queries::bytes(call, cut) + Keys::bytes(call, cut) + Pieces::bytes(own, 4)));
    auto* own_sums = pieces.take<float>(own);
    const Queries queries(call, cut, pieces);
    const Keys keys(call, cut, pieces);
    pack_piece(call, keys, batch, kv, first, count);
    const int64_t key = first * kKeys, rows = std::min(count * kKeys, call.keys - key);  // sums of others are never read
    std::memset(keys.sums, 0, static_cast<size_t>(4 * rows * cut.columns));
    std::memset(keys.value_sums, 0, static_cast<size_t>(4 * rows * cut.value_columns));
    const Sums bias_sums = of_biases.at(batch, kv, piece);
    for (int64_t head = kv * group; head < (kv + 1) * group; ++head) {
        float* sums = own ? own_sums : nullptr;
        if (query_sums) sums = query_sums + ((batch * call.heads + head) * cut.pieces + piece) * cut.sums();
        if (sums) std::memset(sums, 0, static_cast<size_t>(4 * call.queries * cut.columns));
        pack_queries(call, arrays, cut, queries, batch, head);
        for (int64_t n = 0; n < count; ++n) run_tile(call, arrays, cut, queries, keys, batch, head, first + n, n, sums, bias_sums);
        for (int64_t block = 0; own && block < cut.blocks; ++block) merge(call, arrays, cut, batch, head, block, own_sums);
    }
    if (!arrays.q.data) return store.trim();
    write_rows(call, arrays.k, batch, kv, key, rows, call.head, keys.sums, cut.columns, call.scale);
    write_rows(call, arrays.v, batch, kv, key, rows, call.columns, keys.value_sums, cut.value_columns, 1.0f);
    store.trim();
}

// The sums of result * gradient of a head's rows, less the gradient of the lse.
void write_delta(const Call& call, const Gradients& arrays, int64_t unit) {
    constexpr int kSums = 16;  // that a compiler adds to as vectors
    thread_local Store store;
    const int64_t batch = unit / call.heads, head = unit % call.heads, n = call.columns;
    auto* copy = reinterpret_cast<float*>(store.of(8 * n));
    const auto floats = [&](const Operand& operand, int64_t i, float* to) {
        const Rows row = rows_of(operand, batch, head, i, 1, n);
        if (row.type == Type::Float) return reinterpret_cast<const float*>(row.data);
        widen_row(row.data, row.type, n, to);
        return static_cast<const float*>(to);
    };
    for (int64_t i = 0; i < call.queries; ++i) {
        const float *out = floats(arrays.out, i, copy), *gradient = floats(arrays.gradient, i, copy + n);
        float sums[kSums] = {}, sum = 0.0f;
        int64_t c = 0;
        for (; c + kSums <= n; c += kSums)
            for (int j = 0; j < kSums; ++j) sums[j] += out[c + j] * gradient[c + j];
        for (; c < n; ++c) sum += out[c] * gradient[c];
        for (float each : sums) sum += each;
        arrays.delta[unit * call.queries + i] = arrays.of_lse ? sum - arrays.of_lse[unit * call.queries + i] : sum;
    }
}

// Where a log-sum-exp is so large that its rounding would be seen in the probabilities, the kernels read the largest logits and
// the logarithms of the sums that the forward, once more, writes to `apart`; of a huge logit and another the sum is the former.
Gradients exact(const Call& call, const Gradients& arrays, std::vector<float>& apart) {
    constexpr float kLarge = 0x1p12f;
    const int64_t rows = call.batch * call.heads * call.queries;
    Gradients found = arrays;
    if (std::none_of(arrays.lse, arrays.lse + rows, [](float x) { return std::fabs(x) > kLarge && std::isfinite(x); })) return found;
    apart.resize(static_cast<size_t>(2 * rows));
    Call again = call;
    again.lse = apart.data();
    again.log_totals = again.lse + rows;
    forward(again);
    found.lse = again.lse;
    found.log_totals = again.log_totals;
    return found;
}

}  // namespace

void backward(const Call& call, const Gradients& gradients, const std::vector<BiasGradient>& wanted) {
    if (call.batch == 0 || call.heads == 0 || call.queries == 0 || call.keys == 0) return;
    thread_local Store store;
    std::vector<float> apart;
    const Gradients arrays = exact(call, gradients, apart);
    const Cut cut(call);
    BiasSums of_biases(call, cut, wanted);
    const int64_t workers = workers_for(multiply_adds(call));
    if (!gradients.q.data) {
        deal(cut.heads * cut.pieces, workers, [&](int64_t unit) { run_piece(call, arrays, cut, unit, nullptr, of_biases); });
        return of_biases.merge(workers);
    }
    const int64_t heads = call.batch * call.heads, of_head = cut.pieces * cut.sums();
    auto* query_sums = cut.pieces == 1 ? nullptr : reinterpret_cast<float*>(store.of(4 * heads * of_head));
    deal(heads, workers, [&](int64_t unit) { write_delta(call, arrays, unit); });
    deal(cut.heads * cut.pieces, workers, [&](int64_t unit) { run_piece(call, arrays, cut, unit, query_sums, of_biases); });
    deal(query_sums ? heads * cut.blocks : 0, workers, [&](int64_t unit) {
        const int64_t head = unit / cut.blocks;
        merge(call, arrays, cut, head / call.heads, head % call.heads, unit % cut.blocks, query_sums + head * of_head);
    });
    of_biases.merge(workers);
    store.trim();
}

}  // namespace opkit::attention
