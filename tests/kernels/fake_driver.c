/* A GPU's driver without a GPU, for tests: it notes what is asked of it in a log, fails where it is told to, and runs a few
 * kernels on the CPU's memory. The name of a kernel says what it takes: "add 8 8 8 4" has four parameters of so many bytes.
 * Compiled with -DHIP it has HIP's names. */
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef struct {
    uint32_t grid[3], block[3], shared;
    void* stream;
    struct {
        uint32_t id, padding, value[16];
    }* attributes;
    uint32_t attribute_count;
} Config;

enum { MOST = 512, LINE = 1 << 15 }; /* parameters of a kernel, and bytes of what is noted of a launch */

typedef struct {
    char name[2048];
} Kernel;

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static char text[1 << 20];
static size_t used;
static char failing[64];
static int failing_with;
#ifndef HIP
static int most_shared = 232448;
#endif
static int capturing, driver_version = 13020, quiet;
static _Thread_local int mode;
static _Thread_local void* context = (void*)1;
static float took = 0.25f;
static int launches;

static void note(const char* format, ...) {
    va_list arguments;
    if (quiet) return;
    pthread_mutex_lock(&mutex);
    va_start(arguments, format);
    if (used < sizeof text - LINE) used += (size_t)vsnprintf(text + used, LINE, format, arguments);
    va_end(arguments);
    pthread_mutex_unlock(&mutex);
}

static int failed(const char* function) { return strcmp(function, failing) == 0 ? failing_with : 0; }

/* ---- for the test ------------------------------------------------------------------------------------------------- */

const char* fake_log(void) { return text; }
int fake_launches(void) { return launches; }
void fake_quiet(int on) { quiet = on; }
void fake_capture(int on) { capturing = on; }
void fake_context(void* current) { context = current; }
void fake_driver_version(int version) { driver_version = version; }
void fake_fail(const char* function, int error) {
    snprintf(failing, sizeof failing, "%s", function), failing_with = error;
}

void fake_reset(void) {
    used = 0, text[0] = 0, failing[0] = 0, capturing = 0, quiet = 0, launches = 0, mode = 0, driver_version = 13020;
    context = (void*)1;
}

/* Nanoseconds that one call of a trampoline takes. */
double fake_time_calls(int (*call)(const void* values, const char** problem), const void* values, long count) {
    struct timespec start, end;
    const char* problem = NULL;
    clock_gettime(CLOCK_MONOTONIC, &start);
    for (long i = 0; i < count && problem == NULL; i++) call(values, &problem);
    clock_gettime(CLOCK_MONOTONIC, &end);
    if (problem != NULL) return -1;
    return ((double)(end.tv_sec - start.tv_sec) * 1e9 + (double)(end.tv_nsec - start.tv_nsec)) / (double)count;
}

/* ---- kernels ------------------------------------------------------------------------------------------------------ */

static int sizes_of(const Kernel* kernel, size_t* sizes) {
    int count = 0;
    for (const char* at = strchr(kernel->name, ' '); at != NULL && count < MOST; at = strchr(at + 1, ' '))
        sizes[count++] = strtoul(at + 1, NULL, 10);
    return count;
}

#define AT(type, i) (*(type*)parameters[i])

static void execute(const Kernel* kernel, const uint32_t* grid, void** parameters) {
    if (strncmp(kernel->name, "add ", 4) == 0) /* x, y, out, n */
        for (int i = 0; i < AT(int32_t, 3); i++) AT(float*, 2)[i] = AT(float*, 0)[i] + AT(float*, 1)[i];
    if (strncmp(kernel->name, "scale ", 6) == 0) /* x, out, factor, n */
        for (int i = 0; i < AT(int32_t, 3); i++) AT(float*, 1)[i] = AT(float*, 0)[i] * AT(float, 2);
    if (strncmp(kernel->name, "increment ", 10) == 0) /* x, n */
        for (int i = 0; i < AT(int32_t, 1); i++) AT(float*, 0)[i] += 1;
    if (strncmp(kernel->name, "mark ", 5) == 0) /* out, offset, total: out[program] += total */
        for (uint32_t i = 0; i < grid[0]; i++) AT(float*, 0)[AT(int32_t, 1) + (int32_t)i] += (float)AT(int32_t, 2);
    if (strncmp(kernel->name, "use ", 4) == 0) memset(AT(void*, 0), 1, (size_t)AT(int64_t, 1)); /* scratch, its bytes */
}

static int run(const char* function, const Kernel* kernel, const Config* config, void** parameters) {
    size_t sizes[MOST];
    char line[LINE];
    int at = 0;
    __atomic_fetch_add(&launches, 1, __ATOMIC_RELAXED);
    if (quiet && strncmp(kernel->name, "none ", 5) == 0) return 0; /* at no cost of its own */
    const int count = sizes_of(kernel, sizes), error = failed(function);
    if (!quiet) {
        const uint32_t *grid = config->grid, *block = config->block;
        at += sprintf(line, "%s|%s|%u,%u,%u|%u,%u,%u|%u|%p|", function, kernel->name, grid[0], grid[1], grid[2],
                      block[0], block[1], block[2], config->shared, config->stream);
        for (uint32_t i = 0; i < config->attribute_count; i++)
            at +=
                sprintf(line + at, "%s%u=%u,%u,%u", i ? " " : "", config->attributes[i].id,
                        config->attributes[i].value[0], config->attributes[i].value[1], config->attributes[i].value[2]);
        for (int i = 0; i < count; i++) {
            at += sprintf(line + at, "%s", i ? " " : "|");
            for (size_t j = 0; j < sizes[i]; j++) at += sprintf(line + at, "%02x", ((uint8_t*)parameters[i])[j]);
        }
        note("%s\n", line);
    }
    if (error == 0) execute(kernel, config->grid, parameters);
    return error;
}

/* ---- the driver --------------------------------------------------------------------------------------------------- */

#ifdef HIP
#define API(cuda, hip) hip
#define NAME(cuda, hip) #hip
#else
#define API(cuda, hip) cuda
#define NAME(cuda, hip) #cuda
#endif

int API(cuInit, hipInit)(uint32_t flags) { return (int)flags; }
int API(cuDriverGetVersion, hipDriverGetVersion)(int* version) { return *version = driver_version, 0; }

int API(cuGetErrorName, hipDrvGetErrorName)(int error, const char** name) {
    *name = error == 1     ? "CUDA_ERROR_INVALID_VALUE"
            : error == 701 ? "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"
                           : "CUDA_ERROR_UNKNOWN";
    return 0;
}

int API(cuGetErrorString, hipDrvGetErrorString)(int error, const char** string) {
    *string = error == 1     ? "invalid argument"
              : error == 701 ? "too many resources requested for launch"
                             : "unknown error";
    return 0;
}

int API(cuModuleLoadData, hipModuleLoadData)(void** module, const void* image) {
    note("load|%.16s|mode %d|context %p\n", (const char*)image, mode, context);
    *module = (void*)2;
    return failed(NAME(cuModuleLoadData, hipModuleLoadData));
}

int API(cuModuleUnload, hipModuleUnload)(void* module) { return note("unload|%p\n", module), 0; }

int API(cuModuleGetFunction, hipModuleGetFunction)(void** function, void* module, const char* name) {
    Kernel* kernel = malloc(sizeof *kernel); /* as long as the process lives, like the module */
    (void)module;
    snprintf(kernel->name, sizeof kernel->name, "%s", name);
    *function = kernel;
    return failed(NAME(cuModuleGetFunction, hipModuleGetFunction));
}

int API(cuFuncGetAttribute, hipFuncGetAttribute)(int* value, int attribute, void* function) {
    (void)function;
    *value = attribute == 0 ? 1024 : attribute == 1 ? 16 : attribute == 3 ? 8 : attribute == 4 ? 40 : -1;
    return 0;
}

int API(cuLaunchKernel, hipModuleLaunchKernel)(void* function, uint32_t gx, uint32_t gy, uint32_t gz, uint32_t bx,
                                               uint32_t by, uint32_t bz, uint32_t shared, void* stream,
                                               void** parameters, void** extra) {
    const Config config = {{gx, gy, gz}, {bx, by, bz}, shared, stream, NULL, 0};
    (void)extra;
    return run(NAME(cuLaunchKernel, hipModuleLaunchKernel), function, &config, parameters);
}

int API(cuLaunchCooperativeKernel, hipModuleLaunchCooperativeKernel)(void* function, uint32_t gx, uint32_t gy,
                                                                     uint32_t gz, uint32_t bx, uint32_t by, uint32_t bz,
                                                                     uint32_t shared, void* stream, void** parameters) {
    const Config config = {{gx, gy, gz}, {bx, by, bz}, shared, stream, NULL, 0};
    return run(NAME(cuLaunchCooperativeKernel, hipModuleLaunchCooperativeKernel), function, &config, parameters);
}

int API(cuLaunchKernelEx, hipDrvLaunchKernelEx)(const Config* config, void* function, void** parameters, void** extra) {
    (void)extra;
    return run(NAME(cuLaunchKernelEx, hipDrvLaunchKernelEx), function, config, parameters);
}

int API(cuMemsetD8Async, hipMemsetD8Async)(uint64_t address, uint8_t value, size_t bytes, void* stream) {
    note("fill|%zu|%p\n", bytes, stream);
    if (bytes < (64u << 20)) memset((void*)address, value, bytes);
    return failed(NAME(cuMemsetD8Async, hipMemsetD8Async));
}

int API(cuMemcpyDtoDAsync_v2, hipMemcpyDtoDAsync)(uint64_t target, uint64_t source, size_t bytes, void* stream) {
    note("copy|%zu|%p\n", bytes, stream);
    memcpy((void*)target, (void*)source, bytes);
    return 0;
}

int API(cuEventCreate, hipEventCreateWithFlags)(void** event, uint32_t flags) { return *event = malloc(1), (int)flags; }
int API(cuEventDestroy_v2, hipEventDestroy)(void* event) { return free(event), 0; }
int API(cuEventRecord, hipEventRecord)(void* event, void* stream) {
    return (void)event, note("record|%p\n", stream), 0;
}
int API(cuEventSynchronize, hipEventSynchronize)(void* event) { return (void)event, 0; }
int API(cuEventElapsedTime, hipEventElapsedTime)(float* ms, void* a, void* b) {
    return (void)a, (void)b, *ms = took, 0;
}
int API(cuStreamIsCapturing, hipStreamIsCapturing)(void* stream, int* status) {
    return (void)stream, *status = capturing, 0;
}

int API(cuThreadExchangeStreamCaptureMode, hipThreadExchangeStreamCaptureMode)(int* exchanged) {
    const int before = mode;
    mode = *exchanged;
    *exchanged = before;
    return 0;
}

#ifdef HIP
int hipGetDevice(int* device) { return *device = 0; }
int hipSetDevice(int device) { return note("device|%d\n", device), 0; }
#else
int cuDeviceGet(int* handle, int device) { return *handle = device, 0; }
int cuDeviceGetAttribute(int* value, int attribute, int device) {
    const int major = 9; /* of the compute capability, whose minor number is 0 */
    return (void)device, *value = attribute == 97 ? most_shared : attribute == 75 ? major : 0, 0;
}
int cuDevicePrimaryCtxRetain(void** made, int device) {
    return *made = (void*)(intptr_t)(device + 1), note("retain|%d\n", device), 0;
}
int cuCtxGetCurrent(void** current) { return *current = context, 0; }
int cuCtxSetCurrent(void* made) { return context = made, 0; }
int cuCtxGetDevice(int* device) { return *device = (int)(intptr_t)context - 1, context ? 0 : 201; }

/* Kernels of libraries, which have no context; their parameters are of the sizes that were said last. */
static char library_sizes[64];
void fake_library_sizes(const char* sizes) { snprintf(library_sizes, sizeof library_sizes, "%s", sizes); }
int cuLibraryLoadData(void** library, const void* image, void* a, void* b, uint32_t c, void* d, void* e, uint32_t f) {
    (void)a, (void)b, (void)c, (void)d, (void)e, (void)f;
    note("library|%.4s|mode %d\n", *(const char*)image == 0x7f ? "code" : "text", mode);
    return *library = (void*)3, failed("cuLibraryLoadData");
}
int cuLibraryUnload(void* library) { return (void)library, 0; }
int cuLibraryGetKernel(void** found, void* library, const char* name) {
    Kernel* kernel = malloc(sizeof *kernel);
    (void)library;
    snprintf(kernel->name, sizeof kernel->name, "%s %s", name, library_sizes);
    return *found = kernel, failed("cuLibraryGetKernel");
}
int cuKernelSetAttribute(int attribute, int value, void* kernel, int device) {
    return note("attribute|%d|%d|%s|%d\n", attribute, value, ((Kernel*)kernel)->name, device), 0;
}

int cuFuncSetAttribute(void* function, int attribute, int value) {
    return (void)function, note("attribute|%d|%d\n", attribute, value), 0;
}
int cuFuncSetCacheConfig(void* function, int preference) { return (void)function, note("cache|%d\n", preference), 0; }

int cuFuncGetParamInfo(void* function, size_t i, size_t* offset, size_t* size) {
    size_t sizes[MOST];
    if ((int)i >= sizes_of(function, sizes)) return 1;
    return *offset = 0, *size = sizes[i], 0;
}

int cuTensorMapEncodeTiled(uint64_t* map, int type, uint32_t rank, void* address, const uint64_t* sizes,
                           const uint64_t* strides, const uint32_t* block, const uint32_t* each, int interleave,
                           int swizzle, int promotion, int fill) {
    char line[512];
    int at = 0;
    for (uint32_t d = 0; d < rank; d++)
        at += sprintf(line + at, "%llu:%llu:%u:%u ", (unsigned long long)sizes[d],
                      d ? (unsigned long long)strides[d - 1] : 0, block[d], each[d]);
    note("encode|%d|%u|%s|%d|%d|%d|%d|%d\n", type, rank, line, interleave, swizzle, promotion, fill,
         (int)((uintptr_t)map % 64));
    memset(map, 0xff, 128);
    map[0] = (uint64_t)(uintptr_t)address;
    return failed("cuTensorMapEncodeTiled");
}

int cuTensorMapReplaceAddress(uint64_t* map, void* address) {
    return note("replace\n"), map[0] = (uint64_t)(uintptr_t)address, 0;
}
#endif
