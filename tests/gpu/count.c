/* A libcuda.so.1 that counts how often its caller waits, and leaves everything else to the one that it is linked to:
 *
 *   cc -shared -fPIC -Wl,--no-as-needed -o libcount.so count.c /usr/lib/x86_64-linux-gnu/libcuda.so.1
 */
#define _GNU_SOURCE
#include <dlfcn.h>

static long waits;

long count_of_waits(void) { return waits; }

static int wait_for(const char *name, void *what) {
    int (*function)(void *) = (int (*)(void *))dlsym(RTLD_NEXT, name);
    __atomic_add_fetch(&waits, 1, __ATOMIC_RELAXED);
    return function ? function(what) : 999; /* CUDA_ERROR_UNKNOWN */
}

int cuStreamSynchronize(void *stream) { return wait_for("cuStreamSynchronize", stream); }
