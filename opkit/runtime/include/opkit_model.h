/* Run models that opkit.export wrote, from C and C++, without Python and without torch.
 *
 * Link libopkit_model, which is next to this header's folder (`python -m opkit.runtime` prints both). Tensors are DLPack's, on the
 * CPU, or on a GPU where the caller provides its memory (opkit_operators). Functions that can fail return NULL or other than 0, and write why to `error`, of `size` bytes, ending in a NUL.
 *
 *   char why[512];
 *   opkit_model* model = opkit_model_load("model.opk", 1, NULL, why, sizeof why);
 *   DLManagedTensor* results[1];
 *   const DLTensor* arguments[] = {&x};
 *   if (!model || opkit_model_run(model, "", arguments, 1, results, 1, why, sizeof why)) { puts(why); exit(1); }
 *   ... results[0]->dl_tensor ...
 *   results[0]->deleter(results[0]);
 *   opkit_model_free(model);
 *
 * A model is used by any number of threads at a time, unless it writes to its own state. opkit_torch.hpp has the same for libtorch,
 * where models may call any operator of torch's. */
#ifndef OPKIT_MODEL_H
#define OPKIT_MODEL_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* DLPack's structures (https://dmlc.github.io/dlpack), as of its version 0.8; include its header first to use that one's. */
#ifndef DLPACK_VERSION
#ifndef DLPACK_MAJOR_VERSION
typedef struct {
    int32_t device_type; /* 1: the CPU, 2: a CUDA device */
    int32_t device_id;
} DLDevice;

typedef struct {
    uint8_t code; /* 0 int, 1 unsigned int, 2 float, 4 bfloat16, 5 complex, 6 bool */
    uint8_t bits;
    uint16_t lanes;
} DLDataType;

typedef struct {
    void* data;
    DLDevice device;
    int32_t ndim;
    DLDataType dtype;
    int64_t* shape;
    int64_t* strides; /* in elements; NULL: row-major */
    uint64_t byte_offset;
} DLTensor;

typedef struct DLManagedTensor {
    DLTensor dl_tensor;
    void* manager_ctx;
    void (*deleter)(struct DLManagedTensor* self);
} DLManagedTensor;
#endif
#endif

typedef struct opkit_model opkit_model;

/* Operators that the caller computes: those of another library, such as torch's. See opkit_program.h for the structures. */
struct opk_passed;
struct opk_result;
struct opk_tensor;
typedef struct opkit_operators {
    /* Whether there is an operator of this name ("aten::mm") and overload ("default"). */
    int32_t (*has)(void* context, const char* name, const char* overload);
    /* Computes it: 0, or else it failed. A result has memory to be written to, or gets memory of this layout and an
     * owner. */
    int32_t (*call)(void* context, const char* name, const char* overload, const struct opk_passed* arguments, int64_t count,
                    struct opk_result* results, int64_t result_count, char* error, size_t size);
    void (*release)(void* context, void* owner);
    void* context;
    /* For models that were made for GPUs: the number of the GPU; memory there, NULL if there is none; copies between memory of any
     * kind, where a tensor's device_index is -1 on the CPU, and which return other than 0 if they fail; the current stream. */
    int32_t device;
    void* (*allocate)(void* context, int64_t bytes, void** owner);
    int32_t (*copy)(void* context, const struct opk_tensor* from, const struct opk_tensor* to);
    void* (*stream)(void* context);
} opkit_operators;

/* Loads a model. `operators` may be NULL: then a model that calls others than opkit's own and products is refused.
 * `verify` as in opkit.load: other than 0 to check the sums of the weights, which reads them. */
opkit_model* opkit_model_load(const char* path, int32_t verify, const opkit_operators* operators, char* error, size_t size);
void opkit_model_free(opkit_model* model);

/* What the model says of itself: the file's manifest, as JSON, which lives as long as the model. */
const char* opkit_model_manifest(const opkit_model* model);

/* The tensors that an entry takes and returns ("" is the only one of a model that was exported alone); -1: there is no
 * such entry. */
int64_t opkit_model_input_count(const opkit_model* model, const char* entry);
int64_t opkit_model_output_count(const opkit_model* model, const char* entry);

/* Runs an entry. Arguments are those that are no constants, in order; a size is an int64 of no dimensions. The caller owns the results
 * and deletes them by their `deleter`; a result that is None is NULL. Returns 0; 2 where an argument is not as the model was exported; else 1. */
int32_t opkit_model_run(const opkit_model* model, const char* entry, const DLTensor* const* arguments, int64_t count,
                        DLManagedTensor** results, int64_t result_count, char* error, size_t size);

/* How many threads models and kernels use; 0: as many as OpenMP says. */
void opkit_set_threads(int64_t count);

/* Lets them use the caller's threads: `parallel` runs body(data) in so many (the last argument is 0), and `number` is that of the
 * calling one among these. */
void opkit_use_threads(void (*parallel)(void (*body)(void*), void* data, unsigned threads, unsigned flags),
                       int (*number)(void), int64_t count);

/* A compiled kernel of an operator (a library that `opkit build` wrote), by its path; NULL if it cannot be loaded. It is
 * never freed. */
typedef struct opk_kernel opkit_kernel;
const opkit_kernel* opkit_kernel_load(const char* path, char* error, size_t size);

/* Its operator's schema, as torch writes them. */
const char* opkit_kernel_schema(const opkit_kernel* kernel);

/* An argument of an operator. */
enum opkit_kind { OPKIT_NONE = 0, OPKIT_TENSOR = 1, OPKIT_INT = 2, OPKIT_FLOAT = 3, OPKIT_BOOL = 4, OPKIT_TEXT = 5, OPKIT_INTS = 6,
                  OPKIT_FLOATS = 7, OPKIT_TENSORS = 8 };
typedef struct opkit_argument {
    int32_t kind;
    int64_t count; /* of INTS, FLOATS and TENSORS */
    union {
        const DLTensor* tensor;
        int64_t i; /* INT, BOOL */
        double f;
        const char* text;
        const int64_t* ints;
        const double* floats;
        const DLTensor* const* tensors;
    } as;
} opkit_argument;

/* Calls the kernel with all arguments of the schema, in order. The caller owns the results; one that the kernel wrote to
 * in place is NULL. */
int32_t opkit_kernel_call(const opkit_kernel* kernel, const opkit_argument* arguments, int64_t count, DLManagedTensor** results,
                          int64_t result_count, char* error, size_t size);
int64_t opkit_kernel_output_count(const opkit_kernel* kernel);

/* The number of the argument that an output is, which the kernel writes to in place; -1: a new tensor. */
int64_t opkit_kernel_output_alias(const opkit_kernel* kernel, int64_t output);

/* Another tensor over the same memory, which lives until both are deleted; only for results of this library. */
DLManagedTensor* opkit_tensor_share(const DLManagedTensor* tensor);

#ifdef __cplusplus
}
#endif
#endif
