/* Kernels and a runtime to test the bridge with. What to compute hangs on opk_state; the number of calls is counted. */
#include "opkit.h"

#include <stdio.h>
#include <string.h>

/* torch's C shim */
int32_t aoti_torch_get_data_ptr(void*, void**);
int32_t aoti_torch_get_numel(void*, int64_t*);
int32_t aoti_torch_get_dim(void*, int64_t*);
int32_t aoti_torch_get_sizes(void*, int64_t**);
int32_t aoti_torch_get_strides(void*, int64_t**);
int32_t aoti_torch_get_dtype(void*, int32_t*);
int32_t aoti_torch_get_device_type(void*, int32_t*);
int32_t aoti_torch_get_device_index(void*, int32_t*);
int32_t aoti_torch_empty_strided(int64_t, const int64_t*, const int64_t*, int32_t, int32_t, int32_t, void**);

typedef int32_t (*body)(const opk_input* inputs, void** outputs, opk_message* message);

static _Atomic int64_t done;
int64_t calls(void) { return done; }

static float* elements(void* tensor, int64_t* count) {
    void* data = 0;
    aoti_torch_get_data_ptr(tensor, &data);
    aoti_torch_get_numel(tensor, count);
    return (float*)data;
}

static void* like(void* tensor) {
    int64_t rank, *sizes, *strides;
    int32_t dtype, type, index;
    void* result = 0;
    aoti_torch_get_dim(tensor, &rank);
    aoti_torch_get_sizes(tensor, &sizes);
    aoti_torch_get_strides(tensor, &strides);
    aoti_torch_get_dtype(tensor, &dtype);
    aoti_torch_get_device_type(tensor, &type);
    aoti_torch_get_device_index(tensor, &index);
    aoti_torch_empty_strided(rank, sizes, strides, dtype, type, index, &result);
    return result;
}

/* Refuses rank 3, fails for rank 4, and takes float32 alone. */
static int32_t verdict(void* tensor, opk_message* message) {
    int64_t rank;
    int32_t dtype;
    if (tensor == 0) return OPK_FAILED; /* the bridge must not have let it through */
    aoti_torch_get_dim(tensor, &rank);
    aoti_torch_get_dtype(tensor, &dtype);
    if (rank == 4) snprintf(message->text, sizeof(message->text), "bridge_test::plus_one: 100%% too many dimensions");
    return rank == 4 ? OPK_FAILED : rank == 3 || dtype != OPK_FLOAT32 ? OPK_REFUSED : OPK_DONE;
}

static void add_one(void* from, void* to) {
    int64_t count;
    float *x = elements(from, &count), *y = elements(to, &count);
    for (int64_t i = 0; i < count; ++i) y[i] = x[i] + 1;
}

static int32_t plus_one(const opk_input* inputs, void** outputs, opk_message* message) {
    const int32_t status = verdict(inputs[0].as.tensor, message);
    if (status == OPK_DONE) add_one(inputs[0].as.tensor, outputs[0] = like(inputs[0].as.tensor));
    return status;
}

static int32_t plus_one_in_place(const opk_input* inputs, void** outputs, opk_message* message) {
    const int32_t status = verdict(inputs[0].as.tensor, message);
    (void)outputs;
    if (status == OPK_DONE) add_one(inputs[0].as.tensor, inputs[0].as.tensor);
    return status;
}

static int32_t two(const opk_input* inputs, void** outputs, opk_message* message) {
    const int32_t status = plus_one(inputs, outputs, message);
    if (status == OPK_DONE) add_one(outputs[0], outputs[1] = like(outputs[0]));
    return status;
}

static int32_t plus_all(const opk_input* inputs, void** outputs, opk_message* message) { /* x, others: Tensor[] */
    const int32_t status = plus_one(inputs, outputs, message);
    for (int64_t n = 0; status == OPK_DONE && n < inputs[1].count; ++n) {
        int64_t count;
        float *x = elements(inputs[1].as.tensors[n], &count), *y = elements(outputs[0], &count);
        for (int64_t i = 0; i < count; ++i) y[i] += x[i];
    }
    return status;
}

static int32_t plus_one_in_all(const opk_input* inputs, void** outputs, opk_message* message) { /* xs: Tensor[] */
    (void)outputs, (void)message;
    for (int64_t n = 0; n < inputs[0].count; ++n) add_one(inputs[0].as.tensors[n], inputs[0].as.tensors[n]);
    return OPK_DONE;
}

static int32_t copy_shape(const opk_input* inputs, void** outputs, opk_message* message) { /* on any device */
    (void)message;
    outputs[0] = like(inputs[0].as.tensor);
    return OPK_DONE;
}

static double sum_of(const opk_input* input, int32_t kind) { /* of a list; -1: None */
    double sum = input->present ? 0 : -1;
    for (int64_t i = 0; input->present && i < input->count; ++i)
        sum += kind == OPK_KIND_INTS ? (double)input->as.ints[i] : kind == OPK_KIND_FLOATS ? input->as.floats[i]
             : kind == OPK_KIND_BOOLS ? (double)input->as.bools[i] : (double)(input->as.text[i] * (i + 1));
    return sum;
}

/* Every kind of argument but tensors, as numbers: out[i] is what came as argument i + 1, -1 for None. */
static int32_t every(const opk_input* inputs, void** outputs, opk_message* message) {
    static const int32_t kinds[] = {OPK_KIND_INT, OPK_KIND_FLOAT, OPK_KIND_BOOL, OPK_KIND_STRING, OPK_KIND_DTYPE,
                                    OPK_KIND_INTS, OPK_KIND_FLOATS, OPK_KIND_BOOLS, OPK_KIND_INT, OPK_KIND_FLOAT,
                                    OPK_KIND_STRING, OPK_KIND_IGNORED};
    int64_t count;
    float* out = elements(outputs[0] = like(inputs[0].as.tensor), &count);
    (void)message;
    for (int i = 0; i < 12; ++i) {
        const opk_input* input = &inputs[i + 1];
        const int32_t kind = kinds[i];
        if (kind == OPK_KIND_INT || kind == OPK_KIND_BOOL || kind == OPK_KIND_DTYPE)
            out[i] = input->present ? (float)input->as.i : -1;
        else if (kind == OPK_KIND_FLOAT)
            out[i] = input->present ? (float)input->as.f : -1;
        else
            out[i] = kind == OPK_KIND_IGNORED ? (float)input->present : (float)sum_of(input, kind);
    }
    return OPK_DONE;
}

static int32_t execute(const opk_kernel* kernel, const opk_input* inputs, const int64_t* layout, void** outputs,
                       opk_message* message) {
    const int32_t status = ((body)kernel->state->programs)(inputs, outputs, message);
    (void)layout;
    if (status == OPK_DONE) ++done;
    return status;
}

const opk_runtime runtime = {.version = OPK_ABI_VERSION, .execute = execute};

static const opk_argument one_tensor[] = {{"x", OPK_KIND_TENSOR}};
static const opk_argument written_tensor[] = {{"x", OPK_KIND_TENSOR, 0, 1}};
static const opk_argument optional_tensor[] = {{"x", OPK_KIND_TENSOR}, {"y", OPK_KIND_TENSOR, 1}};
static const opk_argument tensors[] = {{"x", OPK_KIND_TENSOR}, {"others", OPK_KIND_TENSORS}};
static const opk_argument written_tensors[] = {{"xs", OPK_KIND_TENSORS, 0, 1}};
#define THREE {"y", OPK_KIND_TENSOR, 1}, {"y", OPK_KIND_TENSOR, 1}, {"y", OPK_KIND_TENSOR, 1}
static const opk_argument nineteen[] = {{"x", OPK_KIND_TENSOR}, THREE, THREE, THREE, THREE, THREE, THREE};
static const opk_argument all_kinds[] = {
    {"x", OPK_KIND_TENSOR}, {"i", OPK_KIND_INT}, {"f", OPK_KIND_FLOAT}, {"b", OPK_KIND_BOOL}, {"s", OPK_KIND_STRING},
    {"dtype", OPK_KIND_DTYPE}, {"ints", OPK_KIND_INTS}, {"floats", OPK_KIND_FLOATS}, {"bools", OPK_KIND_BOOLS},
    {"oi", OPK_KIND_INT, 1}, {"of", OPK_KIND_FLOAT, 1}, {"os", OPK_KIND_STRING, 1}, {"device", OPK_KIND_IGNORED, 1}};
static const opk_output fresh[] = {{"y", -1}, {"z", -1}};
static const opk_output aliased[] = {{"x", 0}};

#define KERNEL(name, function, args, outs, outputs_)                                                                      \
    static opk_state name##_state = {(void*)function, 0};                                                                 \
    const opk_kernel name = {.version = OPK_ABI_VERSION, .operator_name = #name, .kernel_name = #name, .schema = #name,   \
                             .argument_count = sizeof(args) / sizeof(args[0]), .output_count = outs, .arguments = args,   \
                             .outputs = outputs_, .state = &name##_state};

KERNEL(plus_one_kernel, plus_one, one_tensor, 1, fresh)
KERNEL(plus_one_optional_kernel, plus_one, optional_tensor, 1, fresh)
KERNEL(plus_all_kernel, plus_all, tensors, 1, fresh)
KERNEL(two_kernel, two, one_tensor, 2, fresh)
KERNEL(void_kernel, plus_one_in_place, written_tensor, 0, fresh)
KERNEL(in_place_kernel, plus_one_in_place, written_tensor, 1, aliased)
KERNEL(void_all_kernel, plus_one_in_all, written_tensors, 0, fresh)
KERNEL(nineteen_kernel, plus_one, nineteen, 1, fresh)
KERNEL(like_kernel, copy_shape, tensors, 1, fresh)
KERNEL(every_kernel, every, all_kinds, 1, fresh)
