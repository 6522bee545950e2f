/* The handler by which XLA calls a kernel: one more unit of the kernel's library, after opkit.h. C11 and C++17.
 *
 * The attribute `call` is an array of int64_t: the number of the instance, the number of words, the words, and the patches. The
 * words are the kernel's parameters, followed by what they point to. A patch is three numbers: the word that is an address, 0 and
 * the number of a buffer (arguments, then results) or 1 and the number of a word. */
#include "xla/ffi/api/c_api.h"

#ifdef __cplusplus
#define OPK_XLA extern "C" __attribute__((visibility("default")))
#define OPK_XLA_CATCH(body) try { body } catch (...) { opk_xla_fail("", 0, "it threw an exception"); }
extern "C" const opk_kernel* opk_describe(void);
#else
#define OPK_XLA __attribute__((visibility("default")))
#define OPK_XLA_CATCH(body) body
extern const opk_kernel* opk_describe(void);
#endif

/* ---- what a call reports -------------------------------------------------------------------------------------------- */

typedef struct opk_xla_report {
    int32_t count;
    char text[1000];
} opk_xla_report;

static __thread opk_xla_report* opk_xla_here = 0;
static opk_xla_report opk_xla_stray; /* of threads that belong to no known call: what they say fails every call then running */
static const opk_runtime* opk_xla_shared = 0;

static void opk_xla_fail(const char* file, int32_t line, const char* format, ...) {
    opk_xla_report* report = opk_xla_here != 0 ? opk_xla_here : &opk_xla_stray;
    if (__atomic_fetch_add(&report->count, 1, __ATOMIC_ACQ_REL) > 0 && report != &opk_xla_stray) return;
    __builtin_va_list arguments;
    __builtin_va_start(arguments, format);
    const int written = __builtin_vsnprintf(report->text, sizeof report->text, format, arguments);
    __builtin_va_end(arguments);
    if (line > 0 && written >= 0 && (size_t)written < sizeof report->text)
        __builtin_snprintf(report->text + written, sizeof report->text - (size_t)written, " (%s:%d)", file, line);
}

typedef struct opk_xla_work {
    opk_range_body body;
    void* context;
    opk_xla_report* report;
} opk_xla_work;

static void opk_xla_part(int64_t begin, int64_t end, void* context) {
    const opk_xla_work* work = (const opk_xla_work*)context;
    opk_xla_report* before = opk_xla_here;
    opk_xla_here = work->report;
    OPK_XLA_CATCH(work->body(begin, end, work->context);)
    opk_xla_here = before;
}

static void opk_xla_parallel_for(int64_t begin, int64_t end, int64_t grain, opk_range_body body, void* context) {
    opk_xla_work work = {body, context, opk_xla_here};
    opk_xla_shared->parallel_for(begin, end, grain, opk_xla_part, &work);
}

static opk_runtime opk_xla_runtime;

OPK_XLA void opk_xla_init(const opk_runtime* runtime);
void opk_xla_init(const opk_runtime* runtime) {
    opk_xla_shared = runtime;
    opk_xla_runtime = *runtime;
    opk_xla_runtime.fail = opk_xla_fail;
    opk_xla_runtime.parallel_for = opk_xla_parallel_for;
    opk_rt = &opk_xla_runtime;
}

/* ---- the handler ---------------------------------------------------------------------------------------------------- */

static XLA_FFI_Error* opk_xla_error(const XLA_FFI_CallFrame* frame, const char* message) {
    const opk_kernel* kernel = opk_describe();
    char text[1400];
    __builtin_snprintf(text, sizeof text, "%s, kernel %s: %s", kernel->operator_name, kernel->kernel_name, message);
    XLA_FFI_Error_Create_Args error = {XLA_FFI_Error_Create_Args_STRUCT_SIZE, 0, text, XLA_FFI_Error_Code_INTERNAL};
    return frame->api->XLA_FFI_Error_Create(&error);
}

static void* opk_xla_buffer(const XLA_FFI_CallFrame* frame, int64_t number) {
    void* buffer = number < frame->args.size ? frame->args.args[number] : frame->rets.rets[number - frame->args.size];
    return ((XLA_FFI_Buffer*)buffer)->data;
}

static XLA_FFI_Error* opk_xla_run(XLA_FFI_CallFrame* frame, const int64_t* call, size_t length) {
    const int64_t count = call[1], *patches = call + 2 + count, *end = call + length;
    opk_value few[128], *words = count <= 128 ? few : (opk_value*)__builtin_malloc((size_t)count * sizeof(opk_value));
    if (words == 0) return opk_xla_error(frame, "no memory is left");
    for (int64_t i = 0; i < count; i++) words[i].i = call[2 + i];
    for (const int64_t* patch = patches; patch < end; patch += 3)
        words[patch[0]].p = patch[1] == 0 ? opk_xla_buffer(frame, patch[2]) : (void*)&words[patch[2]];
    opk_xla_report report;
    report.count = 0;
    opk_xla_report* before = opk_xla_here;
    const int32_t strays = __atomic_load_n(&opk_xla_stray.count, __ATOMIC_ACQUIRE);
    const char* text = 0;
    int32_t code = 0;
    opk_xla_here = &report;
    OPK_XLA_CATCH(code = opk_describe()->instances[call[0]].call(words, &text);)
    opk_xla_here = before;
    XLA_FFI_Error* error = 0;
    if (report.count != 0)
        error = opk_xla_error(frame, report.text);
    else if (__atomic_load_n(&opk_xla_stray.count, __ATOMIC_ACQUIRE) != strays)
        error = opk_xla_error(frame, opk_xla_stray.text);
    else if (text != 0)
        error = opk_xla_error(frame, text);
    else if (code != 0) {
        __builtin_snprintf(report.text, sizeof report.text, "it returned the error code %d", code);
        error = opk_xla_error(frame, report.text);
    }
    if (words != few) __builtin_free(words);
    return error;
}

OPK_XLA XLA_FFI_Error* opk_xla(XLA_FFI_CallFrame* frame);
XLA_FFI_Error* opk_xla(XLA_FFI_CallFrame* frame) {
    /* the type of `extension_start` has another name from JAX 0.12 on */
    const XLA_FFI_Metadata_Extension* extension = (const XLA_FFI_Metadata_Extension*)frame->extension_start;
    if (extension != 0 && extension->extension_base.type == XLA_FFI_Extension_Metadata) {
        XLA_FFI_Metadata* metadata = extension->metadata;
        metadata->api_version.major_version = XLA_FFI_API_MAJOR;
        metadata->api_version.minor_version = XLA_FFI_API_MINOR;
        metadata->traits = 0;
        return 0;
    }
    if (frame->stage != XLA_FFI_ExecutionStage_EXECUTE) return 0;
    for (int64_t i = 0; i < frame->attrs.size; i++) {
        if (frame->attrs.types[i] != XLA_FFI_AttrType_ARRAY) continue;
        const XLA_FFI_Array* array = (const XLA_FFI_Array*)frame->attrs.attrs[i];
        return opk_xla_run(frame, (const int64_t*)array->data, array->size);
    }
    return opk_xla_error(frame, "the call has no attribute `call`");
}
