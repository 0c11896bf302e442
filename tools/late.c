// Preloaded by the runner of tests if MPI4JAX_TEST_DELAYS=RANK:SEED[:LONGEST[:TOTAL]] is set: this rank of each job sleeps
// for a random time before some of its calls of MPI, and before some of what it prints, up to LONGEST milliseconds at once
// and TOTAL seconds in all. A test whose result depends on which rank is faster then fails.
//
// As in tests/jobs/counts.c, one declaration fits each function in every MPI library, and mpi.h is not needed.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define PARAMETERS long a, long b, long c, long d, long e, long f, long g, long h, long i, long j, long k, long l
#define ARGUMENTS a, b, c, d, e, f, g, h, i, j, k, l
typedef long (*mpi_function)(PARAMETERS);

// Functions that wait for other ranks, or for which other ranks wait.
#define FUNCTIONS(X)                                                                                                    \
    X(Send) X(Isend) X(Ssend) X(Issend) X(Recv) X(Irecv) X(Mrecv) X(Imrecv) X(Mprobe) X(Sendrecv) X(Wait) X(Waitall)    \
    X(Barrier) X(Ibarrier) X(Bcast) X(Ibcast) X(Allreduce) X(Iallreduce) X(Reduce) X(Ireduce) X(Scan) X(Iscan)          \
    X(Exscan) X(Iexscan) X(Reduce_scatter) X(Ireduce_scatter) X(Reduce_scatter_block) X(Ireduce_scatter_block)          \
    X(Allgather) X(Iallgather) X(Allgatherv) X(Iallgatherv) X(Gather) X(Igather) X(Gatherv) X(Igatherv)                 \
    X(Scatter) X(Iscatter) X(Scatterv) X(Iscatterv) X(Alltoall) X(Ialltoall) X(Alltoallv) X(Ialltoallv)                 \
    X(Alltoallw) X(Ialltoallw) X(Neighbor_alltoallw) X(Ineighbor_alltoallw) X(Comm_dup) X(Comm_idup) X(Comm_split)      \
    X(Comm_create) X(Comm_create_group) X(Comm_free) X(Finalize) X(Abort)

enum { SHORT = 50, LONGEST = 2500, TOTAL = 10 };  // milliseconds, and the last one seconds

// What a process may still sleep, in milliseconds: nothing, if it is not the rank that is late.
struct delays {
    unsigned seed;
    int longest, left;
};

static struct delays read_delays(void) {
    struct delays delays = {0, LONGEST, 0};
    const char *setting = getenv("MPI4JAX_TEST_DELAYS"), *rank = getenv("OMPI_COMM_WORLD_RANK");
    int late = -1, total = TOTAL;
    if (rank == NULL)
        rank = getenv("PMI_RANK");
    if (setting && rank && sscanf(setting, "%d:%u:%d:%d", &late, &delays.seed, &delays.longest, &total) > 0 &&
        late == atoi(rank))
        delays.left = 1000 * total;
    return delays;
}

// Sleeps in about one of `often` calls, in one of four of these for long.
static void delay(int often) {
    static struct delays delays;
    static int process;
    if (process != getpid()) {  // a rank of a test may be forked, and gets its variables after that
        process = getpid();
        delays = read_delays();
    }
    if (delays.left <= 0 || rand_r(&delays.seed) % often != 0)
        return;
    int most = rand_r(&delays.seed) % 4 == 0 ? delays.longest : SHORT;
    int wait = rand_r(&delays.seed) % (most + 1);
    delays.left -= wait;
    struct timespec time = {wait / 1000, wait % 1000 * 1000000L};
    nanosleep(&time, NULL);
}

static int find(struct dl_phdr_info *info, size_t size, void *found) {
    const char **name = found;
    void *library = dlopen(info->dlpi_name, RTLD_LAZY | RTLD_NOLOAD);
    (void)size;
    name[1] = library ? dlsym(library, name[0]) : NULL;
    return name[1] != NULL;
}

// MPI is loaded later than this file, and mpi4py keeps its names from other libraries.
static mpi_function real(const char *name) {
    const char *found[2] = {name, NULL};
    dl_iterate_phdr(find, found);
    return (mpi_function)found[1];
}

#define WRAP(name)                                                                                                      \
    long MPI_##name(PARAMETERS) {                                                                                       \
        static mpi_function function;                                                                                   \
        if (!function)                                                                                                  \
            function = real("PMPI_" #name);                                                                             \
        delay(4);                                                                                                       \
        return function(ARGUMENTS);                                                                                     \
    }
FUNCTIONS(WRAP)

static void before_output(int file) {
    if (file == STDOUT_FILENO || file == STDERR_FILENO)
        delay(2);
}

ssize_t write(int file, const void *bytes, size_t size) {
    static ssize_t (*function)(int, const void *, size_t);
    if (!function)
        function = (ssize_t(*)(int, const void *, size_t))dlsym(RTLD_NEXT, "write");
    before_output(file);
    return function(file, bytes, size);
}

ssize_t writev(int file, const struct iovec *parts, int count) {
    static ssize_t (*function)(int, const struct iovec *, int);
    if (!function)
        function = (ssize_t(*)(int, const struct iovec *, int))dlsym(RTLD_NEXT, "writev");
    before_output(file);
    return function(file, parts, count);
}
