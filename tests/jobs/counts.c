// Preloaded by tests/jobs/test_counts.py: counts what a rank hands to MPI, and calls MPI.
//
// All arguments are integers or pointers, which calling conventions of 64-bit Linux pass in registers or 8 bytes of
// the stack, and so one declaration fits each function in every MPI library: mpi.h is not needed.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>
#include <stdio.h>
#include <string.h>

#define PARAMETERS long a, long b, long c, long d, long e, long f, long g, long h, long i, long j, long k, long l
#define ARGUMENTS a, b, c, d, e, f, g, h, i, j, k, l
typedef long (*mpi_function)(PARAMETERS);

enum how { CALL, PLAIN, VECTOR, TYPES };  // how an argument list says what is sent

// Name, how, places of count, type and communicator, and the place of the destination or root, or -1.
#define FUNCTIONS(X)                                                                                                    \
    X(Send, PLAIN, 1, 2, 5, 3) X(Isend, PLAIN, 1, 2, 5, 3) X(Ssend, PLAIN, 1, 2, 5, 3) X(Issend, PLAIN, 1, 2, 5, 3)     \
    X(Sendrecv, PLAIN, 1, 2, 10, 3) X(Barrier, CALL, 0, 0, 0, -1) X(Ibarrier, CALL, 0, 0, 0, -1)                        \
    X(Bcast, PLAIN, 1, 2, 4, -1) X(Ibcast, PLAIN, 1, 2, 4, -1)                                                          \
    X(Allreduce, PLAIN, 2, 3, 5, -1) X(Iallreduce, PLAIN, 2, 3, 5, -1)                                                  \
    X(Reduce, PLAIN, 2, 3, 6, -1) X(Ireduce, PLAIN, 2, 3, 6, -1)                                                        \
    X(Scan, PLAIN, 2, 3, 5, -1) X(Iscan, PLAIN, 2, 3, 5, -1)                                                            \
    X(Exscan, PLAIN, 2, 3, 5, -1) X(Iexscan, PLAIN, 2, 3, 5, -1)                                                        \
    X(Reduce_scatter_block, PLAIN, 2, 3, 5, -1) X(Ireduce_scatter_block, PLAIN, 2, 3, 5, -1)                            \
    X(Reduce_scatter, CALL, 0, 0, 5, -1) X(Ireduce_scatter, CALL, 0, 0, 5, -1)                                          \
    X(Allgather, PLAIN, 4, 5, 6, -1) X(Iallgather, PLAIN, 4, 5, 6, -1)                                                  \
    X(Allgatherv, PLAIN, 1, 2, 7, -1) X(Iallgatherv, PLAIN, 1, 2, 7, -1)                                                \
    X(Gather, PLAIN, 1, 2, 7, -1) X(Igather, PLAIN, 1, 2, 7, -1)                                                        \
    X(Gatherv, PLAIN, 1, 2, 8, 7) X(Igatherv, PLAIN, 1, 2, 8, 7)                                                        \
    X(Scatter, PLAIN, 4, 5, 7, -1) X(Iscatter, PLAIN, 4, 5, 7, -1)                                                      \
    X(Scatterv, VECTOR, 1, 3, 8, 7) X(Iscatterv, VECTOR, 1, 3, 8, 7)                                                    \
    X(Alltoall, PLAIN, 4, 5, 6, -1) X(Ialltoall, PLAIN, 4, 5, 6, -1)                                                    \
    X(Alltoallv, VECTOR, 1, 3, 8, -1) X(Ialltoallv, VECTOR, 1, 3, 8, -1)                                                \
    X(Alltoallw, TYPES, 1, 3, 8, -1) X(Ialltoallw, TYPES, 1, 3, 8, -1)                                                  \
    X(Neighbor_alltoallw, CALL, 0, 0, 8, -1) X(Ineighbor_alltoallw, CALL, 0, 0, 8, -1)                                  \
    X(Comm_dup, CALL, 0, 0, 0, -1) X(Comm_idup, CALL, 0, 0, 0, -1) X(Comm_split, CALL, 0, 0, 0, -1)                     \
    X(Comm_create, CALL, 0, 0, 0, -1) X(Comm_create_group, CALL, 0, 0, 0, -1) X(Comm_free, CALL, 0, 0, 0, -1)           \
    X(Type_commit, CALL, 0, 0, 0, -1) X(Type_create_struct, CALL, 0, 0, 0, -1) X(Type_contiguous, CALL, 0, 0, 0, -1)

#define NUMBER(name, ...) name##_NUMBER,
enum { FUNCTIONS(NUMBER) FUNCTIONS_COUNT };
#define NAME(name, ...) "MPI_" #name,
static const char *const names[] = {FUNCTIONS(NAME)};

// Calls, bytes that are sent, and messages: those to other ranks, where the arguments name them.
static struct { long calls, bytes, messages; } counted[FUNCTIONS_COUNT];
static int is_counting;

// The communicators of collective functions, each once: MPI libraries set one up with messages in its first collective.
enum { MOST_COMMUNICATORS = 64 };
static long communicators[MOST_COMMUNICATORS];
static int communicators_count;

static void note(const char *name, long comm) {
    if (strncmp(name, "MPI_Comm_", 9) == 0 || strncmp(name, "MPI_Type_", 9) == 0)
        return;
    for (int i = 0; i < communicators_count; i++)
        if (communicators[i] == comm)
            return;
    if (communicators_count < MOST_COMMUNICATORS)
        communicators[communicators_count++] = comm;
}

static int find(struct dl_phdr_info *info, size_t size, void *found) {
    const char **name = found;
    void *library = dlopen(info->dlpi_name, RTLD_LAZY | RTLD_NOLOAD);
    (void)size;
    name[1] = library ? dlsym(library, name[0]) : NULL;
    return name[1] != NULL;
}

// What a loaded library has of this name. MPI is loaded later than this file, and mpi4py keeps its names from other libraries.
static void *symbol(const char *name) {
    const char *found[2] = {name, NULL};
    dl_iterate_phdr(find, found);
    return (void *)found[1];
}

static mpi_function real(const char *name) {
    char full[64];
    snprintf(full, sizeof full, "P%s", name);
    return (mpi_function)symbol(full);
}

static long ask(const char *name, long a, long b) {
    mpi_function function = real(name);
    return function(a, b, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
}

static long size_of(long type) {
    int size = 0;
    ask("MPI_Type_size", type, (long)&size);
    return size;
}

static void count(int number, enum how how, int at_count, int at_type, int at_comm, int at_dest, const long *args) {
    if (!is_counting)
        return;
    if (at_dest < 0)
        note(names[number], args[at_comm]);
    long bytes = 0, messages = 0;
    int rank = -1, ranks = 0;
    if (at_dest >= 0 || how == VECTOR || how == TYPES) {
        ask("MPI_Comm_rank", args[at_comm], (long)&rank);
        ask("MPI_Comm_size", args[at_comm], (long)&ranks);
    }
    if (how == PLAIN) {
        int dest = at_dest < 0 ? -1 : (int)args[at_dest];
        messages = dest >= 0 && dest != rank;
        bytes = at_dest < 0 || messages ? (int)args[at_count] * size_of(args[at_type]) : 0;
    } else if ((how == VECTOR || how == TYPES) && (at_dest < 0 || (int)args[at_dest] == rank)) {
        const int *counts = (const int *)args[at_count];
        int has_pointers = symbol("ompi_mpi_byte") != NULL;  // Open MPI's handles are pointers, MPICH's are numbers
        for (int peer = 0; peer < ranks; peer++) {
            if (counts[peer] == 0 || peer == rank)
                continue;
            const char *types = (const char *)args[at_type];
            long type = how == VECTOR ? args[at_type] : has_pointers ? ((long *)types)[peer] : ((int *)types)[peer];
            bytes += counts[peer] * size_of(type);
            messages++;
        }
    }
    __atomic_fetch_add(&counted[number].calls, 1, __ATOMIC_RELAXED);
    __atomic_fetch_add(&counted[number].bytes, bytes, __ATOMIC_RELAXED);
    __atomic_fetch_add(&counted[number].messages, messages, __ATOMIC_RELAXED);
}

#define DEFINE(name, how, at_count, at_type, at_comm, at_dest)                                                          \
    long MPI_##name(PARAMETERS) {                                                                                       \
        static mpi_function function;                                                                                   \
        const long args[] = {ARGUMENTS};                                                                                \
        if (function == NULL)                                                                                           \
            function = real("MPI_" #name);                                                                              \
        count(name##_NUMBER, how, at_count, at_type, at_comm, at_dest, args);                                           \
        return function(ARGUMENTS);                                                                                     \
    }
FUNCTIONS(DEFINE)

void counts_begin(void) {
    memset(counted, 0, sizeof counted);
    communicators_count = 0;
    is_counting = 1;
}

int counts_communicators(void) { return communicators_count; }

// A line for each function that has been called: name, calls, bytes, messages.
const char *counts_end(void) {
    static char text[64 * FUNCTIONS_COUNT];
    char *at = text;
    is_counting = 0;
    *at = '\0';
    for (int n = 0; n < FUNCTIONS_COUNT; n++)
        if (counted[n].calls)
            at += sprintf(at, "%s %ld %ld %ld\n", names[n], counted[n].calls, counted[n].bytes, counted[n].messages);
    return text;
}
