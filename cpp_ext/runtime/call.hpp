// The state of one call of a kernel while it is prepared, run and finished; see execute.cpp for the order of steps.
// call.cpp: what the arguments are, and memory; values.cpp: what the C function receives.
#pragma once

#include "program.hpp"
#include "small.hpp"

namespace opkit {

// Memory that lives as long as a call.
class Arena {
public:
    template <class T>
    T* take(int64_t count) {
        blocks_.push_back(std::make_unique<char[]>(static_cast<size_t>(count > 0 ? count : 1) * sizeof(T)));
        return reinterpret_cast<T*>(blocks_.back().get());
    }

private:
    std::vector<std::unique_ptr<char[]>> blocks_;
};

// Torch refused something that it should not have: the call fails.
struct TorchError {
    const char* doing;
};

inline void check(int32_t error, const char* doing) {
    if (error != 0) throw TorchError{doing};
}

// What is made of a tensor for the C function; its View lies next to it.
struct Operand {
    Handle owned = nullptr;   // a new output, until it is returned to the caller
    Handle copied = nullptr;  // a contiguous copy, which the kernel receives instead
    const int64_t* copied_strides = nullptr;
    bool shared = false;  // the copy is that of an operand before it
    opk_tensor described;
    bool written = false;
    bool pointed = false;  // a parameter takes its elements one after another, so it must be contiguous
    uint32_t passed_strides = 0;  // ... except for the strides of these dimensions, which it receives; see OPK_FROM_PACKED_TENSOR
};

class Call {
public:
    Call(const opk_kernel& kernel, const opk_input* inputs, opk_message& message);
    ~Call();
    Call(const Call&) = delete;
    Call& operator=(const Call&) = delete;

    // Each says whether the kernel takes the call; if not, `message` has the reason.
    bool read_tensors();
    bool bind_sizes();
    bool find_layout(const int64_t* layout);
    bool choose_instance();

    void allocate_outputs();   // throws TorchError
    void make_contiguous();    // throws TorchError
    bool nothing_to_write();   // every tensor that the kernel may write to is empty
    int32_t run(const char** text);
    void copy_back();          // throws TorchError
    void give_outputs(void** outputs);

private:
    static constexpr size_t kMostTensors = 16;
    static constexpr size_t kMostParameters = 32;

    bool refuse(const char* format, ...) __attribute__((format(printf, 2, 3)));
    bool read_tensor(int32_t argument, Handle handle, View& view);
    bool same_device(int32_t index);
    bool bind_shape(const opk_argument& argument, const View& view);
    bool bind_dim(const opk_argument& argument, int32_t dim, int64_t size);
    bool bind_variadic(const opk_argument& argument, const View& view);
    bool fits_dtype(const opk_parameter& parameter);
    int32_t tensor_of(const opk_parameter& parameter, int64_t* count) const;
    void mark_operands();
    bool shares_copy(size_t tensor);
    const opk_tensor* describe(int32_t tensor);
    void* pointer(int32_t tensor);
    static void* memory(Handle handle, bool written);
    opk_value value(const opk_parameter& parameter);
    opk_value tensor_value(const opk_parameter& parameter);
    opk_value list_value(const opk_parameter& parameter);
    opk_value scalar_pointer(int32_t argument);
    int64_t dimension(const opk_parameter& parameter, int32_t tensor) const;

    const opk_kernel& kernel_;
    const opk_input* inputs_;
    opk_message& message_;
    int64_t argument_tensors_;
    Small<int32_t, kMostTensors> first_;     // of each schema argument, among the views
    Small<View, kMostTensors> views_;        // the tensors of the arguments, then those of the outputs
    Small<Operand, kMostTensors> operands_;
    Small<int64_t, kMostTensors> sizes_;     // by name
    Small<const int64_t*, kMostTensors> shown_; // by name: how many sizes it stands for, and those
    Small<int32_t, 8> dtypes_;               // of the type variables
    const int64_t* layout_ = nullptr;
    Layout made_layout_;
    const opk_instance* instance_ = nullptr;
    int32_t device_index_ = -1;
    Handle guard_ = nullptr;
    Arena arena_; // what pointers in the values point to: lists, and scalars passed by address
};

}  // namespace opkit
