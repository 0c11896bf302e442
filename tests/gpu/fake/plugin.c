/* What JAX's CUDA plugin needs to start where there is no GPU: libcuda.so.1, libcudart, libcudnn.so.9 and libnvidia-ml.so.1 in one.
 *
 * So XLA's own compiler and runtime for GPUs call our handlers. A device's memory is host memory that the processor cannot touch at
 * its address: who tries dies, as on a GPU; only fake_host() knows the other address. Streams are threads with a queue, which wait
 * FAKE_CUDA_DELAY microseconds (200) before each step: who does not wait for them reads rubbish. Graphs are lists of steps.
 * Kernels cannot be run: launching one is an error, or with FAKE_CUDA_KERNELS=skip nothing. FAKE_CUDA_REACHED=1 lets the processor
 * touch the memory, FAKE_CUDA_DEVICES is the number of GPUs, FAKE_CUDA_SHARED=1 makes all processes see the same, FAKE_CUDA_TRACE=1
 * prints calls; FAKE_CUDA_LOG names a file to which their numbers are written at exit. */
#include "machine.h"

/* ---- Start, devices, contexts */

static void report(void) {
    const char *path = getenv("FAKE_CUDA_LOG");
    FILE *file = path ? fopen(path, "a") : NULL;
    if (file) {
        fprintf(file, "copies %ld waits %ld kernels %ld graphs %ld\n", copies, waits, kernels, graphs);
        fclose(file);
    }
}

API(cuInit, unsigned flags)
    static int once;
    if (!once++)
        atexit(report);
END
API(cuDriverGetVersion, int *version) *version = number("FAKE_CUDA_VERSION", 12090); END
API(cuGetErrorString, int code, const char **text) *text = "an error of tests/fake_gpu"; END
API(cuGetErrorName, int code, const char **text) *text = "CUDA_ERROR_STANDIN"; END
API(cuDeviceGetCount, int *count) *count = number("FAKE_CUDA_DEVICES", 1); END
API(cuDeviceGet, int *device, int ordinal) *device = ordinal; END
API(cuDeviceGetName, char *name, int size, int device) snprintf(name, size, "stand-in"); END
API(cuDeviceGetUuid, unsigned char *uuid, int device)
    int pid = getpid();
    memset(uuid, 0, 16);
    if (!number("FAKE_CUDA_SHARED", 0))
        memcpy(uuid, &pid, sizeof pid);
    uuid[15] = (unsigned char)device + 1;
END
API(cuDeviceTotalMem_v2, size_t *bytes, int device) *bytes = (size_t)1 << 30; END
API(cuDeviceGetPCIBusId, char *name, int size, int device) snprintf(name, size, "0000:%02x:00.0", device); END
API(cuDeviceCanAccessPeer, int *can, int device, int peer) *can = 0; END
API(cuDeviceGetAttribute, int *value, int attribute, int device)
    switch (attribute) {
    case 1: *value = 1024; break; /* threads per block */
    case 2: case 3: *value = 1024; break;
    case 4: *value = 64; break;
    case 5: *value = 2147483647; break;
    case 6: case 7: *value = 65535; break;
    case 8: *value = 49152; break; /* shared memory per block */
    case 9: *value = 65536; break;
    case 10: *value = 32; break; /* warp */
    case 12: *value = 65536; break; /* registers */
    case 13: *value = 1980000; break;
    case 16: *value = 132; break; /* multiprocessors */
    case 36: *value = 2619000; break;
    case 37: *value = 5120; break;
    case 38: *value = 50 << 20; break; /* L2 */
    case 39: *value = 2048; break;
    case 75: *value = 9; break; /* compute capability */
    case 76: *value = 0; break;
    case 81: *value = 233472; break;
    case 82: *value = 65536; break;
    case 97: *value = 232448; break;
    case 34: *value = device; break; /* PCI device */
    case 41: case 102: *value = 1; break; /* unified addressing, virtual memory */
    default: *value = 0;
    }
END
API(cuDevicePrimaryCtxRetain, void **context, int device) *context = CONTEXT(device); END
API(cuDevicePrimaryCtxGetState, int device, unsigned *flags, int *active) *flags = 0; *active = 1; END
API(cuCtxPushCurrent_v2, void *context) if (depth == 64) return INVALID_VALUE; stack[depth++] = context; END
API(cuCtxPopCurrent_v2, void **context) if (!depth) return INVALID_CONTEXT; depth--; if (context) *context = stack[depth]; END
API(cuCtxSetCurrent, void *context)
    if (!context)
        depth -= depth > 0;
    else
        stack[depth ? depth - 1 : depth++] = context;
END
API(cuCtxGetCurrent, void **context) *context = CURRENT; END
API(cuCtxGetDevice, int *device) if (!CURRENT) return INVALID_CONTEXT; *device = DEVICE(CURRENT); END
API(cuCtxGetStreamPriorityRange, int *least, int *greatest) *least = 0; *greatest = -5; END
API(cuCtxSynchronize, void) END

/* ---- Memory */

API(cuMemAlloc_v2, Pointer *memory, size_t bytes)
    if (!CURRENT)
        return INVALID_CONTEXT;
    *memory = (Pointer)(uintptr_t)add_block(bytes, 0);
    if (!*memory)
        return OUT_OF_MEMORY;
END
API(cuMemFree_v2, Pointer memory) return remove_block((void *)(uintptr_t)memory); END
API(cuMemHostAlloc, void **memory, size_t bytes, unsigned flags)
    if (!CURRENT)
        return INVALID_CONTEXT;
    *memory = add_block(bytes, 1);
    if (!*memory)
        return OUT_OF_MEMORY;
END
API(cuMemFreeHost, void *memory) return remove_block(memory); END
API(cuMemGetInfo_v2, size_t *unused, size_t *total) *unused = (size_t)900 << 20; *total = (size_t)1 << 30; END
API(cuPointerGetAttribute, void *value, int attribute, Pointer address)
    Block *block = block_of((void *)(uintptr_t)address);
    if (!block)
        return INVALID_VALUE;
    switch (attribute) {
    case 1: *(void **)value = CONTEXT(0); break;
    case 2: *(unsigned *)value = block->pinned ? 1 : 2; break;
    case 9: *(int *)value = 0; break;
    default: return NOT_SUPPORTED;
    }
END
API(cuPointerGetAttributes, unsigned count, int *attributes, void **values, Pointer address)
    for (unsigned i = 0; i < count; i++)
        cuPointerGetAttribute(values[i], attributes[i], address);
END

static int copy(void *to, const void *from, size_t bytes, void *stream) {
    __atomic_add_fetch(&copies, 1, __ATOMIC_RELAXED);
    Step step = {.to = to, .from = (void *)from, .bytes = bytes};
    if (!block_of(from)) { /* pageable: it is copied away first */
        if (STREAM(stream)->capturing)
            return IN_CAPTURE;
        step.from = memcpy(malloc(bytes + 1), from, bytes);
        step.owned = 1;
    }
    int code = put(stream, step);
    return code == OK && !block_of(to) ? finish(STREAM(stream)) : code; /* pageable: it has arrived */
}
#define P(address) ((void *)(uintptr_t)(address))
API(cuMemcpyDtoHAsync_v2, void *to, Pointer from, size_t bytes, void *stream) return copy(to, P(from), bytes, stream); END
API(cuMemcpyHtoDAsync_v2, Pointer to, const void *from, size_t bytes, void *stream) return copy(P(to), from, bytes, stream); END
API(cuMemcpyDtoDAsync_v2, Pointer to, Pointer from, size_t bytes, void *stream) return copy(P(to), P(from), bytes, stream); END

static int fill(Pointer to, uint32_t value, size_t width, size_t count, void *stream) {
    Step step = {.to = P(to), .value = value, .bytes = count, .width = width};
    return put(stream, step);
}
API(cuMemsetD8Async, Pointer to, unsigned char value, size_t count, void *stream) return fill(to, value, 1, count, stream); END
API(cuMemsetD32Async, Pointer to, unsigned value, size_t count, void *stream) return fill(to, value, 4, count, stream); END

/* Memory in two steps: a place, and what is put there. */
typedef struct { int file; size_t bytes; char *host; } Physical;

API(cuMemGetAllocationGranularity, size_t *bytes, const void *properties, int option) *bytes = (size_t)2 << 20; END
API(cuMemAddressReserve, Pointer *place, size_t bytes, size_t alignment, Pointer wanted, uint64_t flags)
    if (alignment < (size_t)2 << 20)
        alignment = (size_t)2 << 20;
    char *at = mmap(NULL, bytes + alignment, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED)
        return OUT_OF_MEMORY;
    *place = ((Pointer)(uintptr_t)at + alignment - 1) / alignment * alignment;
END
API(cuMemAddressFree, Pointer place, size_t bytes) munmap(P(place), bytes); END
API(cuMemCreate, Physical **result, size_t bytes, const void *properties, uint64_t flags)
    Physical *memory = calloc(1, sizeof *memory);
    memory->file = memfd_create("gpu", 0);
    memory->bytes = bytes;
    if (ftruncate(memory->file, (off_t)bytes))
        return OUT_OF_MEMORY;
    memory->host = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memory->file, 0);
    *result = memory;
END
API(cuMemRelease, Physical *memory) END
API(cuMemMap, Pointer place, size_t bytes, size_t offset, Physical *memory, uint64_t flags)
    Block *block = calloc(1, sizeof *block);
    int protection = number("FAKE_CUDA_REACHED", 0) ? PROT_READ | PROT_WRITE : PROT_NONE;
    block->at = mmap(P(place), bytes, protection, MAP_SHARED | MAP_FIXED, memory->file, (off_t)offset);
    block->host = memory->host + offset;
    block->bytes = bytes;
    pthread_mutex_lock(&blocks_lock);
    block->next = blocks;
    blocks = block;
    pthread_mutex_unlock(&blocks_lock);
END
API(cuMemSetAccess, Pointer place, size_t bytes, const void *access, size_t count) END
API(cuMemUnmap, Pointer place, size_t bytes)
    Block *block = block_of(P(place));
    if (!block)
        return INVALID_VALUE;
    remove_block(block->at);
    mmap(P(place), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
END

/* ---- Streams */

API(cuStreamCreate, void **stream, unsigned flags) if (!CURRENT) return INVALID_CONTEXT; *stream = new_stream(DEVICE(CURRENT)); END
API(cuStreamCreateWithPriority, void **stream, unsigned flags, int priority) return cuStreamCreate(stream, flags); END
API(cuStreamDestroy_v2, void *handle)
    Stream *stream = handle;
    pthread_mutex_lock(&stream->lock);
    stream->stop = 1;
    pthread_cond_broadcast(&stream->changed);
    pthread_mutex_unlock(&stream->lock);
END
API(cuStreamGetCtx, void *stream, void **context) *context = (uintptr_t)stream < 3 ? CURRENT : CONTEXT(((Stream *)stream)->device); END
API(cuStreamSynchronize, void *stream) __atomic_add_fetch(&waits, 1, __ATOMIC_RELAXED); return finish(STREAM(stream)); END
API(cuStreamQuery, void *handle)
    Stream *stream = STREAM(handle);
    pthread_mutex_lock(&stream->lock);
    int busy = stream->done != stream->count;
    pthread_mutex_unlock(&stream->lock);
    return busy ? NOT_READY : OK;
END
API(cuLaunchHostFunc, void *stream, void (*call)(void *), void *argument)
    Step step = {.call = call, .from = argument};
    return put(stream, step);
END
API(cuEventCreate, void **result, unsigned flags)
    if (!CURRENT)
        return INVALID_CONTEXT;
    Event *event = calloc(1, sizeof *event);
    pthread_mutex_init(&event->lock, NULL);
    pthread_cond_init(&event->changed, NULL);
    *result = event;
END
/* Never freed: steps may still be waiting for it. */
API(cuEventDestroy_v2, void *event) END
API(cuEventRecord, void *handle, void *stream)
    Event *event = handle;
    if (STREAM(stream)->capturing)
        return OK;
    pthread_mutex_lock(&event->lock);
    Step step = {.event = event, .number = ++event->recorded};
    pthread_mutex_unlock(&event->lock);
    return put(stream, step);
END
API(cuStreamWaitEvent, void *stream, void *handle, unsigned flags)
    Event *event = handle;
    if (STREAM(stream)->capturing)
        return OK;
    pthread_mutex_lock(&event->lock);
    Step step = {.event = event, .number = event->recorded, .to = event};
    pthread_mutex_unlock(&event->lock);
    return put(stream, step);
END
API(cuEventSynchronize, void *handle)
    Event *event = handle;
    __atomic_add_fetch(&waits, 1, __ATOMIC_RELAXED);
    pthread_mutex_lock(&event->lock);
    long number = event->recorded;
    while (event->reached < number)
        pthread_cond_wait(&event->changed, &event->lock);
    pthread_mutex_unlock(&event->lock);
END
API(cuEventQuery, void *handle)
    Event *event = handle;
    pthread_mutex_lock(&event->lock);
    int reached = event->reached >= event->recorded;
    pthread_mutex_unlock(&event->lock);
    return reached ? OK : NOT_READY;
END

/* ---- Graphs: lists of steps */

API(cuThreadExchangeStreamCaptureMode, int *mode) END
API(cuStreamIsCapturing, void *stream, int *status) *status = STREAM(stream)->capturing; END
API(cuStreamBeginCaptureToGraph, void *handle, void *graph, const void *dependencies, const void *edges, size_t count, int mode)
    Stream *stream = STREAM(handle);
    stream->graph = graph;
    stream->capturing = 1;
END
API(cuStreamEndCapture, void *handle, void **graph)
    Stream *stream = STREAM(handle);
    stream->capturing = 0;
    *graph = stream->graph;
END
API(cuGraphCreate, void **graph, unsigned flags) *graph = calloc(1, sizeof(Graph)); END
API(cuGraphDestroy, void *graph) END
API(cuGraphGetRootNodes, Graph *graph, void **nodes, size_t *count)
    size_t n = graph->count > 0;
    if (nodes && n)
        nodes[0] = (void *)1;
    *count = n;
END
static Graph *clone_of(const Graph *graph) {
    Graph *copy = calloc(1, sizeof *copy);
    for (size_t i = 0; i < graph->count; i++)
        append(copy, graph->nodes[i].step, graph->nodes[i].child ? clone_of(graph->nodes[i].child) : NULL);
    return copy;
}
#define ADD void **node, Graph *graph, void **dependencies, size_t count
API(cuGraphAddChildGraphNode, ADD, const Graph *child) *node = append(graph, (Step){0}, clone_of(child)); END
/* For graphs of XLA's newer versions: a node of any kind, of which we know a graph. */
typedef struct { int type, reserved[3]; const Graph *child; } Parameters;
enum { KERNEL = 0, CHILD = 4 };
static int skips_kernels(void) {
    const char *setting = getenv("FAKE_CUDA_KERNELS");
    return setting && strcmp(setting, "skip") == 0;
}
API(cuGraphAddNode_v2, void **node, Graph *graph, void **dependencies, const void *edges, size_t count, const Parameters *parameters)
    if (parameters->type == KERNEL && skips_kernels()) {
        __atomic_add_fetch(&kernels, 1, __ATOMIC_RELAXED);
        *node = append(graph, (Step){0}, NULL);
        return OK;
    }
    if (parameters->type != CHILD)
        return NOT_SUPPORTED;
    return cuGraphAddChildGraphNode(node, graph, dependencies, count, parameters->child);
END
API(cuGraphInstantiateWithFlags, void **executable, Graph *graph, unsigned long long flags) *executable = clone_of(graph); END
API(cuGraphExecDestroy, void *executable) END
#define NODE(graph, node) (&(graph)->nodes[(size_t)(node) - 1])
API(cuGraphExecChildGraphNodeSetParams, Graph *executable, void *node, const Graph *child)
    NODE(executable, node)->child = clone_of(child);
END
API(cuGraphNodeGetType, void *node, int *type) *type = KERNEL; END
API(cuGraphExecNodeSetParams, Graph *executable, void *node, const Parameters *parameters)
    if (parameters->type == KERNEL && skips_kernels())
        return OK;
    if (parameters->type != CHILD)
        return NOT_SUPPORTED;
    return cuGraphExecChildGraphNodeSetParams(executable, node, parameters->child);
END
static int replay(const Graph *graph, void *stream) {
    int code = OK;
    for (size_t i = 0; i < graph->count && code == OK; i++)
        code = graph->nodes[i].child ? replay(graph->nodes[i].child, stream) : put(stream, graph->nodes[i].step);
    return code;
}
API(cuGraphLaunch, const Graph *executable, void *stream)
    __atomic_add_fetch(&graphs, 1, __ATOMIC_RELAXED);
    return replay(executable, stream);
END

/* ---- Kernels, which do nothing */

API(cuModuleLoadFatBinary, void **module, const char *image)
    *module = strdup(image);
END
API(cuModuleUnload, void *module) END
API(cuModuleGetFunction, void **function, void *module, const char *name) *function = strdup(name); END
/* As PTX declares it, with the bytes that it starts with. */
API(cuModuleGetGlobal_v2, Pointer *address, size_t *bytes, const char *module, const char *name)
    char word[300];
    snprintf(word, sizeof word, " %s[", name);
    const char *at = strstr(module, word);
    if (!at)
        return NOT_FOUND;
    at += strlen(word);
    *bytes = strtoul(at, NULL, 10);
    unsigned char *place = add_block(*bytes, 0), *host = fake_host(place);
    const char *list = strpbrk(at, "{;");
    if (*list == '{')
        for (size_t i = 0; i < *bytes; i++)
            host[i] = (unsigned char)strtoul(list + 1, (char **)&list, 10);
    *address = (Pointer)(uintptr_t)place;
END
API(cuFuncGetAttribute, int *value, int attribute, void *function) *value = attribute == 0 ? 1024 : 0; END
static int launch(const char *function) {
    __atomic_add_fetch(&kernels, 1, __ATOMIC_RELAXED);
    if (skips_kernels())
        return OK;
    fprintf(stderr, "fake_gpu: the kernel %s cannot be run\n", function);
    return NOT_SUPPORTED;
}
API(cuLaunchKernelEx, const void *config, void *function, void **parameters, void **extra) return launch(function); END

/* ---- The runtime */

API(cudaRuntimeGetVersion, int *version) *version = 12090; END
API(cudaGetDeviceCount, int *count) return cuDeviceGetCount(count); END
API(cudaPeekAtLastError, void) END
const char *cudaGetErrorString(int code) { return "an error of tests/fake_gpu"; }
const char *cudaGetErrorName(int code) { return "cudaErrorStandIn"; }
void **__cudaRegisterFatBinary(void *binary) { static void *handle; return &handle; }
void __cudaRegisterFatBinaryEnd(void **handle) {}
void __cudaUnregisterFatBinary(void **handle) {}
void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name, int limit, void *a, void *b, void *c, void *d, int *e) {}
void __cudaRegisterVar(void **handle, char *host, char *device, const char *name, int external, size_t bytes, int constant, int global) {}

/* ---- The management library, which XLA asks about links between devices */

API(nvmlInit_v2, void) END
API(nvmlSystemGetDriverVersion, char *version, unsigned size) snprintf(version, size, "575.57"); END

/* ---- cuDNN, whose version the compiler wants to know */

API(cudnnCreate, void **handle) *handle = calloc(1, 16); END
size_t cudnnGetVersion(void) { return 91200; }
size_t cudnnGetCudartVersion(void) { return 12090; }
API(cudnnGetProperty, int type, int *value) *value = type == 0 ? 9 : type == 1 ? 12 : 0; END
const char *cudnnGetErrorString(int code) { return "an error of tests/fake_gpu"; }
