/* What the other contenders are measured against: each operation in a plain loop. And what LogGP is made of. */

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

/* Seconds from the first of a train of messages from rank 0 to rank 1, `delay` seconds of work after each, to
 * the end of the one message that answers it; the least of `rounds`. Hoefler, Lichei, Rehm, "Low-Overhead LogGP
 * Parameter Assessment for Modern Interconnection Networks", IPDPS 2007, call it PRTT(n, d, s). */
double train(const MPI_Comm *address, int messages, double delay, int bytes, int rounds) {
    MPI_Comm comm = *address;
    int rank;
    double best = 1e9;
    MPI_Comm_rank(comm, &rank);
    if (rank > 1) return 0;
    if (reserve((size_t)bytes)) return -1;
    for (int round = -2; round < rounds; round++) {
        const double begin = MPI_Wtime();
        if (rank == 0) {
            for (int k = 0; k < messages; k++) {
                MPI_Send(buffers[0], bytes, MPI_BYTE, 1, 0, comm);
                const double sent = MPI_Wtime();
                while (k + 1 < messages && MPI_Wtime() < sent + delay) { }
            }
            MPI_Recv(buffers[1], bytes, MPI_BYTE, 1, 0, comm, MPI_STATUS_IGNORE);
        } else {
            for (int k = 0; k < messages; k++)
                MPI_Recv(buffers[1], bytes, MPI_BYTE, 0, 0, comm, MPI_STATUS_IGNORE);
            MPI_Send(buffers[0], bytes, MPI_BYTE, 0, 0, comm);
        }
        const double time = MPI_Wtime() - begin;
        if (round >= 0 && time < best) best = time;
    }
    return best;
}

/* Seconds to add `bytes` of floats to others; the least of `rounds`. */
double add(int bytes, int rounds) {
    double best = 1e9;
    if (reserve((size_t)bytes)) return -1;
    for (int round = 0; round < rounds; round++) {
        const double begin = MPI_Wtime();
        MPI_Reduce_local(buffers[0], buffers[1], bytes / 4, MPI_FLOAT, MPI_SUM);
        const double time = MPI_Wtime() - begin;
        if (time < best) best = time;
    }
    return best;
}
