#include "product.hpp"

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>

#include "../attention/vectors_plain.hpp"
#include "blocked.hpp"

namespace opkit::product {
namespace {

constexpr std::align_val_t kAlignment{64};
constexpr int64_t kMinColumns = 64;      // of a task
constexpr int64_t kMaxColumns = 1024;    // of one whose sums are added to several times: they stay in the second-level cache
constexpr int64_t kTasks = 4;            // of a thread, so that one that is late holds the others up less; one where each copies x
constexpr int64_t kFewRows = 48;         // of a block that is copied: as few as can be if the weight stays in the cache
constexpr int64_t kMaxWeight = 1 << 17;  // floats that do
constexpr int64_t kGap = 16;             // floats between copied rows, so that they are not in the same set of a cache

constexpr int64_t kMaxPacked = 1 << 21;  // floats of right operands that are packed at once: they stay in a last-level cache
constexpr int64_t kMinPacked = 256;      // columns, whatever the depth is

constexpr int64_t kPlaceFloats = sizeof(const void*) / 4;  // that a pointer takes the memory of

int64_t divided_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Part n of so many that are nearly equal, in whole units.
struct Range {
    Range(int64_t size, int64_t unit, int64_t parts, int64_t n)
        : begin(std::min(size, divided_up(size, unit) * n / parts * unit)),
          end(std::min(size, divided_up(size, unit) * (n + 1) / parts * unit)) {}
    int64_t begin, end;
    int64_t size() const { return end - begin; }
};

// Whether rows that are so far apart are in the same sets of a first-level cache (32 KiB, 8 ways), which cannot hold a tile of them.
bool collide(int64_t pitch, int64_t rows) { return rows > 8 && pitch % 512 == 0; }

struct Plan {
    Plan(const Blocked& call, int64_t threads) {
        copied = call.copy || (!call.find && collide(call.x_pitch, call.rows));
        const bool few_columns = call.columns * std::min(call.depth, kMaxDepth) <= kMaxWeight;
        const int64_t shallow = kMaxRows * kMaxDepth / std::clamp<int64_t>(call.depth, 1, kMaxDepth);
        row_parts = divided_up(call.rows, !copied ? shallow : few_columns ? kFewRows : kMaxRows);
        if (call.find)
            depth_parts = divided_up(call.taps, std::max<int64_t>(1, kMaxTaps / std::max<int64_t>(call.depth, 1)));
        else if (call.rows > 1 || call.copy)
            depth_parts = std::max<int64_t>(1, divided_up(call.depth, kMaxSum));
        const int64_t work = call.groups * call.rows * call.columns * std::max<int64_t>(call.taps * call.depth, 1);
        workers = threads > 1 && work >= kMinShared ? threads : 1;
        if (depth_parts > 1 && !call.find) column_parts = std::max<int64_t>(1, divided_up(call.columns, kMaxColumns));
        if (workers == 1) return;
        const int64_t wanted = workers * (copied ? 1 : kTasks), others = call.groups * row_parts;
        const int64_t most = std::max(column_parts, divided_up(call.columns, kMinColumns));
        column_parts = std::clamp<int64_t>(divided_up(wanted, others), column_parts, most);
    }
    bool copied;
    int64_t row_parts, depth_parts = 1, column_parts = 1, workers;
};

void run_task(const Blocked& call, const Plan& plan, int64_t task, const isa::Table& kernels) {
    const int64_t group = task / (plan.row_parts * plan.column_parts);
    const Range rows(call.rows, call.find ? call.line : 1, plan.row_parts, task / plan.column_parts % plan.row_parts);
    const Range columns(call.columns, 2 * kPanel, plan.column_parts, task % plan.column_parts);
    if (rows.size() == 0 || columns.size() == 0) return;
    Block block{};
    block.y = call.y + group * call.y_group + rows.begin * call.y_pitch + columns.begin;
    block.bias = call.bias ? call.bias + group * call.bias_group + columns.begin : nullptr;
    block.addend = call.addend ? call.addend + group * call.addend_group + rows.begin * call.addend_pitch + columns.begin : nullptr;
    block.addend_pitch = call.addend_pitch;
    block.y_pitch = call.y_pitch;
    block.panel_pitch = call.taps * call.depth * kPanel;
    block.rows = rows.size();
    block.line = call.find ? call.line : block.rows;
    block.columns = columns.size();
    block.activation = call.activation;
    const float* panels = call.packed + group * call.packed_group + columns.begin / kPanel * block.panel_pitch;
    for (int64_t part = 0; part < plan.depth_parts; ++part) {
        block.first = part == 0;
        block.last = part + 1 == plan.depth_parts;
        if (call.find) {
            const Range taps(call.taps, 1, plan.depth_parts, part);
            const int64_t after = divided_up(call.depth, kGap) * kGap;
            float* zeros = scratch(after + taps.size() * rows.size() * kPlaceFloats);
            auto* places = reinterpret_cast<const float**>(zeros + after);
            std::fill_n(zeros, call.depth, 0.0f);
            call.find(call.context, group, rows.begin, rows.size(), taps.begin, taps.end, places, zeros);
            block.places = places;
            block.taps = taps.size();
            block.depth = call.depth;
            block.panels = panels + taps.begin * call.depth * kPanel;
            kernels.product_f32(block);
            continue;
        }
        const Range depth(call.depth, 1, plan.depth_parts, part);
        block.taps = 1;
        block.depth = depth.size();
        block.panels = panels + depth.begin * kPanel;
        block.x = call.x + group * call.x_group + rows.begin * call.x_pitch + depth.begin;
        block.x_pitch = call.x_pitch;
        if (plan.copied) {
            const int64_t pitch = divided_up(depth.size(), kGap) * kGap + kGap;
            float* copy = scratch(rows.size() * pitch);
            if (call.copy)
                call.copy(call.context, group, rows.begin, rows.size(), depth.begin, depth.end, copy, pitch);
            else
                for (int64_t row = 0; row < rows.size(); ++row)
                    std::memcpy(copy + row * pitch, block.x + row * call.x_pitch, static_cast<size_t>(depth.size()) * sizeof *copy);
            block.x = copy;
            block.x_pitch = pitch;
        }
        kernels.product_f32(block);
    }
}

// Of a matrix whose elements along the depth are apart.
void copy_strided(const void* context, int64_t group, int64_t row, int64_t rows, int64_t begin, int64_t end, float* out, int64_t pitch) {
    const Matmul& call = *static_cast<const Matmul*>(context);
    const float* a = call.a + group * call.a_batch + row * call.a_row + begin * call.a_depth;
    if (call.a_row == 1) {
        return transpose_rows(a, call.a_depth, end - begin, rows, out, pitch);
    }
    for (int64_t i = 0; i < rows; ++i)
        for (int64_t k = 0; k < end - begin; ++k) out[i * pitch + k] = a[i * call.a_row + k * call.a_depth];
}

}  // namespace

Memory::Memory(int64_t floats)
    : data_(static_cast<float*>(::operator new(static_cast<size_t>(floats) * sizeof(float), kAlignment))) {}

Memory::~Memory() { ::operator delete(data_, kAlignment); }

float* scratch(int64_t floats) {
    thread_local std::unique_ptr<Memory> memory;
    thread_local int64_t size = 0;
    if (size < floats) {
        size = 0;
        memory.reset();
        memory = std::make_unique<Memory>(floats);
        size = floats;
    }
    return memory->data();
}

void transpose_rows(const float* from, int64_t from_pitch, int64_t rows, int64_t columns, float* to, int64_t to_pitch) {
    using V = attention::PlainVectors;
    const int64_t whole_rows = rows / V::kLanes * V::kLanes, whole_columns = columns / V::kLanes * V::kLanes;
    for (int64_t i = 0; i < whole_rows; i += V::kLanes)
        for (int64_t j = 0; j < whole_columns; j += V::kLanes) {
            V::Words square[V::kLanes];
            for (int n = 0; n < V::kLanes; ++n) square[n] = V::words(from + (i + n) * from_pitch + j);
            V::transpose(square);
            for (int n = 0; n < V::kLanes; ++n) V::store(to + (j + n) * to_pitch + i, V::floats(square[n]));
        }
    for (int64_t i = 0; i < rows; ++i)
        for (int64_t j = i < whole_rows ? whole_columns : 0; j < columns; ++j) to[j * to_pitch + i] = from[i * from_pitch + j];
}

const isa::Table& widest() { return isa::choices().back().kernels; }

void multiply(const Blocked& call, const Parallel& parallel, const isa::Table& kernels) {
    if (call.groups == 0 || call.rows == 0 || call.columns == 0) return;
    const Plan plan(call, parallel.threads);
    const Parallel workers{parallel.run, static_cast<int32_t>(plan.workers), parallel.self};
    deal(workers, call.groups * plan.row_parts * plan.column_parts,
         [&](int64_t task) { run_task(call, plan, task, kernels); });
}

int64_t packed_floats(int64_t columns, int64_t depth) { return divided_up(columns, kPanel) * kPanel * depth; }

void pack(const float* w, int64_t column_stride, int64_t depth_stride, int64_t columns, int64_t depth, float* packed) {
    for (int64_t column = 0; column < columns; column += kPanel, packed += depth * kPanel) {
        const int64_t count = std::min(kPanel, columns - column);
        const float* from = w + column * column_stride;
        if (count < kPanel) std::fill_n(packed, depth * kPanel, 0.0f);
        if (depth_stride == 1) {
            transpose_rows(from, column_stride, count, depth, packed, kPanel);
        } else {
            for (int64_t k = 0; k < depth; ++k)
                for (int64_t j = 0; j < count; ++j) packed[k * kPanel + j] = from[j * column_stride + k * depth_stride];
        }
    }
}

void linear(const Linear& call, const Parallel& parallel, const isa::Table& kernels) {
    multiply({call.x, call.packed, call.bias, call.addend, call.y, call.x_pitch, call.addend_pitch, call.y_pitch, 0, 0, 0, 0, 0, 1,
              call.rows, call.rows, call.columns, 1, call.depth, call.activation, nullptr, nullptr, nullptr},
             parallel, kernels);
}

// A product whose right operands are packed to `packed` first.
void multiply_packed(const Matmul& call, float* packed, const Parallel& parallel, const isa::Table& kernels) {
    const int64_t weights = call.b_batch == 0 ? std::min<int64_t>(call.batch, 1) : call.batch, panels = divided_up(call.columns, kPanel);
    const int64_t panel = call.depth * kPanel;
    const Parallel packers{parallel.run, weights * panels * panel < kMinShared ? 1 : parallel.threads, parallel.self};
    const int64_t some = divided_up(panels, 8);  // tasks of a matrix
    deal(packers, weights * some, [&](int64_t task) {
        const int64_t n = task / some;
        const Range part(panels, 1, some, task % some);
        pack(call.b + n * call.b_batch + part.begin * kPanel * call.b_column, call.b_column, call.b_depth,
             std::min(part.size() * kPanel, call.columns - part.begin * kPanel), call.depth,
             packed + (n * panels + part.begin) * panel);
    });
    multiply({call.a, packed, call.bias, call.addend, call.y, call.a_row, call.addend_pitch, call.y_pitch, call.a_batch,
              call.b_batch == 0 ? 0 : panels * panel, 0, call.addend_batch, call.y_batch, call.batch, call.rows, call.rows,
              call.columns, 1, call.depth, kNone, call.a_depth == 1 ? nullptr : copy_strided, nullptr, &call},
             parallel, kernels);
}

void matmul(const Matmul& call, const Parallel& parallel, const isa::Table& kernels) {
    const bool shared = call.b_batch == 0;
    const int64_t padded = divided_up(call.columns, kPanel) * kPanel, most = kMaxPacked / std::max<int64_t>(call.depth, 1);
    const int64_t together = std::max<int64_t>(most / std::max<int64_t>(padded, 1), 1);
    const int64_t batch = shared ? call.batch : std::min(together, std::max<int64_t>(call.batch, 1));
    const int64_t columns = std::min(padded, std::max(most / kPanel * kPanel, kMinPacked));
    const Memory packed((shared ? 1 : batch) * columns * call.depth);
    for (int64_t n = 0; n < call.batch; n += batch)
        for (int64_t j = 0; j < call.columns; j += columns) {
            Matmul part = call;
            part.batch = std::min(batch, call.batch - n);
            part.columns = std::min(columns, call.columns - j);
            part.a += n * call.a_batch;
            part.b += n * call.b_batch + j * call.b_column;
            part.y += n * call.y_batch + j;
            if (call.bias) part.bias += j;
            if (call.addend) part.addend += n * call.addend_batch + j;
            multiply_packed(part, packed.data(), parallel, kernels);
        }
}

}  // namespace opkit::product
