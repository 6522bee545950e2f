#include "mask.hpp"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

namespace opkit::attention {
namespace {

uint64_t first_bits(int64_t n) { return n >= kKeys ? ~uint64_t{0} : n <= 0 ? 0 : (uint64_t{1} << n) - 1; }

// Bits [low, high].
uint64_t between(int64_t low, int64_t high) { return high < low ? 0 : first_bits(high + 1) & ~first_bits(low); }

const int32_t* ids(const Strided& tensor, int64_t batch) {
    return static_cast<const int32_t*>(tensor.data) + batch * tensor.stride[0];
}

// i + `offset` + lower <= j <= i + `offset` + upper, for rows whose i + offset lies within [least, most].
State banded(const Tile& tile, int64_t least, int64_t most, int64_t lower, int64_t upper) {
    const int64_t last = tile.key + tile.keys - 1;
    if (last - least < lower || tile.key - most > upper) return kHidden;
    return tile.key - most >= lower && last - least <= upper ? kFull : kPartial;
}

State band(const Tile& tile, int64_t lower, int64_t upper, uint64_t* bits) {
    const State state = banded(tile, tile.row, tile.row + tile.rows - 1, lower, upper);
    if (state != kPartial) return state;
    for (int64_t i = 0; i < tile.rows; ++i) {
        const int64_t at = tile.row + i - tile.key;
        bits[i] = between(std::max<int64_t>(at + lower, 0), std::min(at + upper, tile.keys - 1));
    }
    return kPartial;
}

State by_length(const Tile& tile, int64_t length, uint64_t* bits) {
    if (length <= tile.key) return kHidden;
    if (length >= tile.key + tile.keys) return kFull;
    std::fill_n(bits, tile.rows, first_bits(length - tile.key));
    return kPartial;
}

// One bit for each truth; torch's are bytes of 0 or 1.
uint64_t truths(const uint8_t* at, int64_t stride, int64_t n) {
    uint64_t bits = 0;
    int64_t j = 0;
    for (; stride == 1 && j + 8 <= n; j += 8) {
        uint64_t eight;
        std::memcpy(&eight, at + j, 8);
        bits |= (eight * 0x0102040810204080u >> 56) << j;
    }
    for (; j < n; ++j) bits |= uint64_t{at[j * stride] != 0} << j;
    return bits;
}

State state_of(const uint64_t* bits, int64_t rows, int64_t keys) {
    uint64_t any = 0, all = ~uint64_t{0};
    for (int64_t i = 0; i < rows; ++i) {
        any |= bits[i];
        all &= bits[i];
    }
    return any == 0 ? kHidden : all == first_bits(keys) ? kFull : kPartial;
}

struct Operand {
    State state;
    uint64_t* bits;
};

// The second operand as the first: what follows it is written over.
Operand moved(Operand a, Operand b, int64_t rows) {
    if (b.state == kPartial) std::copy_n(b.bits, rows, a.bits);
    return {b.state, a.bits};
}

Operand both(Operand a, Operand b, int64_t rows) {
    if (a.state == kHidden || b.state == kFull) return a;
    if (b.state == kHidden || a.state == kFull) return moved(a, b, rows);
    for (int64_t i = 0; i < rows; ++i) a.bits[i] &= b.bits[i];
    return a;
}

Operand either(Operand a, Operand b, int64_t rows) {
    if (a.state == kFull || b.state == kHidden) return a;
    if (b.state == kFull || a.state == kHidden) return moved(a, b, rows);
    for (int64_t i = 0; i < rows; ++i) a.bits[i] |= b.bits[i];
    return a;
}

Operand negated(Operand a, const Tile& tile) {
    if (a.state != kPartial) return {a.state == kFull ? kHidden : kFull, a.bits};
    for (int64_t i = 0; i < tile.rows; ++i) a.bits[i] = ~a.bits[i] & first_bits(tile.keys);
    return a;
}

}  // namespace

Mask::Mask(const std::vector<int64_t>& program, std::vector<Strided> tensors, int64_t batch, int64_t keys, Functions functions)
    : tensors_(std::move(tensors)), functions_(placed(std::move(functions), tensors_)), tiles_((keys + kKeys - 1) / kKeys) {
    int64_t height = 0;
    for (size_t at = 0; at < program.size();) {
        const int64_t opcode = program[at++];
        if (opcode < 0 || opcode > static_cast<int64_t>(Opcode::Function))
            throw std::invalid_argument("opkit::attention: mask: there is no opcode " + std::to_string(opcode));
        Step step{static_cast<Opcode>(opcode), {}};
        if (at + static_cast<size_t>(kMaskOperands[opcode]) > program.size())
            throw std::invalid_argument("opkit::attention: mask: the program ends within a step");
        for (int64_t n = 0; n < kMaskOperands[opcode]; ++n) step.operands[n] = program[at++];
        height += step.opcode < Opcode::Not ? -1 : step.opcode == Opcode::Not ? 0 : 1;
        if (height < 1) throw std::invalid_argument("opkit::attention: mask: a step has no operand before it");
        depth_ = std::max(depth_, height);
        if (step.opcode == Opcode::Segments) {
            note_bounds(tensors_.at(static_cast<size_t>(step.operands[1])), batch, keys);
            step.operands[2] = static_cast<int64_t>(bounds_.size()) - 1;
        }
        if (step.opcode == Opcode::Function && static_cast<uint64_t>(step.operands[0]) >= functions_.size())
            throw std::invalid_argument("opkit::attention: mask: there is no function " + std::to_string(step.operands[0]));
        steps_.push_back(step);
    }
    if (height > 1) throw std::invalid_argument("opkit::attention: mask: the program leaves more than one result");
}

void Mask::note_bounds(const Strided& tensor, int64_t batch, int64_t keys) {
    Bounds bounds;
    for (int64_t b = 0; b < (tensor.stride[0] ? batch : 1); ++b)
        for (int64_t key = 0; key < keys; key += kKeys) {
            const int32_t* at = ids(tensor, b) + key * tensor.stride[1];
            std::pair<int32_t, int32_t> found{*at, *at};
            for (int64_t j = 1; j < std::min(kKeys, keys - key); ++j) {
                found.first = std::min(found.first, at[j * tensor.stride[1]]);
                found.second = std::max(found.second, at[j * tensor.stride[1]]);
            }
            bounds.push_back(found);
        }
    bounds_.push_back(std::move(bounds));
}

State Mask::segments(const Step& step, const Tile& tile, uint64_t* bits) const {
    const Strided &of_rows = tensors_[static_cast<size_t>(step.operands[0])], &of_keys = tensors_[static_cast<size_t>(step.operands[1])];
    const int32_t* mine = ids(of_rows, tile.batch) + tile.row * of_rows.stride[1];
    const int32_t* theirs = ids(of_keys, tile.batch) + tile.key * of_keys.stride[1];
    const Bounds& all = bounds_[static_cast<size_t>(step.operands[2])];
    const auto [least, most] = all[static_cast<size_t>((of_keys.stride[0] ? tile.batch * tiles_ : 0) + tile.key / kKeys)];
    bool meets = false, same = least == most;
    for (int64_t i = 0; i < tile.rows; ++i) {
        const int32_t id = mine[i * of_rows.stride[1]];
        meets |= id >= least && id <= most;
        same &= id == least;
    }
    if (!meets || same) return same ? kFull : kHidden;
    for (int64_t i = 0; i < tile.rows; ++i) {
        const int32_t id = mine[i * of_rows.stride[1]];
        if (i > 0 && id == mine[(i - 1) * of_rows.stride[1]]) {
            bits[i] = bits[i - 1];
            continue;
        }
        bits[i] = 0;
        for (int64_t j = 0; j < tile.keys; ++j) bits[i] |= uint64_t{theirs[j * of_keys.stride[1]] == id} << j;
    }
    return state_of(bits, tile.rows, tile.keys);
}

State Mask::dense(const Step& step, const Tile& tile, uint64_t* bits) const {
    const Strided& tensor = tensors_[static_cast<size_t>(step.operands[0])];
    const int64_t* s = tensor.stride;
    const auto* at = static_cast<const uint8_t*>(tensor.data) + tile.batch * s[0] + tile.head * s[1] + tile.row * s[2] + tile.key * s[3];
    for (int64_t i = 0; i < tile.rows; ++i) bits[i] = i > 0 && s[2] == 0 ? bits[0] : truths(at + i * s[2], s[3], tile.keys);
    return state_of(bits, tile.rows, tile.keys);
}

State Mask::band_at(const Step& step, const Tile& tile, uint64_t* bits) const {
    const Strided& tensor = tensors_[static_cast<size_t>(step.operands[0])];
    const int32_t* offsets = ids(tensor, tile.batch) + tile.row * tensor.stride[1];
    int64_t least = tile.row + offsets[0], most = least;
    for (int64_t i = 1; i < tile.rows; ++i) {
        const int64_t at = tile.row + i + offsets[i * tensor.stride[1]];
        least = std::min(least, at);
        most = std::max(most, at);
    }
    const State state = banded(tile, least, most, step.operands[1], step.operands[2]);
    if (state != kPartial) return state;
    for (int64_t i = 0; i < tile.rows; ++i) {
        const int64_t at = tile.row + i + offsets[i * tensor.stride[1]] - tile.key;
        bits[i] = between(std::max<int64_t>(at + step.operands[1], 0), std::min(at + step.operands[2], tile.keys - 1));
    }
    return kPartial;
}

State Mask::leaf(const Step& step, const Tile& tile, uint64_t* bits) const {
    switch (step.opcode) {
        case Opcode::Band: return band(tile, step.operands[0], step.operands[1], bits);
        case Opcode::Segments: return segments(step, tile, bits);
        case Opcode::Length:
            return by_length(tile, *ids(tensors_[static_cast<size_t>(step.operands[0])], tile.batch), bits);
        case Opcode::Dense: return dense(step, tile, bits);
        case Opcode::Function: {
            const Function& function = functions_[static_cast<size_t>(step.operands[0])];
            return static_cast<State>(reinterpret_cast<LookAt>(function.code.entry)(function.words.data(), &tile, bits));
        }
        default: return band_at(step, tile, bits);
    }
}

// Whether a step's result makes no difference, since what it is combined with decides: functions are then not called.
bool Mask::decided(size_t step, State before) const {
    if (step + 1 == steps_.size()) return false;
    const Opcode next = steps_[step + 1].opcode;
    return (next == Opcode::And && before == kHidden) || (next == Opcode::Or && before == kFull);
}

State Mask::look(const Tile& tile, uint64_t* scratch, uint64_t* visible) const {
    std::vector<Operand>& stack = []() -> std::vector<Operand>& {
        thread_local std::vector<Operand> operands;
        return operands;
    }();
    stack.clear();
    for (size_t number = 0; number < steps_.size(); ++number) {
        const Step& step = steps_[number];
        if (step.opcode == Opcode::Not) {
            stack.back() = negated(stack.back(), tile);
        } else if (step.opcode < Opcode::Not) {
            const Operand second = stack.back();
            stack.pop_back();
            stack.back() = step.opcode == Opcode::And ? both(stack.back(), second, tile.rows) : either(stack.back(), second, tile.rows);
        } else {
            uint64_t* bits = scratch + static_cast<int64_t>(stack.size()) * tile.rows;
            const bool skipped = step.opcode == Opcode::Function && !stack.empty() && decided(number, stack.back().state);
            stack.push_back({skipped ? stack.back().state : leaf(step, tile, bits), bits});
        }
    }
    const Operand found = stack.empty() ? Operand{kFull, nullptr} : stack.back();
    if (found.state == kPartial) std::copy_n(found.bits, tile.rows, visible);
    if (found.state != kFull || tile.keys == kKeys) return found.state;
    std::fill_n(visible, tile.rows, first_bits(tile.keys));
    return kPartial;
}

}  // namespace opkit::attention
