/* A libcuda.so.1 whose device memory is host memory, to run everything above the driver without a GPU.
 *
 * Copies wait in a queue, as on a stream, until somebody waits for them: for an event, for the stream, or
 * for the end of a call, which is where its context is popped. So a transport that reads before it has
 * waited reads rubbish. FAKE_CUDA_VERSION, FAKE_CUDA_DEVICES, FAKE_CUDA_BROKEN (cuInit fails),
 * FAKE_CUDA_SHARED (all processes see one GPU), FAKE_CUDA_STREAM_DEVICE (where streams are), FAKE_CUDA_STUCK (the
 * first operation never ends), FAKE_CUDA_BUSY (the GPU comes to a call n seconds after it), FAKE_CUDA_LOST (streams fail)
 * and FAKE_CUDA_FULL (there is no memory) set the scene;
 * FAKE_CUDA_LOG names a file to which the numbers of calls are written at exit, and the bytes copied from and to the host. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

/* With nothing to copy from, words of a value are written; with nothing to copy to, memory is freed. */
typedef struct { void *to; void *from; size_t bytes; uint32_t value; } Copy;

static __thread Copy *queue;
static __thread size_t queued, done, room;
static __thread int entered;
static long copies, waits, allocations, events, copied;
/* Memory of the host that copies from and to the GPU are in. */
static struct { char *at; size_t bytes; } pinned[1024];

/* For tests that count the waits of one call after the other. */
long count_of_waits(void) { return __atomic_load_n(&waits, __ATOMIC_RELAXED); }

static int number(const char *name, int otherwise) {
    const char *text = getenv(name);
    return text ? atoi(text) : otherwise;
}

static void drain(size_t until) {
    for (; done < until; done++) {
        Copy *copy = &queue[done];
        if (!copy->to)
            free(copy->from);
        else if (copy->from)
            memcpy(copy->to, copy->from, copy->bytes);
        else
            for (size_t i = 0; i < copy->bytes; i++)
                ((char *)copy->to)[i] = ((char *)&copy->value)[i % sizeof copy->value];
    }
    if (done == queued)
        done = queued = 0;
}

static int add(Copy copy) {
    if (!entered)
        return 201; /* CUDA_ERROR_INVALID_CONTEXT */
    if (queued == room)
        queue = realloc(queue, (room = 2 * room + 16) * sizeof *queue);
    queue[queued++] = copy;
    if (copy.to)
        __atomic_add_fetch(&copies, 1, __ATOMIC_RELAXED);
    return 0;
}

static void report(void) {
    const char *path = getenv("FAKE_CUDA_LOG");
    FILE *file = path ? fopen(path, "a") : NULL;
    if (file) {
        fprintf(file, "copies %ld waits %ld allocations %ld events %ld copied %ld\n", copies, waits, allocations, events, copied);
        fclose(file);
    }
}

int cuInit(unsigned flags) {
    atexit(report);
    return number("FAKE_CUDA_BROKEN", 0);
}
int cuDriverGetVersion(int *version) { *version = number("FAKE_CUDA_VERSION", 12040); return 0; }
int cuGetErrorString(int code, const char **text) { *text = code == 100 ? "no CUDA-capable device is detected" : NULL; return 0; }
int cuDeviceGetCount(int *count) { *count = number("FAKE_CUDA_DEVICES", 1); return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetUuid(unsigned char *uuid, int device) {
    int pid = getpid();
    memset(uuid, 0, 16);
    if (!number("FAKE_CUDA_SHARED", 0))
        memcpy(uuid + 4, &pid, sizeof pid);
    uuid[0] = (unsigned char)device + 1;
    return 0;
}
/* Streams are on the device whose context was retained last, or on that which is named. */
static int retained;
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = (void *)(intptr_t)(1000 + (retained = device)); return 0; }
/* For nccl.c, whose operations run at once: what was put on the stream before comes first. */
__attribute__((visibility("default"))) void fake_drain(void) { drain(queued); }
int cuCtxPushCurrent_v2(void *context) { entered++; return 0; }
int cuCtxPopCurrent_v2(void **context) { drain(queued); entered--; return 0; }
int cuStreamGetCtx(void *stream, void **context) { *context = (void *)(intptr_t)(1000 + number("FAKE_CUDA_STREAM_DEVICE", retained)); return 0; }
int cuStreamCreate(void **stream, unsigned flags) { *stream = calloc(1, 1); return 0; }
int cuStreamSynchronize(void *stream) {
    __atomic_add_fetch(&waits, 1, __ATOMIC_RELAXED);
    drain(queued);
    return number("FAKE_CUDA_LOST", 0) ? 700 : 0;
}
int cuThreadExchangeStreamCaptureMode(int *mode) { return 0; }
int cuMemHostAlloc(void **memory, size_t bytes, unsigned flags) {
    __atomic_add_fetch(&allocations, 1, __ATOMIC_RELAXED);
    *memory = malloc(bytes);
    if (!*memory)
        return 2;
    memset(*memory, 0xAA, bytes);
    for (int i = 0; i < 1024; i++) {
        char *none = NULL;
        if (__atomic_compare_exchange_n(&pinned[i].at, &none, *memory, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) {
            pinned[i].bytes = bytes;
            break;
        }
    }
    return 0;
}
static int is_pinned(const char *at) {
    for (int i = 0; i < 1024; i++)
        if (pinned[i].at && at >= pinned[i].at && at < pinned[i].at + pinned[i].bytes)
            return 1;
    return 0;
}
int cuMemFreeHost(void *memory) {
    for (int i = 0; i < 1024; i++)
        if (pinned[i].at == memory)
            pinned[i].at = NULL;
    free(memory);
    return 0;
}
int cuMemAlloc_v2(uint64_t *memory, size_t bytes) {
    if (number("FAKE_CUDA_FULL", 0))
        return 2;
    *memory = (uint64_t)(uintptr_t)calloc(1, bytes);
    return 0;
}
int cuMemAllocAsync(uint64_t *memory, size_t bytes, void *stream) { return cuMemAlloc_v2(memory, bytes); }
int cuMemFreeAsync(uint64_t memory, void *stream) {
    Copy copy = {NULL, (void *)(uintptr_t)memory, 0, 0};
    return add(copy);
}
int cuMemsetD8Async(uint64_t to, unsigned char value, size_t bytes, void *stream) {
    Copy copy = {(void *)(uintptr_t)to, NULL, bytes, 0x01010101u * value};
    return add(copy);
}
int cuMemsetD32Async(uint64_t to, unsigned value, size_t words, void *stream) {
    Copy copy = {(void *)(uintptr_t)to, NULL, 4, value};
    return words == 1 ? add(copy) : 801;
}
int cuMemcpyAsync(uint64_t to, uint64_t from, size_t bytes, void *stream) {
    Copy copy = {(void *)(uintptr_t)to, (void *)(uintptr_t)from, bytes, 0};
    if (is_pinned(copy.to) || is_pinned(copy.from))
        __atomic_add_fetch(&copied, bytes, __ATOMIC_RELAXED);
    return add(copy);
}
/* An event is how far its thread's queue has to be done, when it was recorded, whether it is the second of a pair (before an
 * operation and after it), and whether it is recorded after an operation that never ends. */
typedef struct { size_t until; time_t at; int is_after, is_stuck; } Event;
int cuEventCreate(void **event, unsigned flags) {
    Event *new = calloc(1, sizeof *new);
    new->is_after = __atomic_add_fetch(&events, 1, __ATOMIC_RELAXED) % 2 == 0;
    *event = new;
    return 0;
}
int cuEventRecord(void *handle, void *stream) {
    static int stuck;
    Event *event = handle;
    event->until = queued;
    event->at = time(NULL);
    if (event->is_after && number("FAKE_CUDA_STUCK", 0))
        stuck = 1;
    event->is_stuck = stuck;
    return number("FAKE_CUDA_LOST", 0) ? 700 : 0;
}
/* All streams of a thread have one queue: what another one waits for is done at once. */
int cuStreamWaitEvent(void *stream, void *event, unsigned flags) {
    size_t until = ((Event *)event)->until;
    drain(until < queued ? until : queued);
    return 0;
}
int cuEventQuery(void *handle) {
    Event *event = handle;
    return event->is_stuck || time(NULL) < event->at + number("FAKE_CUDA_BUSY", 0) ? 600 : 0;
}
int cuEventDestroy_v2(void *event) { free(event); return 0; }
