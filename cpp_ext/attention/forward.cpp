#include "forward_call.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>
#include <memory>
#include <new>

#include "../runtime/parallel.hpp"
#include "half.hpp"

namespace opkit::attention {
namespace {

constexpr int64_t kRows = 96;      // of a block: a multiple of every ISA's group
constexpr int64_t kWidest = 16;    // words of the widest vector

// Memory that grows, and is kept by its thread.
class Store {
public:
    ~Store() { release(); }
    char* of(int64_t bytes) {
        if (bytes > size_) {
            release();
            data_ = static_cast<char*>(::operator new(static_cast<size_t>(bytes), std::align_val_t{64}));
            size_ = bytes;
        }
        return data_;
    }

private:
    void release() {
        if (data_) ::operator delete(data_, std::align_val_t{64});
        data_ = nullptr;
    }
    char* data_ = nullptr;
    int64_t size_ = 0;
};

int64_t element_size(Type type) { return type == Type::Float ? 4 : 2; }

const char* at(const Operand& operand, int64_t batch, int64_t head, int64_t row) {
    return static_cast<const char*>(operand.data) +
           (batch * operand.stride[0] + head * operand.stride[1] + row * operand.stride[2]) * element_size(operand.type);
}

// How the keys and values of a head lie when they are packed.
struct Packing {
    explicit Packing(const Call& call)
        : paired(call.k.type == Type::Brain),
          tiles((call.keys + kKeys - 1) / kKeys),
          words(paired ? (call.head + 1) / 2 : call.head),
          columns(rounded_up(call.columns, kWidest)),
          value_words(kKeys / (paired ? 2 : 1) * columns) {}
    int64_t bytes() const { return rounded_up(4 * tiles * (kKeys * words + value_words) + tiles, 64); }
    uint32_t* keys(char* memory) const { return reinterpret_cast<uint32_t*>(memory); }
    uint32_t* values(char* memory) const { return keys(memory) + tiles * kKeys * words; }
    uint8_t* unclean(char* memory) const { return reinterpret_cast<uint8_t*>(values(memory) + tiles * value_words); }
    bool paired;
    int64_t tiles, words, columns, value_words;
};

void widen_row(const char* row, Type type, int64_t n, float* out) {
    if (type == Type::Float) {
        std::memcpy(out, row, static_cast<size_t>(n) * 4);
        return;
    }
    const auto* halves = reinterpret_cast<const uint16_t*>(row);
    for (int64_t i = 0; i < n; ++i) out[i] = widen_half(halves[i]);
}

// Rows of keys as words: where they lie, if that can be read as it is, else in `copy`.
const uint32_t* words_of(const Call& call, const Packing& packing, const char* rows, int64_t keys, uint32_t* copy, int64_t* pitch) {
    const int64_t stride = call.k.stride[2];
    if (call.k.type == Type::Float || (packing.paired && call.head % 2 == 0 && stride % 2 == 0 &&
                                       reinterpret_cast<uintptr_t>(rows) % 4 == 0)) {
        *pitch = packing.paired ? stride / 2 : stride;
        return reinterpret_cast<const uint32_t*>(rows);
    }
    *pitch = packing.words;
    for (int64_t key = 0; key < keys; ++key, rows += stride * element_size(call.k.type), copy += packing.words) {
        copy[packing.words - 1] = 0;
        if (packing.paired)
            std::memcpy(copy, rows, static_cast<size_t>(call.head) * 2);
        else
            widen_row(rows, call.k.type, call.head, reinterpret_cast<float*>(copy));
    }
    return copy - keys * packing.words;
}

bool any_unclean(const uint32_t* words, int64_t n, bool paired) {
    uint32_t found = 0;
    for (int64_t i = 0; i < n; ++i) {
        found |= (words[i] & 0x7F800000u) == 0x7F800000u;
        found |= paired & ((words[i] & 0x7F80u) == 0x7F80u);
    }
    return found != 0;
}

void pack_keys(const Call& call, const Packing& packing, const char* rows, int64_t keys, uint32_t* out) {
    thread_local Store store;
    if (keys < kKeys) std::memset(out, 0, static_cast<size_t>(kKeys * packing.words) * 4);
    int64_t pitch = 0;
    auto* copy = reinterpret_cast<uint32_t*>(store.of(4 * kKeys * packing.words));
    const uint32_t* words = words_of(call, packing, rows, keys, copy, &pitch);
    call.kernels->transpose_words(words, pitch, keys, packing.words, out);
}

void pack_values(const Call& call, const Packing& packing, const char* rows, int64_t keys, uint32_t* out) {
    if (keys < kKeys || packing.columns > call.columns) std::memset(out, 0, static_cast<size_t>(packing.value_words) * 4);
    const int64_t stride = call.v.stride[2];
    if (packing.paired) {
        const auto* from = reinterpret_cast<const uint16_t*>(rows);
        for (int64_t key = 0; key < keys; key += 2, out += packing.columns)
            call.kernels->pack_b_bf16(from + key * stride, stride, reinterpret_cast<uint16_t*>(out), call.columns,
                                      std::min<int64_t>(2, keys - key));
        return;
    }
    for (int64_t key = 0; key < keys; ++key, out += packing.columns)
        widen_row(rows + key * stride * element_size(call.v.type), call.v.type, call.columns, reinterpret_cast<float*>(out));
}

void pack_tile(const Call& call, const Packing& packing, int64_t batch, int64_t head, int64_t tile, char* memory) {
    const int64_t first = tile * kKeys, keys = std::min(kKeys, call.keys - first);
    uint32_t* values = packing.values(memory) + tile * packing.value_words;
    pack_keys(call, packing, at(call.k, batch, head, first), keys, packing.keys(memory) + tile * kKeys * packing.words);
    pack_values(call, packing, at(call.v, batch, head, first), keys, values);
    packing.unclean(memory)[tile] = any_unclean(values, packing.value_words, packing.paired);
}

// A block of query rows, and what its tiles are asked of.
struct Rows {
    const Call& call;
    Tile tile;
    uint64_t* scratch;
};

State prepare(void* context, int64_t number, uint64_t* visible, float* biases) {
    auto& rows = *static_cast<Rows*>(context);
    rows.tile.key = number * kKeys;
    rows.tile.keys = std::min(kKeys, rows.call.keys - rows.tile.key);
    const State state = rows.call.mask.look(rows.tile, rows.scratch, visible);
    if (state != kHidden && !rows.call.biases.empty()) rows.call.biases.write(rows.tile, biases);
    return state;
}

void write_row(const Call& call, const float* row, int64_t batch, int64_t head, int64_t query) {
    const int64_t place = batch * call.out_stride[0] + head * call.out_stride[1] + query * call.out_stride[2];
    if (call.q.type == Type::Float) {
        std::memcpy(static_cast<float*>(call.out) + place, row, static_cast<size_t>(call.columns) * 4);
    } else if (call.q.type == Type::Brain) {
        call.kernels->f32_to_bf16(row, static_cast<uint16_t*>(call.out) + place, call.columns);
    } else {
        uint16_t* out = static_cast<uint16_t*>(call.out) + place;
        for (int64_t c = 0; c < call.columns; ++c) out[c] = narrow_half(row[c]);
    }
}

void run_block(const Call& call, const Packing& packing, char* packed, Tile tile) {
    thread_local Store store;
    const int64_t memory = rounded_up(block_memory(tile.rows, call.head, packing.columns), 64);
    const int64_t sums = 4 * tile.rows * packing.columns, bits = 8 * call.mask.scratch(tile.rows);
    const int64_t copy = call.q.type == Type::Half ? 4 * tile.rows * call.head : 0;
    char* base = store.of(memory + rounded_up(sums, 64) + rounded_up(bits, 64) + rounded_up(4 * tile.rows, 64) + copy);
    auto* results = reinterpret_cast<float*>(base + memory);
    Rows rows{call, tile, reinterpret_cast<uint64_t*>(base + memory + rounded_up(sums, 64))};
    auto* lse = reinterpret_cast<float*>(reinterpret_cast<char*>(rows.scratch) + rounded_up(bits, 64));
    auto* widened = reinterpret_cast<float*>(reinterpret_cast<char*>(lse) + rounded_up(4 * tile.rows, 64));
    const char* queries = at(call.q, tile.batch, tile.head, tile.row);
    int64_t pitch = call.q.stride[2];
    if (copy) {
        for (int64_t i = 0; i < tile.rows; ++i)
            widen_row(queries + i * pitch * 2, call.q.type, call.head, widened + i * call.head);
        queries = reinterpret_cast<const char*>(widened);
        pitch = call.head;
    }
    const float sink = call.sinks ? call.sinks[tile.head] : -std::numeric_limits<float>::infinity();
    const Block block{queries,       pitch,          tile.rows, call.head,  packing.keys(packed), packing.values(packed),
                      packing.unclean(packed), packing.columns, 0, packing.tiles, prepare, &rows, call.scale,
                      call.softcap,  !call.biases.empty(), sink, results, lse, base};
    (packing.paired ? call.kernels->attention_bf16 : call.kernels->attention_f32)(block);
    for (int64_t i = 0; i < tile.rows; ++i) write_row(call, results + i * packing.columns, tile.batch, tile.head, tile.row + i);
    std::memcpy(call.lse + (tile.batch * call.heads + tile.head) * call.queries + tile.row, lse, static_cast<size_t>(tile.rows) * 4);
}

// Blocks of a query head, the last rows first: under a causal mask they have most to do.
struct Blocks {
    explicit Blocks(const Call& call)
        : count(std::max<int64_t>(1, (call.queries + kRows - 1) / kRows)),
          rows(std::min(kRows, rounded_up((call.queries + count - 1) / count, 12))),
          queries(call.queries) {
        count = (queries + rows - 1) / rows;
    }
    Tile tile(int64_t batch, int64_t head, int64_t number) const {
        const int64_t first = (count - 1 - number) * rows;
        return {batch, head, first, std::min(rows, queries - first), 0, 0};
    }
    int64_t count, rows, queries;
};

void on_all_threads(const std::function<void()>& work) {
    const int64_t threads = thread_count();
    parallel_for(0, threads, 1, [](int64_t begin, int64_t end, void* context) {
        for (; begin < end; ++begin) (*static_cast<const std::function<void()>*>(context))();
    }, const_cast<void*>(static_cast<const void*>(&work)));
}

// Each thread takes heads of keys: it packs one, and does all its queries, while what it packed is in its cache.
void by_heads(const Call& call, const Packing& packing, const Blocks& blocks) {
    std::atomic<int64_t> next{0};
    const int64_t group = call.heads / call.kv_heads;
    on_all_threads([&] {
        thread_local Store store;
        for (int64_t unit; (unit = next++) < call.batch * call.kv_heads;) {
            const int64_t batch = unit / call.kv_heads, kv = unit % call.kv_heads;
            char* packed = store.of(packing.bytes());
            for (int64_t tile = 0; tile < packing.tiles; ++tile) pack_tile(call, packing, batch, kv, tile, packed);
            for (int64_t n = 0; n < group * blocks.count; ++n)
                run_block(call, packing, packed, blocks.tile(batch, kv * group + n % group, n / group));
        }
    });
}

// Few heads: all threads pack as many as there are threads, then share their blocks.
void by_blocks(const Call& call, const Packing& packing, const Blocks& blocks) {
    thread_local Store store;
    const int64_t units = call.batch * call.kv_heads, group = call.heads / call.kv_heads;
    const int64_t wave = std::min<int64_t>(units, thread_count());
    char* packed = store.of(wave * packing.bytes());
    for (int64_t first = 0; first < units; first += wave) {
        const int64_t count = std::min(wave, units - first);
        std::atomic<int64_t> to_pack{0}, next{0};
        on_all_threads([&] {
            for (int64_t n; (n = to_pack++) < count * packing.tiles;) {
                const int64_t unit = first + n / packing.tiles;
                pack_tile(call, packing, unit / call.kv_heads, unit % call.kv_heads, n % packing.tiles,
                          packed + n / packing.tiles * packing.bytes());
            }
        });
        on_all_threads([&] {
            for (int64_t n; (n = next++) < count * group * blocks.count;) {
                const int64_t local = n % (count * group), unit = first + local / group;
                run_block(call, packing, packed + local / group * packing.bytes(),
                          blocks.tile(unit / call.kv_heads, unit % call.kv_heads * group + local % group, n / (count * group)));
            }
        });
    }
}

}  // namespace

void forward(const Call& call) {
    if (call.batch == 0 || call.heads == 0 || call.queries == 0) return;
    const Packing packing(call);
    const Blocks blocks(call);
    const int64_t units = call.batch * call.kv_heads, threads = thread_count();
    if (units % threads == 0 || units >= 4 * threads)
        by_heads(call, packing, blocks);
    else
        by_blocks(call, packing, blocks);
}

}  // namespace opkit::attention
