/* What the other contenders are measured against: each operation in a plain loop. */

#include <mpi.h>
#include <stdlib.h>
#include <string.h>

static char *buffers[2];
static size_t room;

static int reserve(size_t bytes) {
    if (bytes <= room) return 0;
    for (int k = 0; k < 2; k++) {
        free(buffers[k]);
        if (posix_memalign((void **)&buffers[k], 4096, bytes)) return 1;
        memset(buffers[k], 0, bytes);
    }
    room = bytes;
    return 0;
}

/* Seconds for `iterations` of the operation on blocks of `count` floats; negative after an error. */
double run(const char *name, const MPI_Comm *address, int count, long iterations) {
    MPI_Comm comm = *address;
    int rank, size;
    MPI_Comm_rank(comm, &rank);
    MPI_Comm_size(comm, &size);
    if (reserve(sizeof(float) * (size_t)count * (size_t)size)) return -1;
    void *x = buffers[0], *y = buffers[1];
    const int above = (rank + 1) % size, below = (rank + size - 1) % size;

#define LOOP(...)                                              \
    {                                                          \
        MPI_Barrier(comm);                                     \
        const double begin = MPI_Wtime();                      \
        for (long k = 0; k < iterations; k++) { __VA_ARGS__; } \
        return MPI_Wtime() - begin;                            \
    }
#define IS(other) (strcmp(name, other) == 0)

    if (IS("allgather")) LOOP(MPI_Allgather(x, count, MPI_FLOAT, y, count, MPI_FLOAT, comm))
    if (IS("allreduce")) LOOP(MPI_Allreduce(x, y, count, MPI_FLOAT, MPI_SUM, comm))
    if (IS("alltoall")) LOOP(MPI_Alltoall(x, count, MPI_FLOAT, y, count, MPI_FLOAT, comm))
    if (IS("barrier")) LOOP(MPI_Barrier(comm))
    if (IS("bcast")) LOOP(MPI_Bcast(x, count, MPI_FLOAT, 0, comm))
    if (IS("gather")) LOOP(MPI_Gather(x, count, MPI_FLOAT, y, count, MPI_FLOAT, 0, comm))
    if (IS("reduce")) LOOP(MPI_Reduce(x, y, count, MPI_FLOAT, MPI_SUM, 0, comm))
    if (IS("scan")) LOOP(MPI_Scan(x, y, count, MPI_FLOAT, MPI_SUM, comm))
    if (IS("scatter")) LOOP(MPI_Scatter(x, count, MPI_FLOAT, y, count, MPI_FLOAT, 0, comm))
    if (IS("sendrecv"))
        LOOP(MPI_Sendrecv(x, count, MPI_FLOAT, above, 0, y, count, MPI_FLOAT, below, 0, comm,
                          MPI_STATUS_IGNORE))
    return -1;
}
