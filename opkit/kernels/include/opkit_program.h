/* What the program of a saved model (generated C, in its kernels.so) and the runtime that runs it know of each other.
 * Follows opkit.h. The program is three functions:
 *
 *   opkit_program_sizes     computes the sizes that follow from others; those that inputs determine are there already
 *   opkit_program_layouts   writes the bytes of the arena, then the sizes and strides of each tensor among the inputs
 *   opkit_program_run       runs the model: 0, or the number of the step that failed, counted from 1
 *
 * A change to anything below changes OPK_PROGRAM_VERSION. */
#ifndef OPKIT_PROGRAM_H
#define OPKIT_PROGRAM_H

#define OPK_PROGRAM_VERSION 1

#ifdef __cplusplus
extern "C" {
#endif

enum opk_passed_kind {
    OPK_PASSED_NONE = 0, OPK_PASSED_TENSOR = 1, OPK_PASSED_INT = 2, OPK_PASSED_FLOAT = 3, OPK_PASSED_BOOL = 4,
    OPK_PASSED_TEXT = 5, OPK_PASSED_DTYPE = 6, OPK_PASSED_LIST = 7
};

/* An argument of an operator that the program calls. */
typedef struct opk_passed {
    int32_t kind;
    int32_t count;    /* of a list */
    const char* name; /* of a keyword argument; NULL for a positional one */
    union {
        const opk_tensor* tensor;
        int64_t i; /* int, bool, dtype */
        double f;
        const char* text;
        const struct opk_passed* items;
    } as;
} opk_passed;

/* A result of such an operator. The program says its layout. Where `tensor.data` is NULL, whoever computes it sets it; if the
 * memory is not the runtime's, `owner` is what it is released by. */
typedef struct opk_result {
    int64_t buffer; /* -1: nobody needs it */
    opk_tensor tensor;
    void* owner;
} opk_result;

/* The state of segments of kernels, as emit/c/source.py describes it. */
typedef struct opk_segments {
    void (*parallel)(void (*)(void*), void*, unsigned, unsigned);
    int (*thread)(void);
    int64_t threads;
    int64_t error[3];
    void* const* functions;
} opk_segments;

/* What a program asks the runtime for. Memory belongs to a buffer of the program until it is released. */
typedef struct opk_host opk_host;
struct opk_host {
    opk_segments segments;
    void* (*allocate)(opk_host* host, int64_t buffer, const opk_tensor* layout); /* NULL: there is none */
    void (*release)(opk_host* host, int64_t buffer);
    int32_t (*call)(opk_host* host, int64_t operator_number, const opk_passed* arguments, int64_t count, opk_result* results,
                    int64_t result_count); /* 0, or else it failed */
    void (*give)(opk_host* host, int64_t output, int64_t buffer, const opk_tensor* tensor); /* an output of the program */
    int32_t device; /* the number of the GPU that a program for GPUs runs on */
    int32_t (*launch)(opk_host* host, int64_t kernel, int64_t programs, void** parameters); /* 0, or else it failed */
};

#ifdef __cplusplus
}
#endif
#endif
