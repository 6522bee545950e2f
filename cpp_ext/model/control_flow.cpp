// Control flow operators: they call graphs of the file, which are entries of their own, as Python's do (torch_operators.py).
#include <algorithm>
#include <stdexcept>

#include "host.hpp"

namespace opkit::model {
namespace {

using Text = std::string;
using Described = std::vector<opk_tensor>;

const Entry& graph(const Graphs& graphs, const opk_passed* name) {
    const auto found = name && name->kind == OPK_PASSED_TEXT ? graphs.find(name->as.text) : graphs.end();
    if (found == graphs.end()) throw std::runtime_error("a control flow operator calls a graph that the file lacks");
    return *found->second;
}

// Adds a tensor or a size to the inputs of a call.
void add(Described& inputs, const opk_passed& value) {
    if (value.kind == OPK_PASSED_TENSOR)
        inputs.push_back(*value.as.tensor);
    else if (value.kind == OPK_PASSED_INT)
        inputs.push_back({const_cast<int64_t*>(&value.as.i), nullptr, nullptr, 0, OPK_INT64, -1});
    else
        throw std::runtime_error("a control flow operator takes what is neither a tensor nor a size");
}

void add(Described& inputs, const std::vector<Tensor>& tensors) {
    for (const Tensor& each : tensors) inputs.push_back(each.described());
}

Described list(const Arguments& arguments, int64_t position) {
    const opk_passed* found = arguments.find(position);
    Described tensors;
    for (int32_t i = 0; found && found->kind == OPK_PASSED_LIST && i < found->count; ++i) add(tensors, found->as.items[i]);
    return tensors;
}

std::vector<Tensor> copies(const Described& of, const Device& device) {
    std::vector<Tensor> made;
    for (const opk_tensor& each : of) {
        made.push_back(device.empty(each));
        device.copy(each, made.back().described());
    }
    return made;
}

// The number in a tensor of one element, or passed as one; a GPU's memory is waited for.
int64_t number(const opk_passed* value, const Device& device) {
    if (value && (value->kind == OPK_PASSED_BOOL || value->kind == OPK_PASSED_INT)) return value->as.i;
    if (!value || value->kind != OPK_PASSED_TENSOR) throw std::runtime_error("a control flow operator takes no number");
    opk_tensor tensor = *value->as.tensor;
    for (int64_t d = 0; d < tensor.rank; ++d)
        if (tensor.sizes[d] != 1) throw std::runtime_error("a condition has more than one element");
    Tensor held;
    if (tensor.device_index >= 0) {
        held = Tensor::empty({nullptr, tensor.sizes, tensor.strides, tensor.rank, tensor.dtype, -1});
        device.copy(tensor, held.described());
        tensor.data = held.data;
    }
    switch (tensor.dtype) {
        case OPK_BOOL: return *static_cast<const uint8_t*>(tensor.data) != 0;
        case OPK_INT32: return *static_cast<const int32_t*>(tensor.data);
        case OPK_INT64: return *static_cast<const int64_t*>(tensor.data);
        default: throw std::runtime_error("a condition is neither a bool nor an integer");
    }
}

// A row of a tensor.
opk_tensor row(const opk_tensor& of, int64_t at) {
    char* data = static_cast<char*>(of.data) + at * of.strides[0] * item_size(of.dtype);
    return {data, of.sizes + 1, of.strides + 1, of.rank - 1, of.dtype, of.device_index};
}

void check(size_t found, size_t least) {
    if (found < least) throw std::runtime_error("a graph of a control flow operator returns too few results");
}

}  // namespace

Entry::Flow Entry::find_flow(const Text& name) {
    if (name == "control_flow::cond") return &Host::cond;
    if (name == "control_flow::switch") return &Host::switch_;
    if (name == "control_flow::invoke_subgraph") return &Host::invoke;
    if (name == "control_flow::while_loop") return &Host::while_loop;
    if (name == "control_flow::map_impl") return &Host::map;
    if (name == "control_flow::scan") return &Host::scan;
    return nullptr;
}

void Host::set_all(const std::vector<Tensor>& tensors, opk_result* results, int64_t result_count) {
    check(tensors.size(), static_cast<size_t>(result_count));
    for (int64_t i = 0; i < result_count; ++i) set("a graph", tensors[static_cast<size_t>(i)], results[i]);
}

// predicate, graph if it holds, graph if not, operands
void Host::cond(const Arguments& arguments, opk_result* results, int64_t result_count) {
    const int64_t position = number(arguments.find(0), entry.device_) ? 1 : 2;
    const Entry& branch = graph(entry.graphs_, arguments.find(position));
    set_all(branch.run(list(arguments, 3)), results, result_count);
}

// index, graphs, operands
void Host::switch_(const Arguments& arguments, opk_result* results, int64_t result_count) {
    const opk_passed* branches = arguments.find(1);
    if (!branches || branches->kind != OPK_PASSED_LIST || branches->count < 1)
        throw std::runtime_error("a switch has no graphs");
    const int64_t at = number(arguments.find(0), entry.device_);
    const opk_passed* name = branches->as.items + std::clamp<int64_t>(at, 0, branches->count - 1);
    set_all(graph(entry.graphs_, name).run(list(arguments, 2)), results, result_count);
}

// graph, its name, operands
void Host::invoke(const Arguments& arguments, opk_result* results, int64_t result_count) {
    Described inputs;
    for (int64_t i = 2; arguments.find(i); ++i) add(inputs, *arguments.find(i));
    set_all(graph(entry.graphs_, arguments.find(0)).run(inputs), results, result_count);
}

// condition, graph, carried, additional
void Host::while_loop(const Arguments& arguments, opk_result* results, int64_t result_count) {
    const Entry &condition = graph(entry.graphs_, arguments.find(0)), &body = graph(entry.graphs_, arguments.find(1));
    const Described additional = list(arguments, 3);
    std::vector<Tensor> values = copies(list(arguments, 2), entry.device_);
    for (;;) {
        Described inputs;
        add(inputs, values);
        inputs.insert(inputs.end(), additional.begin(), additional.end());
        const std::vector<Tensor> found = condition.run(inputs);
        check(found.size(), 1);
        const opk_tensor holds = found[0].described();
        opk_passed passed{OPK_PASSED_TENSOR, 0, nullptr, {&holds}};
        if (!number(&passed, entry.device_)) break;
        values = body.run(inputs);
    }
    set_all(values, results, result_count);
}

// graph, tensors of rows, additional
void Host::map(const Arguments& arguments, opk_result* results, int64_t result_count) {
    rows(graph(entry.graphs_, arguments.find(0)), {}, list(arguments, 1), list(arguments, 2), results, result_count);
}

// graph, carried, tensors of rows, additional
void Host::scan(const Arguments& arguments, opk_result* results, int64_t result_count) {
    rows(graph(entry.graphs_, arguments.find(0)), list(arguments, 1), list(arguments, 2), list(arguments, 3), results,
         result_count);
}

void Host::rows(const Entry& body, const Described& init, const Described& over, const Described& additional,
                opk_result* results, int64_t result_count) {
    check(static_cast<size_t>(result_count), init.size());
    const auto stacked = static_cast<int64_t>(init.size());
    const int64_t count = over.empty() || over[0].rank == 0 ? 0 : over[0].sizes[0];
    Described all = over;
    for (int64_t i = stacked; i < result_count; ++i) {
        make(results[i]);
        if (results[i].buffer >= 0) all.push_back(results[i].tensor);
    }
    for (const opk_tensor& each : all)
        if (each.rank == 0 || each.sizes[0] != count) throw std::runtime_error("tensors have different numbers of rows");
    std::vector<Tensor> carried = copies(init, entry.device_);
    for (int64_t n = 0; n < count; ++n) {
        Described inputs;
        add(inputs, carried);
        for (const opk_tensor& each : over) inputs.push_back(row(each, n));
        inputs.insert(inputs.end(), additional.begin(), additional.end());
        std::vector<Tensor> found = body.run(inputs);
        check(found.size(), static_cast<size_t>(result_count));
        for (int64_t i = stacked; i < result_count; ++i)
            if (results[i].buffer >= 0) {
                opk_result into{results[i].buffer, row(results[i].tensor, n), nullptr};
                set("a graph", found[static_cast<size_t>(i)], into);
            }
        found.resize(init.size());
        carried = std::move(found);
    }
    carried.resize(static_cast<size_t>(result_count));
    for (int64_t i = 0; i < stacked; ++i) set("a graph", carried[static_cast<size_t>(i)], results[i]);
}

}  // namespace opkit::model
