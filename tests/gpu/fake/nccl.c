/* A libnccl.so.2 on host memory and MPI, for tests/gpu/fake/cuda.c. FAKE_NCCL_VERSION, FAKE_NCCL_NAMELESS
 * (ncclGetUniqueId fails), FAKE_NCCL_BROKEN (ncclCommInitRank fails) and FAKE_NCCL_ASYNC_ERROR (after so many
 * operations) set the scene;
 * FAKE_NCCL_LOG names a file to which the numbers of operations and of their groups are written at exit. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <mpi.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct { char internal[128]; } UniqueId;
enum { INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16 };
static const size_t SIZES[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
enum { SUM, PROD, MAX, MIN };

enum { GROUP = 64 };
static long operations, groups, communicators;

static int number(const char *name) {
    const char *text = getenv(name);
    return text ? atoi(text) : 0;
}

static void report(void) {
    const char *path = getenv("FAKE_NCCL_LOG");
    FILE *file = path ? fopen(path, "a") : NULL;
    if (file) {
        fprintf(file, "operations %ld groups %ld\ncommunicators %ld\n", operations, groups, communicators);
        fclose(file);
    }
}

int ncclGetVersion(int *version) {
    int set = number("FAKE_NCCL_VERSION");
    *version = set ? set : 22800;
    return 0;
}
const char *ncclGetErrorString(int code) { return code ? "unhandled fake error" : "no error"; }
const char *ncclGetLastError(void *comm) { return ""; }

/* Who to ask, and a number of the communicator. */
int ncclGetUniqueId(UniqueId *id) {
    static int made;
    int words[2];
    if (getenv("FAKE_NCCL_NAMELESS"))
        return 2;
    MPI_Comm_rank(MPI_COMM_WORLD, &words[0]);
    words[1] = 1000 + made++;
    memset(id, 0, sizeof *id);
    memcpy(id->internal, words, sizeof words);
    return 0;
}

int ncclCommInitRank(void **result, int size, UniqueId id, int rank) {
    static int first = 1;
    int broken = number("FAKE_NCCL_BROKEN");
    if (first)
        atexit(report), first = 0;
    int words[2], me, *world = calloc(size, sizeof *world);
    memcpy(words, id.internal, sizeof words);
    MPI_Comm_rank(MPI_COMM_WORLD, &me);
    int mine[2] = {rank, me};
    if (rank != 0) {
        MPI_Send(mine, 2, MPI_INT, words[0], words[1], MPI_COMM_WORLD);
        MPI_Recv(world, size, MPI_INT, words[0], words[1], MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    } else {
        world[0] = me;
        for (int i = 1; i < size; i++) {
            int other[2];
            MPI_Recv(other, 2, MPI_INT, MPI_ANY_SOURCE, words[1], MPI_COMM_WORLD, MPI_STATUS_IGNORE);
            world[other[0]] = other[1];
        }
        for (int i = 1; i < size; i++)
            MPI_Send(world, size, MPI_INT, world[i], words[1], MPI_COMM_WORLD);
    }
    MPI_Group all, group;
    MPI_Comm *comm = malloc(sizeof *comm);
    MPI_Comm_group(MPI_COMM_WORLD, &all);
    MPI_Group_incl(all, size, world, &group);
    MPI_Comm_create_group(MPI_COMM_WORLD, group, words[1], comm);
    MPI_Group_free(&group);
    MPI_Group_free(&all);
    free(world);
    communicators++;
    *result = comm;
    return broken ? 2 : 0;
}
int ncclCommDestroy(void *comm) {
    MPI_Comm_free(comm);
    free(comm);
    communicators--;
    return 0;
}
int ncclCommAbort(void *comm) { return ncclCommDestroy(comm); }

int ncclCommGetAsyncError(void *comm, int *code) {
    int after = number("FAKE_NCCL_ASYNC_ERROR");
    *code = after && operations >= after ? 3 : 0;
    return 0;
}

static double value(const char *data, size_t i, int type) {
    uint32_t bits;
    float single;
    switch (type) {
    case FLOAT16: return (double)((_Float16 *)data)[i];
    case FLOAT32: return ((float *)data)[i];
    case FLOAT64: return ((double *)data)[i];
    default:
        bits = (uint32_t)((uint16_t *)data)[i] << 16;
        memcpy(&single, &bits, 4);
        return single;
    }
}

static void store(char *data, size_t i, int type, double x) {
    uint32_t bits;
    float single = (float)x;
    switch (type) {
    case FLOAT16: ((_Float16 *)data)[i] = (_Float16)single; break;
    case FLOAT32: ((float *)data)[i] = single; break;
    case FLOAT64: ((double *)data)[i] = x; break;
    default:
        memcpy(&bits, &single, 4);
        bits += 0x7fff + (bits >> 16 & 1);
        ((uint16_t *)data)[i] = (uint16_t)(bits >> 16);
    }
}

#define FOLD(a, b) (op == SUM ? (a) + (b) : op == PROD ? (a) * (b) : op == MAX ? ((a) > (b) ? (a) : (b)) : ((a) < (b) ? (a) : (b)))

/* Of integers up to 64 bits, modulo 2 to the power of their bits. */
static int64_t integer(const char *data, size_t i, int type) {
    switch (type) {
    case INT8: return ((int8_t *)data)[i];
    case UINT8: return ((uint8_t *)data)[i];
    case INT32: return ((int32_t *)data)[i];
    case UINT32: return ((uint32_t *)data)[i];
    default: return ((int64_t *)data)[i];
    }
}

static void reduce(const char *all, char *to, size_t n, int ranks, int type, int op) {
    size_t block = n * SIZES[type];
    for (size_t i = 0; i < n; i++) {
        if (type <= UINT64) {
            uint64_t x = integer(all, i, type);
            for (int r = 1; r < ranks; r++) {
                uint64_t y = integer(all + r * block, i, type);
                x = op == SUM ? x + y : op == PROD ? x * y
                    : ((type == UINT64 ? x > y : (int64_t)x > (int64_t)y) == (op == MAX)) ? x : y;
            }
            memcpy(to + i * SIZES[type], &x, SIZES[type]); /* the lower bytes */
        } else {
            double x = value(all, i, type);
            for (int r = 1; r < ranks; r++) {
                double y = value(all + r * block, i, type);
                x = FOLD(x, y);
                if (type == FLOAT32) /* one rounding per step, as the others do */
                    x = (float)x;
            }
            store(to, i, type, x);
        }
    }
}

/* What a call puts on a stream. It runs at once, after the copies that were queued on cuda.c's stream before it. */
typedef struct { const void *from; void *to; size_t n; int type, op, peer; MPI_Comm comm; int receives; } Part;

static __thread int depth, count;
static __thread Part group[GROUP];
static __thread void *group_stream;

static int put(void (*what)(Part *, int), Part *parts, int count, void *stream) {
    static void (*drain)(void);
    if (!drain) {
        const char *hip = getenv("MPI4JAX_LIBHIP");
        void *driver = dlopen(hip && *hip ? hip : getenv("MPI4JAX_LIBCUDA"), RTLD_NOW | RTLD_NOLOAD);
        drain = dlsym(driver, "fake_drain");
    }
    operations += count;
    groups++;
    drain();
    what(parts, count);
    return 0;
}

static void reduces(Part *part, int count) {
    int rank, ranks, bytes = (int)(part->n * SIZES[part->type]);
    MPI_Comm_rank(part->comm, &rank);
    MPI_Comm_size(part->comm, &ranks);
    char *all = malloc((size_t)bytes * ranks + 1);
    MPI_Allgather(part->from, bytes, MPI_BYTE, all, bytes, MPI_BYTE, part->comm);
    if (part->peer < 0 || part->peer == rank)
        reduce(all, part->to, part->n, ranks, part->type, part->op);
    free(all);
}
static void reduces_and_scatters(Part *part, int count) {
    int rank, ranks, bytes = (int)(part->n * SIZES[part->type]);
    MPI_Comm_rank(part->comm, &rank);
    MPI_Comm_size(part->comm, &ranks);
    char *mine = malloc((size_t)bytes * ranks + 1);
    MPI_Alltoall(part->from, bytes, MPI_BYTE, mine, bytes, MPI_BYTE, part->comm);
    reduce(mine, part->to, part->n, ranks, part->type, part->op);
    free(mine);
}
static void broadcasts(Part *part, int count) { MPI_Bcast(part->to, (int)part->n, MPI_BYTE, part->peer, part->comm); }
static void gathers(Part *part, int count) {
    MPI_Allgather(part->from, (int)part->n, MPI_BYTE, part->to, (int)part->n, MPI_BYTE, part->comm);
}
static void exchanges(Part *parts, int count) {
    MPI_Request requests[GROUP];
    for (int i = 0; i < count; i++)
        if (parts[i].receives)
            MPI_Irecv(parts[i].to, (int)parts[i].n, MPI_BYTE, parts[i].peer, 1, parts[i].comm, &requests[i]);
        else
            MPI_Isend(parts[i].from, (int)parts[i].n, MPI_BYTE, parts[i].peer, 1, parts[i].comm, &requests[i]);
    MPI_Waitall(count, requests, MPI_STATUSES_IGNORE);
}

int ncclReduce(const void *from, void *to, size_t n, int type, int op, int root, void *comm, void *stream) {
    Part part = {from, to, n, type, op, root, *(MPI_Comm *)comm};
    return put(reduces, &part, 1, stream);
}
int ncclAllReduce(const void *from, void *to, size_t n, int type, int op, void *comm, void *stream) {
    return ncclReduce(from, to, n, type, op, -1, comm, stream);
}
int ncclReduceScatter(const void *from, void *to, size_t n, int type, int op, void *comm, void *stream) {
    Part part = {from, to, n, type, op, -1, *(MPI_Comm *)comm};
    return put(reduces_and_scatters, &part, 1, stream);
}
int ncclBroadcast(const void *from, void *to, size_t n, int type, int root, void *comm, void *stream) {
    Part part = {from, to, n * SIZES[type], type, 0, root, *(MPI_Comm *)comm};
    return put(broadcasts, &part, 1, stream);
}
int ncclAllGather(const void *from, void *to, size_t n, int type, void *comm, void *stream) {
    Part part = {from, to, n * SIZES[type], type, 0, 0, *(MPI_Comm *)comm};
    return put(gathers, &part, 1, stream);
}

int ncclGroupStart(void) { depth++; return 0; }
int ncclGroupEnd(void) {
    if (--depth > 0)
        return 0;
    int n = count;
    count = 0;
    return n ? put(exchanges, group, n, group_stream) : 0;
}
static int message(Part part, void *stream) {
    group[count++] = part;
    group_stream = stream;
    if (depth)
        return 0;
    depth = 1;
    return ncclGroupEnd();
}
int ncclSend(const void *from, size_t n, int type, int peer, void *comm, void *stream) {
    return message((Part){from, NULL, n * SIZES[type], type, 0, peer, *(MPI_Comm *)comm}, stream);
}
int ncclRecv(void *to, size_t n, int type, int peer, void *comm, void *stream) {
    return message((Part){NULL, to, n * SIZES[type], type, 0, peer, *(MPI_Comm *)comm, 1}, stream);
}
