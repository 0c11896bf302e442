/* A libamdhip64.so.7 that does what the libcuda.so.1 beside it does, under HIP's names alone.
 *
 * HIP has a current device for each thread in the place of contexts. A thread has none here until one is set; to set none again
 * is to leave, which ends a call. The signatures are those of hip/hip_runtime_api.h. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#pragma GCC visibility push(hidden)
#include "cuda.c"
#pragma GCC visibility pop

static __thread int current = -1;

int hipInit(unsigned flags) { return cuInit(flags); }
int hipDriverGetVersion(int *version) { *version = 70051831; return 0; }
const char *hipGetErrorString(int code) { return code == 100 ? "no ROCm-capable device is detected" : "unknown error"; }
int hipGetDeviceCount(int *count) { return cuDeviceGetCount(count); }
int hipDeviceGet(int *device, int ordinal) { return cuDeviceGet(device, ordinal); }
int hipDeviceGetUuid(unsigned char *uuid, int device) { return cuDeviceGetUuid(uuid, device); }
int hipGetDevice(int *device) { *device = current; return 0; }
int hipSetDevice(int device) {
    void *none;
    if (device >= 0 && current < 0)
        cuCtxPushCurrent_v2(NULL);
    else if (device < 0)
        cuCtxPopCurrent_v2(&none);
    current = device;
    return 0;
}
int hipGetStreamDeviceId(void *stream) { return number("FAKE_CUDA_STREAM_DEVICE", 0); }
int hipStreamCreateWithFlags(void **stream, unsigned flags) { return cuStreamCreate(stream, flags); }
int hipStreamSynchronize(void *stream) { return cuStreamSynchronize(stream); }
int hipStreamWaitEvent(void *stream, void *event, unsigned flags) { return cuStreamWaitEvent(stream, event, flags); }
int hipThreadExchangeStreamCaptureMode(int *mode) { return 0; }
int hipHostMalloc(void **memory, size_t bytes, unsigned flags) { return cuMemHostAlloc(memory, bytes, flags); }
int hipHostFree(void *memory) { return cuMemFreeHost(memory); }
int hipMalloc(void **memory, size_t bytes) { return cuMemAlloc_v2((uint64_t *)memory, bytes); }
int hipMallocAsync(void **memory, size_t bytes, void *stream) { return hipMalloc(memory, bytes); }
int hipFreeAsync(void *memory, void *stream) { return cuMemFreeAsync((uint64_t)(uintptr_t)memory, stream); }
int hipMemsetD8Async(void *to, unsigned char value, size_t bytes, void *stream) { return cuMemsetD8Async((uint64_t)(uintptr_t)to, value, bytes, stream); }
int hipMemsetD32Async(void *to, int value, size_t words, void *stream) { return cuMemsetD32Async((uint64_t)(uintptr_t)to, value, words, stream); }
int hipMemcpyAsync(void *to, const void *from, size_t bytes, int kind, void *stream) {
    return kind == 4 ? cuMemcpyAsync((uint64_t)(uintptr_t)to, (uint64_t)(uintptr_t)from, bytes, stream) : 21;
}
int hipEventCreateWithFlags(void **event, unsigned flags) { return cuEventCreate(event, flags); }
int hipEventRecord(void *event, void *stream) { return cuEventRecord(event, stream); }
int hipEventQuery(void *event) { return cuEventQuery(event); }
int hipEventDestroy(void *event) { return cuEventDestroy_v2(event); }

