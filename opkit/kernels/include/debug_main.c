/* Runs one call of a kernel that was built with sanitizers, in a process of its own: PROGRAM CALL RESULT.
 *
 * Both files are 64-bit words, little-endian, then bytes; opkit/kernels/sanitizer.py writes CALL and reads RESULT.
 * CALL    "OPKCALL1", the instance's number, how many blocks, links and values follow
 *         block: size in bytes, flags (1: CALL has its bytes; else it is filled with 0xff. 2: the kernel may write to it)
 *         link:  block, offset, target, offset in the target: the first holds the address of the second
 *         value: block, word: the block's address plus the word; or -1, word: the word itself
 *         the bytes of each block with flag 1, padded to whole words
 * RESULT  "OPKBASE1", the address of each block                                                (before the call)
 *         "OPKDONE1", the code, the length of the message or -1, the message, padded           (after it)
 *         how many blocks changed that the kernel may not write to, and their numbers
 *         the bytes of each block that it may write to, padded
 *
 * Each block is allocated alone, at its exact size, so that the sanitizer's red zones touch it on both sides. */
#define _GNU_SOURCE /* also if the author sets -std=c11 */
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "opkit.h"

const opk_kernel* opk_describe(void);
void opk_init(const opk_runtime*);
__attribute__((weak)) void __asan_poison_memory_region(const volatile void* address, size_t size);

enum { HAS_DATA = 1, WRITABLE = 2, ALIGNMENT = 64, THREADS = 4 };

typedef struct Block {
    int64_t size, flags;
    unsigned char *data, *address;
} Block;

static void stop(const char* why) {
    fprintf(stderr, "opkit's debug program: %s\n", why);
    _exit(3);
}

static void* checked(void* memory) {
    if (memory == NULL) stop("there is not enough memory");
    return memory;
}

/* ---- what the kernel may call ------------------------------------------------------------------------------------- */

static pthread_mutex_t failing = PTHREAD_MUTEX_INITIALIZER;
static char failure[1024];
static int failed;

/* The first failure counts, and the kernel runs on, as in opkit's own runtime. */
static void fail(const char* file, int32_t line, const char* format, ...) {
    char message[900];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    pthread_mutex_lock(&failing);
    if (!failed) snprintf(failure, sizeof failure, "%s (%s:%d)", message, file, (int)line);
    failed = 1;
    pthread_mutex_unlock(&failing);
}

typedef struct Part {
    int64_t begin, end;
    opk_range_body body;
    void* context;
    int32_t number;
    int started;
    pthread_t thread;
} Part;

static __thread int32_t thread_number;
static __thread int nested;

static void* run_part(void* argument) {
    const Part* part = argument;
    thread_number = part->number;
    nested = 1;
    part->body(part->begin, part->end, part->context);
    return NULL;
}

static void start_part(Part* part) {
    part->started = pthread_create(&part->thread, NULL, run_part, part) == 0;
    if (!part->started) part->body(part->begin, part->end, part->context);
}

/* Four threads whatever the machine has, so that a body that relies on being alone fails here too. */
static void parallel_for(int64_t begin, int64_t end, int64_t grain, opk_range_body body, void* context) {
    if (begin >= end) return;
    int64_t step = (end - begin + THREADS - 1) / THREADS;
    if (step < grain) step = grain;
    if (nested || step >= end - begin) {
        body(begin, end, context);
        return;
    }
    Part parts[THREADS];
    int32_t count = 0;
    for (; begin < end; count++) {
        int64_t stop_at = end - begin < step ? end : begin + step;
        parts[count] = (Part){.begin = begin, .end = stop_at, .body = body, .context = context, .number = count};
        start_part(&parts[count]);
        begin = stop_at;
    }
    for (int32_t i = 0; i < count; i++)
        if (parts[i].started) pthread_join(parts[i].thread, NULL);
}

static int32_t thread_count(void) { return THREADS; }

static int32_t thread_index(void) { return thread_number; }

static const opk_runtime runtime = {OPK_ABI_VERSION, fail, parallel_for, thread_count, thread_index, NULL, NULL};

/* ---- the call ----------------------------------------------------------------------------------------------------- */

typedef struct Call {
    int64_t instance, block_count, link_count, value_count;
    const int64_t *links, *values;
    Block* blocks;
} Call;

static size_t padded(int64_t size) { return ((size_t)size + 7) / 8 * 8; }

/* A private copy: links are written into it, and after the call it shows which blocks changed. */
static int64_t* map_file(const char* path) {
    struct stat status;
    int file = open(path, O_RDONLY);
    if (file < 0 || fstat(file, &status) != 0) stop("the call cannot be read");
    void* words = mmap(NULL, (size_t)status.st_size, PROT_READ | PROT_WRITE, MAP_PRIVATE, file, 0);
    if (words == MAP_FAILED) stop("the call cannot be mapped");
    close(file);
    return words;
}

/* An empty block is memory that must not be touched at all: malloc(0) would leave one byte of it open. */
static unsigned char* allocate(int64_t size) {
    void* address = NULL;
    if (posix_memalign(&address, ALIGNMENT, size > 0 ? (size_t)size : ALIGNMENT) != 0) checked(NULL);
    if (size == 0 && __asan_poison_memory_region) __asan_poison_memory_region(address, ALIGNMENT);
    return address;
}

static void place_blocks(Call* call, const int64_t* rows) {
    call->blocks = checked(calloc((size_t)call->block_count + 1, sizeof(Block)));
    unsigned char* bytes = (unsigned char*)(call->values + 2 * call->value_count);
    for (int64_t i = 0; i < call->block_count; i++) {
        int64_t size = rows[2 * i], flags = rows[2 * i + 1];
        call->blocks[i] = (Block){size, flags, bytes, allocate(size)};
        if (flags & HAS_DATA) bytes += padded(size);
    }
}

static void link_blocks(const Call* call) {
    for (int64_t i = 0; i < call->link_count; i++) {
        const int64_t* link = call->links + 4 * i;
        unsigned char* target = call->blocks[link[2]].address + link[3];
        memcpy(call->blocks[link[0]].data + link[1], &target, sizeof target);
    }
}

static void fill_blocks(const Call* call) {
    for (int64_t i = 0; i < call->block_count; i++) {
        const Block* block = &call->blocks[i];
        if (block->size == 0) continue;
        if (block->flags & HAS_DATA) memcpy(block->address, block->data, (size_t)block->size);
        else memset(block->address, 0xff, (size_t)block->size);
    }
}

static Call read_call(const char* path) {
    const int64_t* words = map_file(path);
    if (memcmp(words, "OPKCALL1", 8) != 0) stop("the call is not one");
    Call call = {.instance = words[1], .block_count = words[2], .link_count = words[3], .value_count = words[4]};
    call.links = words + 5 + 2 * call.block_count;
    call.values = call.links + 4 * call.link_count;
    place_blocks(&call, words + 5);
    link_blocks(&call);
    fill_blocks(&call);
    return call;
}

static int32_t run(const Call* call, const char** text) {
    const opk_kernel* kernel = opk_describe();
    if (kernel->version != OPK_ABI_VERSION) stop("the kernel was made for another opkit");
    if (call->instance < 0 || call->instance >= kernel->instance_count) stop("the kernel has no such instance");
    opk_value* values = checked(calloc((size_t)call->value_count + 1, sizeof(opk_value)));
    for (int64_t i = 0; i < call->value_count; i++) {
        const int64_t* row = call->values + 2 * i;
        if (row[0] < 0) values[i].i = row[1];
        else values[i].p = call->blocks[row[0]].address + row[1];
    }
    opk_init(&runtime);
    return kernel->instances[call->instance].call(values, text);
}

/* ---- the result --------------------------------------------------------------------------------------------------- */

static void write_word(FILE* file, int64_t word) { fwrite(&word, sizeof word, 1, file); }

static void write_bytes(FILE* file, const void* bytes, int64_t size) {
    fwrite(bytes, 1, (size_t)size, file);
    fwrite("\0\0\0\0\0\0\0", 1, padded(size) - (size_t)size, file);
}

static void write_addresses(FILE* file, const Call* call) {
    write_bytes(file, "OPKBASE1", 8);
    for (int64_t i = 0; i < call->block_count; i++) write_word(file, (int64_t)(uint64_t)call->blocks[i].address);
    fflush(file);
}

static void write_outcome(FILE* file, int32_t code, const char* text) {
    const char* message = failed ? failure : text;
    write_bytes(file, "OPKDONE1", 8);
    write_word(file, code);
    write_word(file, message == NULL ? -1 : (int64_t)strlen(message));
    if (message != NULL) write_bytes(file, message, (int64_t)strlen(message));
}

static int changed(const Block* block) {
    return block->size > 0 && block->flags == HAS_DATA && memcmp(block->data, block->address, (size_t)block->size) != 0;
}

static void write_blocks(FILE* file, const Call* call) {
    int64_t count = 0;
    for (int64_t i = 0; i < call->block_count; i++) count += changed(&call->blocks[i]);
    write_word(file, count);
    for (int64_t i = 0; i < call->block_count; i++)
        if (changed(&call->blocks[i])) write_word(file, i);
    for (int64_t i = 0; i < call->block_count; i++) {
        const Block* block = &call->blocks[i];
        if ((block->flags & WRITABLE) && block->size > 0) write_bytes(file, block->address, block->size);
    }
}

int main(int count, char** arguments) {
    if (count != 3) stop("it takes two files, the call and the result");
    setvbuf(stdout, NULL, _IOLBF, 0); /* what the kernel printed before a crash is seen */
    Call call = read_call(arguments[1]);
    FILE* result = fopen(arguments[2], "wb");
    if (result == NULL) stop("the result cannot be written");
    write_addresses(result, &call);
    const char* text = NULL;
    int32_t code = run(&call, &text);
    write_outcome(result, code, text);
    write_blocks(result, &call);
    if (ferror(result) || fclose(result) != 0) stop("the result could not be written");
    return 0;
}
