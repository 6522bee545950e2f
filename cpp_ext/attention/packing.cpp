#include "packing.hpp"

#include <algorithm>
#include <cstring>

#include "half.hpp"
#include "store.hpp"

namespace opkit::attention {
namespace {

int64_t element_size(Type type) { return type == Type::Float ? 4 : 2; }

const char* row_of(const Rows& rows, int64_t i) { return rows.data + i * rows.stride * element_size(rows.type); }

// Rows of keys as words: where they lie, if that can be read as it is, else in `copy`.
const uint32_t* words_of(const Rows& rows, bool paired, uint32_t* copy, int64_t* pitch) {
    const bool whole = rows.elements % 2 == 0 && rows.stride % 2 == 0 && reinterpret_cast<uintptr_t>(rows.data) % 4 == 0;
    if (rows.type == Type::Float || (paired && whole)) {
        *pitch = paired ? rows.stride / 2 : rows.stride;
        return reinterpret_cast<const uint32_t*>(rows.data);
    }
    *pitch = words_of_row(paired, rows.elements);
    for (int64_t i = 0; i < rows.count; ++i) {
        uint32_t* to = copy + i * *pitch;
        if (rows.elements % 2) to[*pitch - 1] = 0;  // of its pair, the second
        if (paired)
            std::memcpy(to, row_of(rows, i), static_cast<size_t>(rows.elements) * 2);
        else
            widen_row(row_of(rows, i), rows.type, rows.elements, reinterpret_cast<float*>(to));
    }
    return copy;
}

void clean_words(uint32_t* words, int64_t n, bool paired) {
    for (int64_t i = 0; i < n; ++i) {
        const uint32_t word = words[i];
        if (paired) {
            if ((word & 0x7F80u) == 0x7F80u) words[i] &= 0xFFFF0000u;
            if ((word & 0x7F800000u) == 0x7F800000u) words[i] &= 0xFFFFu;
        } else if ((word & 0x7F800000u) == 0x7F800000u) {
            words[i] = 0;
        }
    }
}

}  // namespace

Rows rows_of(const Operand& operand, int64_t batch, int64_t head, int64_t first, int64_t count, int64_t elements) {
    const int64_t place = batch * operand.stride[0] + head * operand.stride[1] + first * operand.stride[2];
    const char* data = static_cast<const char*>(operand.data) + place * element_size(operand.type);
    return {data, operand.stride[2], count, elements, operand.type};
}

void pack_keys(const isa::Table& kernels, const Rows& rows, uint32_t* out) {
    thread_local Store store;
    const bool paired = is_paired(kernels, rows.type);
    const int64_t words = words_of_row(paired, rows.elements), whole = key_words(paired, rows.elements);
    const int64_t filled = rows.count < kKeys ? 0 : kKeys * words;
    std::memset(out + filled, 0, static_cast<size_t>(whole - filled) * 4);
    int64_t pitch = 0;
    const uint32_t* from = words_of(rows, paired, reinterpret_cast<uint32_t*>(store.of(4 * kKeys * words)), &pitch);
    kernels.transpose_words(from, pitch, rows.count, words, out);
}

void pack_values(const isa::Table& kernels, const Rows& rows, int64_t room, bool clean, uint32_t* out) {
    const bool paired = is_paired(kernels, rows.type);
    const int64_t columns = padded_columns(rows.elements), words = value_words(paired, rows.elements, room);
    const int64_t filled = columns > rows.elements ? 0 : words_of_row(paired, rows.count) * columns;
    std::memset(out + filled, 0, static_cast<size_t>(words - filled) * 4);
    if (paired) {
        for (int64_t i = 0; i < rows.count; i += 2)
            kernels.pack_b_bf16(reinterpret_cast<const uint16_t*>(row_of(rows, i)), rows.stride,
                                reinterpret_cast<uint16_t*>(out + i / 2 * columns), rows.elements,
                                std::min<int64_t>(2, rows.count - i));
    } else {
        for (int64_t i = 0; i < rows.count; ++i)
            widen_row(row_of(rows, i), rows.type, rows.elements, reinterpret_cast<float*>(out + i * columns));
    }
    if (clean && any_unclean(out, filled ? filled : words, paired)) clean_words(out, words, paired);
}

bool any_unclean(const uint32_t* words, int64_t n, bool paired) {
    uint32_t found = 0;
    for (int64_t i = 0; i < n; ++i) found |= (words[i] & 0x7F800000u) == 0x7F800000u;
    for (int64_t i = 0; paired && i < n; ++i) found |= (words[i] & 0x7F80u) == 0x7F80u;
    return found != 0;
}

void widen_row(const char* row, Type type, int64_t n, float* out) {
    const auto* halves = reinterpret_cast<const uint16_t*>(row);
    if (type == Type::Float) std::memcpy(out, row, static_cast<size_t>(n) * 4);
    if (type == Type::Half)
        for (int64_t i = 0; i < n; ++i) out[i] = widen_half(halves[i]);
    if (type == Type::Brain)
        for (int64_t i = 0; i < n; ++i) out[i] = isa::widen_one(halves[i]);
}

Rows widened(const isa::Table& kernels, const Rows& rows, float* copy) {
    if (rows.type == Type::Float || is_paired(kernels, rows.type)) return rows;
    for (int64_t i = 0; i < rows.count; ++i) widen_row(row_of(rows, i), rows.type, rows.elements, copy + i * rows.elements);
    return {reinterpret_cast<const char*>(copy), rows.elements, rows.count, rows.elements, Type::Float};
}

void write_row(const isa::Table& kernels, const float* row, int64_t n, Type type, void* out) {
    if (type == Type::Float) std::memcpy(out, row, static_cast<size_t>(n) * 4);
    if (type == Type::Brain) kernels.f32_to_bf16(row, static_cast<uint16_t*>(out), n);
    if (type == Type::Half)
        for (int64_t c = 0; c < n; ++c) static_cast<uint16_t*>(out)[c] = narrow_half(row[c]);
}

}  // namespace opkit::attention
