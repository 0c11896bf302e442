/* What mpi.h says in macros that bindgen cannot translate. */
#include <mpi.h>

#define STRING_(x) #x
#define STRING(x) STRING_(x)

void *const mpi4jax_in_place = MPI_IN_PLACE;

#if defined(OMPI_MAJOR_VERSION)
const char *const mpi4jax_vendor = "Open MPI";
const char *const mpi4jax_version =
    STRING(OMPI_MAJOR_VERSION) "." STRING(OMPI_MINOR_VERSION) "." STRING(OMPI_RELEASE_VERSION);
#elif defined(I_MPI_VERSION)
const char *const mpi4jax_vendor = "Intel MPI";
const char *const mpi4jax_version = I_MPI_VERSION;
#elif defined(MPICH_VERSION)
const char *const mpi4jax_vendor = "MPICH";
const char *const mpi4jax_version = MPICH_VERSION;
#elif defined(MPI_ABI_VERSION)
const char *const mpi4jax_vendor = "MPI ABI";
const char *const mpi4jax_version = STRING(MPI_ABI_VERSION) "." STRING(MPI_ABI_SUBVERSION);
#else
const char *const mpi4jax_vendor = "unknown";
const char *const mpi4jax_version = STRING(MPI_VERSION) "." STRING(MPI_SUBVERSION);
#endif

/* Weak: an MPI without the extension loads all the same, and -1 says that it cannot tell. */
extern int MPIX_Query_cuda_support(void) __attribute__((weak));
extern int MPIX_Query_rocm_support(void) __attribute__((weak));

int mpi4jax_query_gpu_support(int rocm) {
#ifdef MPICH_VERSION
    /* MPICH 3, which is MPI 3, has it and ends the job when it is called. */
    int version = 0, subversion = 0;
    MPI_Get_version(&version, &subversion);
    if (version < 4)
        return -1;
#endif
    if (rocm)
        return MPIX_Query_rocm_support ? MPIX_Query_rocm_support() : -1;
    return MPIX_Query_cuda_support ? MPIX_Query_cuda_support() : -1;
}

#ifdef OMPI_MAJOR_VERSION
extern int ompi_comm_create_group(MPI_Comm, MPI_Group, int, MPI_Comm *) __attribute__((weak));
#endif

/* MPI_Comm_create_group, with messages that no receive of the program matches.
 *
 * Open MPI (4 and 5) sends these messages on the parent communicator with the caller's tag, and a receive from any source with
 * any tag takes them. Its collectives use negative tags, which MPI_ANY_TAG does not match. MPI_Comm_create_group refuses such a
 * tag; the function behind it does not. The tag is none of Open MPI's own, and has 24 bits, as UCX needs. */
int mpi4jax_create_group(MPI_Comm comm, MPI_Group group, int tag, MPI_Comm *made) {
#ifdef OMPI_MAJOR_VERSION
    if (ompi_comm_create_group)
        return ompi_comm_create_group(comm, group, -7172202, made) ? MPI_ERR_COMM : MPI_SUCCESS;
#endif
    return MPI_Comm_create_group(comm, group, tag, made);
}

/* How many neighbours a rank has in the topology of a communicator; 0 if that has none. */
int mpi4jax_neighbours(MPI_Comm comm) {
    int kind = MPI_UNDEFINED, rank = 0, in = 0, out = 0, weighted = 0;
    MPI_Topo_test(comm, &kind);
    if (kind == MPI_CART) {
        MPI_Cartdim_get(comm, &in);
        return 2 * in;
    }
    if (kind == MPI_GRAPH) {
        MPI_Comm_rank(comm, &rank);
        MPI_Graph_neighbors_count(comm, rank, &in);
    } else if (kind == MPI_DIST_GRAPH) {
        MPI_Dist_graph_neighbors_count(comm, &in, &out, &weighted);
    }
    return in > out ? in : out;
}
