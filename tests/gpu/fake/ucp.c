/* A libucp.so.0 in front of the real one, which it is linked to: nothing can be sent, and it says what is taken back. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>

void *ucp_tag_send_nbx(void *endpoint, const void *data, size_t bytes, uint64_t tag, const void *param) {
    return (void *)(intptr_t)-3; /* UCS_ERR_IO_ERROR */
}

void ucp_request_cancel(void *worker, void *request) {
    fprintf(stderr, "a request is taken back\n");
    ((void (*)(void *, void *))dlsym(RTLD_NEXT, "ucp_request_cancel"))(worker, request);
}
