/* Kernels with a mistake each (and some without) as the instances of one, in the form that generated code has.
 * test_sanitizer.py builds it; each author's code counts its lines from 1, as lines of author.c. */
#include "opkit.h"

const opk_runtime* opk_rt;
void opk_init(const opk_runtime* given) { opk_rt = given; }

#line 1 "author.c"
void scale(const float* x, float* out, double by, int64_t n) {
    for (int64_t i = 0; i < n; i++)
        out[i] = (float)by * x[i];
}
#line 1 "generated.c"
static int32_t call_scale(const opk_value* v, const char** text) {
    (void)v, (void)text;
    scale(v[0].p, v[1].p, v[2].f, v[3].i); return 0;
}

#line 1 "author.c"
void before(float* out, int64_t at) {
    out[at] = 1;
}
#line 1 "generated.c"
static int32_t call_before(const opk_value* v, const char** text) {
    (void)v, (void)text;
    before(v[0].p, v[1].i); return 0;
}

#line 1 "author.c"
void last(const float* x, float* out, int64_t n) {
    out[0] = x[n];
}
#line 1 "generated.c"
static int32_t call_last(const opk_value* v, const char** text) {
    (void)v, (void)text;
    last(v[0].p, v[1].p, v[2].i); return 0;
}

#line 1 "author.c"
void rows(const opk_tensor* x, float* out, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        out[i] = ((const float*)x->data)[i * x->strides[0]];
}
#line 1 "generated.c"
static int32_t call_rows(const opk_value* v, const char** text) {
    (void)v, (void)text;
    rows(v[0].p, v[1].p, v[2].i); return 0;
}

#line 1 "author.c"
int64_t rank(const opk_tensor* x) {
    return x->sizes[x->rank];
}
#line 1 "generated.c"
static int32_t call_rank(const opk_value* v, const char** text) {
    (void)v, (void)text;
    return (int32_t)rank(v[0].p);
}

#line 1 "author.c"
void local_array(float* out, int64_t n) {
    volatile float kept[4];
    volatile float* to = kept;
    for (int64_t i = 0; i < n; i++)
        to[i] = 1;
    out[0] = kept[0];
}
#line 1 "generated.c"
static int32_t call_local(const opk_value* v, const char** text) {
    (void)v, (void)text;
    local_array(v[0].p, v[1].i); return 0;
}

#line 1 "author.c"
int32_t arithmetic(int32_t a, int32_t b, int32_t what) {
    if (what == 0) return a + b;
    if (what == 1) return a << b;
    if (what == 2) return a / b;
    if (what == 3) return a % b;
    return 0;
}
#line 1 "generated.c"
static int32_t call_arithmetic(const opk_value* v, const char** text) {
    (void)v, (void)text;
    return arithmetic((int32_t)v[0].i, (int32_t)v[1].i, (int32_t)v[2].i);
}

#line 1 "author.c"
void misaligned(const char* x, float* out) {
    out[0] = *(const float*)(x + 1);
}
#line 1 "generated.c"
static int32_t call_misaligned(const opk_value* v, const char** text) {
    (void)v, (void)text;
    misaligned(v[0].p, v[1].p); return 0;
}

#line 1 "author.c"
void bias(const float* bias, float* out) {
    out[0] = bias[0];
}
#line 1 "generated.c"
static int32_t call_bias(const opk_value* v, const char** text) {
    (void)v, (void)text;
    bias(v[0].p, v[1].p); return 0;
}

#line 1 "author.c"
extern void abort(void), exit(int), *memset(void*, int, __SIZE_TYPE__);
extern int printf(const char*, ...);
void ends(int64_t how) {
    printf("it begins\n");
    if (how == 0) abort();
    if (how == 1) exit(0);
    if (how == 2) for (volatile int i = 0;; i = 1 - i);
    if (how == 3) __builtin_trap();
}
#line 1 "generated.c"
static int32_t call_ends(const opk_value* v, const char** text) {
    (void)v, (void)text;
    ends(v[0].i); return 0;
}

#line 1 "author.c"
extern void free(void*);
void freed(float* out) {
    free(out);
    out[0] = 1;
}
#line 1 "generated.c"
static int32_t call_freed(const opk_value* v, const char** text) {
    (void)v, (void)text;
    freed(v[0].p); return 0;
}

#line 1 "author.c"
extern void* malloc(__SIZE_TYPE__);
void own(float* out) {
    volatile float* scratch = malloc(12);
    scratch[3] = 1;
    out[0] = scratch[0];
}
#line 1 "generated.c"
static int32_t call_own(const opk_value* v, const char** text) {
    (void)v, (void)text;
    own(v[0].p); return 0;
}

#line 1 "author.c"
extern void* memcpy(void*, const void*, __SIZE_TYPE__);
void copies(const float* x, float* out, int64_t bytes) {
    memcpy(out, x, bytes);
}
#line 1 "generated.c"
static int32_t call_copies(const opk_value* v, const char** text) {
    (void)v, (void)text;
    copies(v[0].p, v[1].p, v[2].i); return 0;
}

#line 1 "author.c"
__attribute__((noinline)) int32_t recursion(int32_t n) {
    volatile char room[1000];
    room[n % 7] = 1;
    return n < 0 ? 0 : recursion(n & 0xffff) + room[0];
}
#line 1 "generated.c"
static int32_t call_recursion(const opk_value* v, const char** text) {
    (void)v, (void)text;
    return recursion((int32_t)v[0].i);
}

#line 1 "author.c"
const char* fails(int64_t how) {
    if (how == 1) opk_rt->fail(__FILE__, __LINE__, "n is %d, not %s", 3, "4");
    if (how == 1) opk_rt->fail(__FILE__, __LINE__, "not the first");
    return how == 2 ? "a text of its own" : 0;
}
#line 1 "generated.c"
static int32_t call_fails(const opk_value* v, const char** text) {
    (void)v, (void)text;
    *text = fails(v[0].i); return (int32_t)v[1].i;
}

#line 1 "author.c"
void sums(const float* const* xs, float* const* outs, const opk_tensor* more, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        if (xs[i] && outs[i]) outs[i][0] = xs[i][0] + (more[i].data ? ((float*)more[i].data)[0] : 0);
}
#line 1 "generated.c"
static int32_t call_sums(const opk_value* v, const char** text) {
    (void)v, (void)text;
    sums(v[0].p, v[1].p, v[2].p, v[3].i); return 0;
}

#line 1 "author.c"
int32_t text_length(const char* mode, int64_t further) {
    int32_t n = 0;
    while (mode[n]) n++;
    return n + mode[n + further];
}
#line 1 "generated.c"
static int32_t call_text(const opk_value* v, const char** text) {
    (void)v, (void)text;
    return text_length(v[0].p, v[1].i);
}

#line 1 "author.c"
static void part(int64_t begin, int64_t end, void* out) {
    for (int64_t i = begin; i < end; i++)
        ((int32_t*)out)[i] = 10 * opk_rt->thread_index() + opk_rt->thread_count();
}
void parallel(int32_t* out, int64_t n, int64_t grain) {
    opk_rt->parallel_for(0, n, grain, part, out);
}
#line 1 "generated.c"
static int32_t call_parallel(const opk_value* v, const char** text) {
    (void)v, (void)text;
    parallel(v[0].p, v[1].i, v[2].i); return 0;
}

#line 1 "author.c"
void openmp(float* out, int64_t n) {
#pragma omp parallel for
    for (int64_t i = 0; i < n; i++)
        out[i] = (float)i;
}
#line 1 "generated.c"
static int32_t call_openmp(const opk_value* v, const char** text) {
    (void)v, (void)text;
    openmp(v[0].p, v[1].i); return 0;
}

static const opk_instance instances[] = {
    {0, call_scale}, {0, call_before}, {0, call_last}, {0, call_rows}, {0, call_rank},
    {0, call_local}, {0, call_arithmetic}, {0, call_misaligned}, {0, call_bias}, {0, call_ends},
    {0, call_freed}, {0, call_own}, {0, call_copies}, {0, call_recursion}, {0, call_fails},
    {0, call_sums}, {0, call_text}, {0, call_parallel}, {0, call_openmp},
};

static const opk_kernel kernel = {
    .version = OPK_ABI_VERSION,
    .operator_name = "demo::op",
    .instance_count = sizeof instances / sizeof *instances,
    .instances = instances,
};

const opk_kernel* opk_describe(void) { return &kernel; }
