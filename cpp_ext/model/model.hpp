// A saved model: its entries, and calls of them.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>

#include "../launch/binary.hpp"
#include "../runtime/library.hpp"
#include "operators.hpp"
#include "opkit_model.h"
#include "weights.hpp"

namespace opkit::model {

struct Host;
class Entry;

// The graphs that control flow operators of an entry call, by the names that its program has for them.
using Graphs = std::map<std::string, std::unique_ptr<Entry>>;

// One function of a model, for this processor.
class Entry {
public:
    // Throws std::runtime_error where the file does not fit this processor, or needs Python or operators that nobody has.
    Entry(const std::string& name, const Json& convention, const Archive& archive, Weights& weights, const Device& device,
          const opkit_operators* host);
    ~Entry();
    Entry(const Entry&) = delete;
    Entry& operator=(const Entry&) = delete;

    const std::string& name() const { return name_; }
    size_t inputs() const { return inputs_.size() - states_.size(); }
    size_t outputs() const { return static_cast<size_t>(outputs_); }

    // Runs it on the caller's tensors: the results, in order. Throws std::runtime_error, or std::invalid_argument where a tensor
    // is not what the model takes.
    std::vector<Tensor> run(const std::vector<opk_tensor>& inputs) const;

private:
    friend struct Host;
    using Flow = void (Host::*)(const Arguments& arguments, opk_result* results, int64_t result_count);
    static Flow find_flow(const std::string& name);  // null: no control flow operator has this name
    struct Input {
        std::string name, text;  // the text is of what it takes
        int32_t dtype = -1;      // -1: a size
        int64_t rank = 0;
        bool is_written = false, is_on_gpu = false, is_aligned = false;
    };
    struct Size {
        int64_t number, input, dimension;
        std::string name;
        enum class From { Size, Stride, Value } from;
        int64_t least, most;
    };
    struct Call {
        std::string name, overload;
        Operator own = nullptr;
        const opk_kernel* kernel = nullptr;
        Flow flow = nullptr;
    };

    void read_inputs(const Json& convention, const Json& program);
    void read_operators(const Json& program, const Json& variant, const Archive& archive);
    void read_functions(const Json& program, const Archive& archive);
    void load_program(const Archive& archive, const std::string& folder);
    void load_binaries(const Json& program, const Archive& archive, const std::string& folder);
    std::vector<int64_t> bind(const std::vector<opk_tensor>& inputs) const;
    std::vector<Tensor> laid_out(std::vector<opk_tensor>& inputs, const std::vector<int64_t>& layouts) const;

    std::string name_;
    Device device_;
    const opkit_operators* host_;
    std::vector<std::unique_ptr<launch::Binary>> binaries_;  // kernels for GPUs
    std::vector<Input> inputs_;                              // the states, then the arguments
    std::vector<Tensor> states_;
    std::vector<Size> sizes_;
    int64_t size_count_ = 0, layout_count_ = 1, buffers_ = 0, outputs_ = 0;
    std::vector<Call> calls_;
    Graphs graphs_;
    std::vector<std::string> steps_, function_names_;
    std::vector<void*> constants_, functions_;
    void* library_ = nullptr;
    SavedFunctions attention_functions_;
    void (*compute_sizes_)(int64_t*) = nullptr;
    void (*compute_layouts_)(const int64_t*, int64_t*) = nullptr;
    int64_t (*run_)(opk_host*, const int64_t*, char*, void* const*, void* const*) = nullptr;
    mutable std::mutex mutex_;
    struct Arena {
        int64_t bytes = 0;
        void* stream = nullptr;  // that used it
        Memory memory;
    };
    Arena take_arena(int64_t bytes, void* stream) const;
    mutable std::vector<Arena> arenas_;  // that no call uses
};

class Model {
public:
    Model(const std::string& path, bool verify, const opkit_operators* host);
    const std::vector<std::unique_ptr<Entry>>& entries() const { return entries_; }
    const Entry& entry(const char* name) const;  // throws std::invalid_argument
    std::string description() const;             // the manifest

private:
    Device device() const;  // throws std::runtime_error where the file is for none that there is
    Archive archive_;
    opkit_operators host_{};
    bool has_host_;
    Device device_;
    Weights weights_;
    std::vector<std::unique_ptr<Entry>> entries_;
};

}  // namespace opkit::model
