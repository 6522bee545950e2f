#include "bias.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <stdexcept>
#include <string>
#include <utility>

#include "half.hpp"

namespace opkit::attention {
namespace {

float widened(float value) { return value; }
float widened(double value) { return static_cast<float>(value); }

template <class T, class Read>
void add(const void* data, int64_t at, int64_t stride, int64_t n, float* out, Read read) {
    const T* from = static_cast<const T*>(data) + at;
    if (stride == 1)
        for (int64_t j = 0; j < n; ++j) out[j] += read(from[j]);
    else
        for (int64_t j = 0; j < n; ++j) out[j] += read(from[j * stride]);
}

float widened_brain(uint16_t value) { return isa::widen_one(value); }

}  // namespace

void add_elements(const Typed& tensor, int64_t at, int64_t stride, int64_t n, float* out) {
    switch (tensor.type) {
        case Type::Float: return add<float>(tensor.data, at, stride, n, out, [](float v) { return widened(v); });
        case Type::Double: return add<double>(tensor.data, at, stride, n, out, [](double v) { return widened(v); });
        case Type::Half: return add<uint16_t>(tensor.data, at, stride, n, out, widen_half);
        case Type::Brain: return add<uint16_t>(tensor.data, at, stride, n, out, widened_brain);
    }
}

Biases::Biases(const std::vector<int64_t>& program, std::vector<Typed> tensors, int64_t queries, int64_t keys, Functions functions,
               bool few)
    : tensors_(std::move(tensors)),
      functions_(placed(std::move(functions), tensors_)),
      queries_(queries),
      keys_(keys),
      offset_(keys - queries),
      few_(few) {
    static std::atomic<uint64_t> last{0};
    id_ = ++last;
    for (size_t at = 0; at < program.size();) {
        Step step{program[at++], {}};
        if (step.kind < 0 || step.kind > kBiasFunction)
            throw std::invalid_argument("opkit::attention: bias: there is no kind " + std::to_string(step.kind));
        if (at + static_cast<size_t>(kBiasOperands[step.kind]) > program.size())
            throw std::invalid_argument("opkit::attention: bias: the program ends within a step");
        for (int64_t n = 0; n < kBiasOperands[step.kind]; ++n) step.operands[n] = program[at++];
        if (step.kind == kBiasFunction && static_cast<uint64_t>(step.operands[0]) >= functions_.size())
            throw std::invalid_argument("opkit::attention: bias: there is no function " + std::to_string(step.operands[0]));
        steps_.push_back(step);
    }
    while (added_ < steps_.size() && steps_[added_].kind != kBiasFunction) ++added_;
}

void Biases::run(const Step& step, const Tile& tile, float* out, int64_t pitch) const {
    switch (step.kind) {
        case 0: return dense(step, tile, out, pitch);
        case 1: return linear(step, tile, out, pitch);
        case 2: return relative(step, tile, out, pitch);
    }
    const Function& function = functions_[static_cast<size_t>(step.operands[0])];
    const Distances* of = distances(step.operands[0], false, tile);
    reinterpret_cast<Score>(function.code.entry)(function.words.data(), &tile, of, out, pitch);
}

// A thread has those of one head at a time.
const Distances* Biases::distances(int64_t function, bool slope, const Tile& tile) const {
    struct Table {
        Distances found{};
        std::vector<int64_t> memory;
    };
    thread_local struct {
        uint64_t id = 0;
        int64_t batch = 0, head = 0;
        std::vector<Table> tables;
    } known;
    const Function& of = functions_[static_cast<size_t>(function)];
    const Code& code = slope ? of.slope : of.code;
    if (code.bytes == 0) return nullptr;
    if (few_ || known.id != id_ || known.batch != tile.batch || known.head != tile.head) {
        known.id = id_;
        known.batch = tile.batch;
        known.head = tile.head;
        known.tables.resize(2 * functions_.size());
        for (Table& table : known.tables) table.found = {};
    }
    Table& table = known.tables[static_cast<size_t>(2 * function + slope)];
    if (!table.found.entries) {
        const int64_t before = few_ ? tile.row + tile.rows - 1 - tile.key : queries_ - 1;
        const int64_t count = few_ ? tile.rows - 1 + kKeys : queries_ - 1 + rounded_up(keys_, kKeys);
        table.memory.resize(static_cast<size_t>((count * code.bytes + 7) / 8));
        char* entries = reinterpret_cast<char*>(table.memory.data());
        table.found = {entries, count, before};
        reinterpret_cast<Tabulate>(code.tabulate)(of.words.data(), &tile, &table.found, entries);
    }
    return &table.found;
}

void Biases::write(const Tile& tile, float* out) const {
    std::fill_n(out, tile.rows * kKeys, 0.0f);
    for (size_t n = 0; n < added_; ++n) run(steps_[n], tile, out, kKeys);
}

void Biases::add_and_apply(const Tile& tile, float* scores, int64_t pitch) const {
    for (const Step& step : steps_) run(step, tile, scores, pitch);
}

void Biases::apply(const Tile& tile, float* scores, int64_t pitch) const {
    for (size_t n = added_; n < steps_.size(); ++n) run(steps_[n], tile, scores, pitch);
}

void Biases::differentiate(const Tile& tile, const float* before, float* gradients, const uint64_t* seen,
                           const std::vector<Sum>& sums) const {
    const size_t size = static_cast<size_t>(tile.rows * kKeys), last = steps_.size();
    thread_local std::vector<float> states;  // the scores before each step from the second function on
    states.resize(last > added_ ? (last - added_) * size : 0);
    const auto state = [&](size_t step) { return step == added_ ? before : states.data() + (step - added_) * size; };
    for (size_t n = added_; n + 1 < last; ++n) {
        float* next = states.data() + (n + 1 - added_) * size;
        std::copy_n(state(n), size, next);
        run(steps_[n], tile, next, kKeys);
    }
    thread_local std::vector<double*> of_tensors;
    for (size_t n = last; n-- > 0;) {
        const Step& step = steps_[n];
        if (step.kind == kBiasFunction) {
            const Function& function = functions_[static_cast<size_t>(step.operands[0])];
            of_tensors.clear();
            for (const auto& [word, number] : function.tensors)
                of_tensors.push_back(sums.empty() ? nullptr : sums[static_cast<size_t>(number)].data);
            const Distances* of = distances(step.operands[0], true, tile);
            reinterpret_cast<Slope>(function.slope.entry)(function.words.data(), &tile, of, state(n), gradients, seen,
                                                          sums.empty() ? nullptr : of_tensors.data());
        } else if (step.kind == 0 && !sums.empty() && sums[static_cast<size_t>(step.operands[0])].data) {
            const auto& [data, s] = sums[static_cast<size_t>(step.operands[0])];
            for (int64_t i = 0; i < tile.rows; ++i) {
                double* row = data + tile.batch * s[0] + tile.head * s[1] + (tile.row + i) * s[2] + tile.key * s[3];
                for (int64_t j = 0; j < tile.keys; ++j)
                    if (seen[i] >> j & 1) row[j * s[3]] += static_cast<double>(gradients[i * kKeys + j]);
            }
        }
    }
}

void Biases::dense(const Step& step, const Tile& tile, float* out, int64_t pitch) const {
    const Typed& tensor = tensors_[static_cast<size_t>(step.operands[0])];
    const int64_t* s = tensor.stride;
    for (int64_t i = 0; i < tile.rows; ++i)
        add_elements(tensor, tile.batch * s[0] + tile.head * s[1] + (tile.row + i) * s[2] + tile.key * s[3], s[3], tile.keys,
                     out + i * pitch);
}

void Biases::linear(const Step& step, const Tile& tile, float* out, int64_t pitch) const {
    const Typed& slopes = tensors_[static_cast<size_t>(step.operands[0])];
    float slope = 0.0f;
    add_elements(slopes, tile.batch * slopes.stride[0] + tile.head * slopes.stride[1], 1, 1, &slope);
    for (int64_t i = 0; i < tile.rows; ++i)
        for (int64_t j = 0; j < tile.keys; ++j)
            out[i * pitch + j] -= slope * static_cast<float>(std::abs(tile.row + i + offset_ - tile.key - j));
}

void Biases::relative(const Step& step, const Tile& tile, float* out, int64_t pitch) const {
    const Typed &by_row = tensors_[static_cast<size_t>(step.operands[0])], &by_column = tensors_[static_cast<size_t>(step.operands[1])];
    const int64_t width = step.operands[2];
    const auto at = [&tile](const Typed& t, int64_t i) {
        return tile.batch * t.stride[0] + tile.head * t.stride[1] + (tile.row + i) * t.stride[2];
    };
    for (int64_t i = 0; i < tile.rows; ++i)
        for (int64_t j = 0; j < tile.keys;) {
            const int64_t key = tile.key + j, column = key % width, n = std::min(width - column, tile.keys - j);
            float* row = out + i * pitch + j;
            add_elements(by_row, at(by_row, i) + key / width * by_row.stride[3], 0, n, row);
            add_elements(by_column, at(by_column, i) + column * by_column.stride[3], by_column.stride[3], n, row);
            j += n;
        }
}

}  // namespace opkit::attention
