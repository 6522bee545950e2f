// Attention of tensors in a program: opkit's operator, and torch's for CPUs.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <string>

#include "../attention/forward_call.hpp"
#include "../isa/dispatch.hpp"
#include "../runtime/failure.hpp"
#include "operators.hpp"
#include "tensor.hpp"

namespace opkit::model {
namespace {

using namespace attention;

Type type_of(const opk_tensor& tensor) {
    switch (tensor.dtype) {
        case OPK_FLOAT32: return Type::Float;
        case OPK_FLOAT64: return Type::Double;
        case OPK_FLOAT16: return Type::Half;
        case OPK_BFLOAT16: return Type::Brain;
        default: throw std::runtime_error("there is no attention of " + describe(tensor.dtype, tensor.sizes, tensor.rank));
    }
}

// Rows whose elements lie next to each other: a copy, unless they do.
Tensor with_dense_rows(const opk_tensor* tensor) {
    if (tensor == nullptr || tensor->rank != 4 || type_of(*tensor) == Type::Double)
        throw std::runtime_error("attention is of three tensors (batch, heads, sequence, channels) of at most 32 bits");
    if (tensor->sizes[3] <= 1 || tensor->strides[3] == 1) return Tensor::view(*tensor);
    int64_t strides[4] = {0, 0, tensor->sizes[3], 1};
    for (int d = 2; d-- > 0;) strides[d] = strides[d + 1] * tensor->sizes[d + 1];
    opk_tensor layout = *tensor;
    layout.strides = strides;
    Tensor made = Tensor::empty(layout);
    copy(*tensor, made.described());
    return made;
}

Operand operand(const Tensor& tensor) {
    return {tensor.data, {tensor.strides[0], tensor.strides[1], tensor.strides[2]}, type_of(tensor.described())};
}

// Sizes of 1 are repeated; of fewer dimensions than four, the first or the last are there. Tensors of more are functions'.
Strided strided(const opk_tensor& tensor, bool last) {
    if (last && tensor.rank > 4) throw std::runtime_error("a bias has more than four dimensions");
    Strided made;
    made.data = tensor.data;
    for (int64_t d = 0; d < std::min<int64_t>(tensor.rank, 4); ++d)
        made.stride[last ? 4 - tensor.rank + d : d] = tensor.sizes[d] == 1 ? 0 : tensor.strides[d];
    return made;
}

Typed typed(const opk_tensor& tensor, bool last) {
    Typed made;
    static_cast<Strided&>(made) = strided(tensor, last);
    made.type = type_of(tensor);
    return made;
}

struct Settings {
    std::vector<int64_t> mask, bias;  // programs
    std::vector<Strided> mask_tensors;
    std::vector<Typed> bias_tensors;
    Functions mask_functions, bias_functions;
    const float* sinks = nullptr;
    float scale = 1, softcap = 0;
};

void attend(const Arguments& arguments, const opk_result* results, const Settings& settings) {
    const Tensor q = with_dense_rows(arguments.tensor(0)), k = with_dense_rows(arguments.tensor(1)),
                 v = with_dense_rows(arguments.tensor(2));
    const int64_t batch = q.sizes[0], heads = q.sizes[1], queries = q.sizes[2], keys = k.sizes[2];
    const Mask mask(settings.mask, settings.mask_tensors, batch, keys, settings.mask_functions);
    const Biases biases(settings.bias, settings.bias_tensors, queries, keys, settings.bias_functions);
    std::vector<float> lse(static_cast<size_t>(batch * heads * queries));
    const opk_tensor& out = results[0].tensor;
    if (out.sizes[3] > 1 && out.strides[3] != 1) throw std::runtime_error("a result of attention has gaps in its rows");
    const Call call{batch,
                    heads,
                    k.sizes[1],
                    queries,
                    keys,
                    q.sizes[3],
                    v.sizes[3],
                    operand(q),
                    operand(k),
                    operand(v),
                    out.data,
                    {out.strides[0], out.strides[1], out.strides[2]},
                    lse.data(),
                    settings.sinks,
                    settings.scale,
                    settings.softcap,
                    mask,
                    biases,
                    &isa::choose("").kernels};
    if (keys == 0) {  // nothing to attend to; the kernel is for at least one key
        const Tensor nothing = Tensor::empty(out);
        std::memset(nothing.data, 0, static_cast<size_t>(span(out.sizes, out.strides, 4) * item_size(out.dtype)));
        copy(nothing.described(), out);
        for (int64_t i = 0; i < static_cast<int64_t>(lse.size()); ++i)
            lse[static_cast<size_t>(i)] = settings.sinks ? settings.sinks[i / queries % heads] : -INFINITY;
    }
    const Report report;
    if (keys > 0) forward(call);
    if (report.failed()) throw std::runtime_error(report.text());
    if (results[1].buffer < 0) return;
    const int64_t strides[3] = {heads * queries, queries, 1};
    copy({lse.data(), results[1].tensor.sizes, strides, 3, OPK_FLOAT32, -1}, results[1].tensor);
}

std::vector<const opk_tensor*> tensors(const opk_passed* list) {
    std::vector<const opk_tensor*> found;
    for (int32_t i = 0; list && i < list->count; ++i) found.push_back(list->as.items[i].as.tensor);
    return found;
}

// ---- functions -------------------------------------------------------------------------------------------------------

// The operands of a function in a program: three lists, each after its length, and the text of the expression.
struct Operands {
    std::vector<int64_t> tensors, numbers[2], text;  // numbers: integers, and the bits of floats
    explicit Operands(const std::vector<int64_t>& words) {
        size_t at = 0;
        for (auto* list : {&tensors, &numbers[0], &numbers[1]}) {
            const size_t count = static_cast<size_t>(words.at(at++));
            for (size_t i = 0; i < count; ++i) list->push_back(words.at(at++));
        }
        text.assign(words.begin() + static_cast<std::ptrdiff_t>(at), words.end());
    }
};

Function function_of(const Operands& operands, const std::vector<const opk_tensor*>& tensors, SavedFunctions saved) {
    for (int64_t i = 0; i < saved.count; ++i) {
        const SavedFunction& each = saved.functions[i];
        if (!std::equal(operands.text.begin(), operands.text.end(), each.text, each.text + each.text_count)) continue;
        Function made;
        made.code = {reinterpret_cast<uintptr_t>(each.entry), reinterpret_cast<uintptr_t>(each.tabulate), each.bytes};
        made.words.assign(static_cast<size_t>(each.words), 0);
        const int64_t *layout = each.layout + 2, numbers = each.layout[0], captured = each.layout[1];
        for (int64_t n = 0; n < numbers; ++n, layout += 2)
            made.words.at(static_cast<size_t>(n)) = operands.numbers[layout[0]].at(static_cast<size_t>(layout[1]));
        for (int64_t n = 0; n < captured; ++n, layout += 2) {
            const int64_t word = layout[0], rank = layout[1], number = operands.tensors.at(static_cast<size_t>(n));
            const opk_tensor& tensor = *tensors.at(static_cast<size_t>(number));
            if (tensor.rank != rank) throw std::runtime_error("a function of attention takes a tensor of another rank");
            std::copy_n(tensor.sizes, rank, made.words.begin() + word + 1);
            std::copy_n(tensor.strides, rank, made.words.begin() + word + 1 + rank);
            made.tensors.emplace_back(word, number);
        }
        return made;
    }
    throw std::runtime_error("the file lacks the code of a function of attention. Export the model again where there is a C compiler");
}

// The functions of a program, in which their numbers take their place.
Functions take_functions(std::vector<int64_t>& program, const int64_t* operands, int64_t function,
                         const std::vector<const opk_tensor*>& tensors, SavedFunctions saved) {
    Functions found;
    std::vector<int64_t> numbered;
    for (size_t at = 0; at < program.size();) {
        const int64_t opcode = program[at++];
        if (opcode < 0 || opcode > function) throw std::runtime_error("a program of attention has no opcode " + std::to_string(opcode));
        const bool is_function = opcode == function;
        const size_t count = static_cast<size_t>(is_function ? program.at(at++) : operands[opcode]);
        if (count > program.size() - at) throw std::runtime_error("a program of attention ends within a step");
        const std::vector<int64_t> own(program.begin() + static_cast<std::ptrdiff_t>(at),
                                       program.begin() + static_cast<std::ptrdiff_t>(at + count));
        numbered.push_back(opcode);
        if (is_function) {
            numbered.push_back(static_cast<int64_t>(found.size()));
            found.push_back(function_of(Operands(own), tensors, saved));
        } else {
            numbered.insert(numbered.end(), own.begin(), own.end());
        }
        at += count;
    }
    program = numbered;
    return found;
}

// Whether a tensor of a bias is added, by a program with the numbers of functions.
bool adds(const std::vector<int64_t>& program, int64_t tensor) {
    for (size_t at = 0; at < program.size(); at += 1 + static_cast<size_t>(kBiasOperands[program[at]])) {
        const size_t count = program[at] == kBiasFunction ? 0 : program[at] == 2 ? 2 : 1;
        for (size_t n = 1; n <= count; ++n)
            if (program[at + n] == tensor) return true;
    }
    return false;
}

}  // namespace

// q, k, v, mask_tensors, bias_tensors, sinks, seed, mask, bias, scale, softcap, dropout_p, out_is_bshd
void opkit_attention(const Arguments& arguments, const opk_result* results) {
    Settings settings;
    if (arguments.number(11, 0) != 0) throw std::runtime_error("there is no dropout without torch");
    const auto mask_tensors = tensors(arguments.find(3)), bias_tensors = tensors(arguments.find(4));
    settings.mask = arguments.integers(7);
    settings.bias = arguments.integers(8);
    settings.mask_functions = take_functions(settings.mask, kMaskOperands, static_cast<int64_t>(Opcode::Function), mask_tensors,
                                             arguments.functions);
    settings.bias_functions = take_functions(settings.bias, kBiasOperands, kBiasFunction, bias_tensors, arguments.functions);
    for (const opk_tensor* each : mask_tensors) settings.mask_tensors.push_back(strided(*each, false));
    for (size_t n = 0; n < bias_tensors.size(); ++n) {
        Typed made;
        static_cast<Strided&>(made) = strided(*bias_tensors[n], false);
        if (adds(settings.bias, static_cast<int64_t>(n))) made.type = type_of(*bias_tensors[n]);
        settings.bias_tensors.push_back(made);
    }
    std::vector<float> sinks;
    if (const opk_tensor* given = arguments.tensor(5)) {
        const Typed from = typed(*given, false);
        sinks.assign(static_cast<size_t>(given->sizes[0]), 0.0f);
        add_elements(from, 0, from.stride[0], given->sizes[0], sinks.data());
        settings.sinks = sinks.data();
    }
    settings.scale = static_cast<float>(arguments.number(9, 1));
    settings.softcap = static_cast<float>(arguments.number(10, 0));
    attend(arguments, results, settings);
}

// query, key, value, dropout_p, is_causal, attn_mask, scale
void torch_attention(const Arguments& arguments, const opk_result* results) {
    Settings settings;
    if (arguments.number(3, 0, "dropout_p") != 0) throw std::runtime_error("there is no dropout without torch");
    if (arguments.integer(4, 0, "is_causal")) settings.mask = {static_cast<int64_t>(Opcode::Band), -(int64_t{1} << 40), 0};
    if (const opk_tensor* bias = arguments.tensor(5, "attn_mask")) {
        settings.bias_tensors.push_back(typed(*bias, true));
        settings.bias = {0, 0};
    }
    const opk_tensor* q = arguments.tensor(0);
    settings.scale = static_cast<float>(
        arguments.number(6, q && q->rank == 4 ? 1 / std::sqrt(static_cast<double>(q->sizes[3])) : 1, "scale"));
    attend(arguments, results, settings);
}

}  // namespace opkit::model
