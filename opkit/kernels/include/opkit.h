/* What a compiled kernel and opkit's runtime know of each other. C11 and C++17; it includes nothing.
 *
 * The first half is for authors: opk_tensor, opk_fail, opk_parallel_for. The second half is for generated code, for the
 * runtime (cpp_ext/runtime) and for the bridge: how one operator call is described without a word of torch.
 * A change to anything below changes OPK_ABI_VERSION. */
#ifndef OPKIT_H
#define OPKIT_H

#define OPK_ABI_VERSION 1

typedef __INT8_TYPE__ int8_t;
typedef __INT16_TYPE__ int16_t;
typedef __INT32_TYPE__ int32_t;
typedef __INT64_TYPE__ int64_t;
typedef __UINT8_TYPE__ uint8_t;
typedef __UINT16_TYPE__ uint16_t;
typedef __UINT32_TYPE__ uint32_t;
typedef __UINT64_TYPE__ uint64_t;

#ifdef __cplusplus
extern "C" {
#endif

/* ---- for authors -------------------------------------------------------------------------------------------------- */

/* Element types, numbered as torch numbers its ScalarType. */
enum opk_dtype {
    OPK_UINT8 = 0, OPK_INT8 = 1, OPK_INT16 = 2, OPK_INT32 = 3, OPK_INT64 = 4, OPK_FLOAT16 = 5, OPK_FLOAT32 = 6,
    OPK_FLOAT64 = 7, OPK_COMPLEX64 = 9, OPK_COMPLEX128 = 10, OPK_BOOL = 11, OPK_BFLOAT16 = 15, OPK_FLOAT8_E5M2 = 23,
    OPK_FLOAT8_E4M3FN = 24, OPK_FLOAT8_E5M2FNUZ = 25, OPK_FLOAT8_E4M3FNUZ = 26, OPK_UINT16 = 27,
    OPK_UINT32 = 28, OPK_UINT64 = 29
};

/* A tensor as it lies in memory; a parameter "const opk_tensor* x" takes any strides. An absent tensor is NULL. */
typedef struct opk_tensor {
    void* data;
    const int64_t* sizes;
    const int64_t* strides; /* in elements */
    int64_t rank;
    int32_t dtype;        /* an opk_dtype */
    int32_t device_index; /* -1 on the CPU */
} opk_tensor;

typedef void (*opk_range_body)(int64_t begin, int64_t end, void* context);

typedef struct opk_kernel opk_kernel;
typedef struct opk_input opk_input;
typedef struct opk_message opk_message;

/* The functions that the runtime offers a kernel; opk_init() in each kernel's library receives them. */
typedef struct opk_runtime {
    int32_t version;
    void (*fail)(const char* file, int32_t line, const char* format, ...);
    void (*parallel_for)(int64_t begin, int64_t end, int64_t grain, opk_range_body body, void* context);
    int32_t (*thread_count)(void);
    int32_t (*thread_index)(void);
    void (*boxed)(const opk_kernel* kernel, uint64_t* stack, uint64_t inputs, uint64_t outputs, int32_t has_layout);
    int32_t (*execute)(const opk_kernel* kernel, const opk_input* inputs, const int64_t* layout, void** outputs,
                       opk_message* message);
} opk_runtime;

/* Of each kernel's library: what opk_init() received. */
extern const opk_runtime* opk_rt __attribute__((visibility("hidden")));

/* A parameter "const opk_tensor_of(T)* x": an opk_tensor whose elements are of that type. */
#define opk_tensor_of(type) opk_tensor

/* The call fails with this message, in printf's language; the kernel returns by itself afterwards. */
typedef void (*opk_fail_function)(const char* file, int32_t line, const char* format, ...)
    __attribute__((format(printf, 3, 4)));
#define opk_fail(...) (((opk_fail_function)opk_rt->fail)(__FILE__, __LINE__, __VA_ARGS__))

/* Runs body(first, last, context) on pieces of [begin, end), none but the last shorter than grain, on torch's threads. */
#define opk_parallel_for(begin, end, grain, body, context) (opk_rt->parallel_for((begin), (end), (grain), (body), (context)))
#define opk_num_threads() (opk_rt->thread_count())
#define opk_thread_index() (opk_rt->thread_index())

/* ---- how a call is described -------------------------------------------------------------------------------------- */

/* One argument of the C function, as its trampoline receives it. */
typedef union opk_value {
    void* p;
    int64_t i;
    double f;
} opk_value;

/* Runs the C function on values, one for each of its parameters. Zero, or the code that the kernel returned; a kernel
 * that returns a string (NULL: all is well) leaves it in *text. */
typedef int32_t (*opk_trampoline)(const opk_value* values, const char** text);

enum opk_kind { /* of a schema argument */
    OPK_KIND_TENSOR = 0, OPK_KIND_TENSORS = 1, OPK_KIND_INT = 2, OPK_KIND_FLOAT = 3, OPK_KIND_BOOL = 4,
    OPK_KIND_STRING = 5, OPK_KIND_DTYPE = 6, OPK_KIND_INTS = 7, OPK_KIND_FLOATS = 8, OPK_KIND_BOOLS = 9,
    OPK_KIND_IGNORED = 10 /* device, layout, memory format, generator: the kernel cannot ask for it */
};

/* The shape that an annotation gives a tensor: dims[0..before), then any number of sizes if variadic != OPK_NO_NAME,
 * then dims[before..before+after). A dim >= 0 is a named size, OPK_ANY any size, and <= OPK_LITERAL(0) a number. */
enum { OPK_ANY = -1, OPK_NO_NAME = -2, OPK_UNNAMED = -1 };
#define OPK_LITERAL(size) (-2 - (int32_t)(size))
typedef struct opk_shape {
    int32_t before;
    int32_t variadic; /* a named size (the product of several sizes), OPK_UNNAMED, or OPK_NO_NAME */
    int32_t after;
    const int32_t* dims;
} opk_shape;

typedef struct opk_argument {
    const char* name;
    int32_t kind; /* an opk_kind */
    int32_t optional;
    int32_t written;        /* the operator writes to this tensor (or to these) */
    const opk_shape* shape; /* NULL: any */
} opk_argument;

typedef struct opk_output {
    const char* name;
    int32_t alias; /* the argument that is returned as this output, or -1: a new tensor */
} opk_output;

enum opk_source { /* what a parameter of the C function receives */
    OPK_FROM_DATA = 0,     /* a pointer to a contiguous tensor's elements */
    OPK_FROM_TENSOR = 1,   /* a pointer to an opk_tensor */
    OPK_FROM_DATA_LIST = 2,   /* T* const*: the elements of each tensor of a list, all contiguous */
    OPK_FROM_TENSOR_LIST = 3, /* an array of opk_tensor */
    OPK_FROM_SCALAR = 4,   /* the value of an int, float, bool or dtype; of an optional one where it is known not to be None */
    OPK_FROM_SCALAR_POINTER = 5, /* a pointer to it (int64_t, double, uint8_t for bool, int32_t for dtype), NULL: None */
    OPK_FROM_STRING = 6,   /* its characters, ending in a NUL; NULL: None */
    OPK_FROM_VALUES = 7,   /* the elements of a list of ints (int64_t), floats (double) or bools (uint8_t) */
    OPK_FROM_LENGTH = 8,   /* of a list or a string */
    OPK_FROM_NAMED_SIZE = 9,  /* detail: which */
    OPK_FROM_NUMEL = 10, OPK_FROM_RANK = 11,
    OPK_FROM_SIZE = 12, OPK_FROM_STRIDE = 13, /* detail: the dimension; negative ones count from the end */
    OPK_FROM_STREAM = 14,  /* torch's current CUDA stream */
    OPK_FROM_INT_CONSTANT = 15, OPK_FROM_FLOAT_CONSTANT = 16,
    /* A pointer to an opk_tensor that is contiguous, or was made so, except for the strides that the kernel receives: each other
     * dimension lies around the one after it without gaps. detail: bit d for the stride of the dimension d, bit 15 + d for
     * that of the d-th from the end. */
    OPK_FROM_PACKED_TENSOR = 17
};

/* The element type that a pointer requires: an opk_dtype, or one of these. */
enum { OPK_ANY_DTYPE = -1 };
#define OPK_VARIABLE(n) (-2 - (n)) /* the n-th type variable, T being the first */

typedef struct opk_parameter {
    const char* name;
    int32_t source;   /* an opk_source */
    int32_t argument; /* a schema argument's number, or the number of arguments + an output's number */
    int32_t detail;
    int32_t dtype; /* that pointers and tensors must have; OPK_ANY_DTYPE, OPK_VARIABLE(n) or an opk_dtype */
    opk_value constant;
} opk_parameter;

/* The C function compiled for one choice of types: dtypes[n] is the dtype of the n-th type variable. */
typedef struct opk_instance {
    const int32_t* dtypes;
    opk_trampoline call;
} opk_instance;

/* What changes while the process runs; one for each kernel, zeroed at the start. The runtime owns it. */
typedef struct opk_state {
    void* programs; /* how output sizes follow from arguments; see docs/native.md */
} opk_state;

struct opk_kernel {
    int32_t version;
    const char* operator_name; /* "demo::rms_norm" */
    const char* kernel_name;
    const char* schema; /* "demo::rms_norm(Tensor x, Tensor weight, float eps=1e-06) -> Tensor" */
    int32_t cuda;       /* 1: on CUDA tensors, under a device guard */
    int32_t argument_count, output_count, parameter_count, size_count, variable_count, instance_count;
    const opk_argument* arguments;
    const opk_output* outputs;
    const opk_parameter* parameters;
    const char* const* size_names;
    const opk_instance* instances;
    opk_state* state;
};

/* One argument of a call. Which member counts follows from the opk_kind; present is 0 for None. */
struct opk_input {
    int32_t present;
    int64_t count; /* of a list, or of a string's characters */
    const opk_tensor* known; /* of a tensor that is on the kernel's device: all but its data, if the caller knows; else NULL */
    union {
        void* tensor; /* an AtenTensorHandle, borrowed */
        void* const* tensors;
        int64_t i; /* int, bool, dtype */
        double f;
        const char* text;
        const int64_t* ints;
        const double* floats;
        const uint8_t* bools;
    } as;
};

enum opk_status { OPK_DONE = 0, OPK_REFUSED = 1, OPK_FAILED = 2 };

struct opk_message {
    char text[1024];
};

/* A layout gives each new output (no alias) in turn: dtype, rank, sizes, strides. Without one the sizes come from the
 * first program that fits the call. A program is an array of int64_t:
 *
 *   length                 of the whole in words, this one included
 *   key                    for each schema argument, by kind; a call fits if all of it is equal
 *     tensor               0 (None), or 1, rank, dtype, whether it is contiguous (as torch has it)
 *     tensors              0, or 1, count, then rank, dtype, whether it is contiguous, for each
 *     int, float           0, or 1
 *     bool, dtype          0, or 1, value
 *     string               0, or 1, the FNV-1a hash (64 bits, as an int64_t) of its bytes, the NUL left out
 *     ints, floats         0, or 1, count
 *     bools                0, or 1, count, values
 *     ignored              nothing
 *   guard                  words of code, code: the call fits if it yields other than 0
 *   for each new output    dtype, rank; for each size: words of code, code; then 0 for row-major strides, or 1 and for
 *                          each stride: words of code, code
 *
 * Row-major strides are torch's: the last is 1, each other one the next stride times the next size, 0 counting as 1. A
 * scalar output (rank 0) has the 0 too. The guard comes first: what it demands holds for the code of the outputs.
 *
 * Code is postfix over int64_t: an operation takes its operands from a stack, the last one from the top, and leaves its
 * result there; one value is left in the end. At most 32 values are on the stack at a time. Division and remainder are
 * Python's (rounded down; a remainder has the sign of the divisor). Comparisons and AND, OR, NOT yield 0 or 1, and any
 * number but 0 counts as true; both operands of AND and OR, and both choices of SELECT, are computed. A call is unfit if
 * anything divides by 0, if a result is out of the range of int64_t, or if a size is negative. */
enum opk_code {
    OPK_CODE_CONSTANT = 0, /* value */
    OPK_CODE_SIZE = 1,     /* argument, item (of a list; else 0), dimension */
    OPK_CODE_STRIDE = 2,   /* the same */
    OPK_CODE_INT = 3,      /* argument, item (of a list; else 0): an int, or an element of ints */
    OPK_CODE_FLOAT_IS = 4, /* argument, item, bits of a double: 1 if the float is that very one, else 0 */
    OPK_CODE_ADD = 5, OPK_CODE_SUBTRACT = 6, OPK_CODE_MULTIPLY = 7, OPK_CODE_FLOOR_DIVIDE = 8, OPK_CODE_MODULO = 9,
    OPK_CODE_MINIMUM = 10, OPK_CODE_MAXIMUM = 11, OPK_CODE_EQUAL = 12, OPK_CODE_NOT_EQUAL = 13, OPK_CODE_LESS = 14,
    OPK_CODE_LESS_EQUAL = 15, OPK_CODE_AND = 16, OPK_CODE_OR = 17, OPK_CODE_NOT = 18,
    OPK_CODE_SELECT = 19 /* c a b: c ? a : b */
};

#ifdef __cplusplus
}
#endif
#endif
