"""The cheat sheet's cells: of each operation JAX's name, the shapes, and the gradient.

`S` is any shape, `n` the size of the communicator, `r` this rank. A test evaluates the shapes.
"""

from typing import NamedTuple


class Cheat(NamedTuple):
    jax: str
    operand: str
    result: str
    gradient: str


CHEATS = {
    "allgather": Cheat("all_gather", "S", "(n, *S)", "row `r`"),
    "allgatherv": Cheat("", "(counts[r], *S)", "(sum(counts), *S)", "rows of this rank"),
    "allreduce": Cheat("psum", "S", "S", "SUM: identity; MEAN, PROD, MAX, MIN too"),
    "alltoall": Cheat("all_to_all", "(n, *S)", "(n, *S)", "`alltoall`"),
    "alltoallv": Cheat("", "(sum(send_counts), *S)", "(sum(recv_counts), *S)", "rows go back"),
    "barrier": Cheat("", "", "", "`barrier`"),
    "bcast": Cheat("", "S", "S", "cotangent on the root, zeros elsewhere"),
    "exscan": Cheat("", "S", "S", "SUM: sum over the ranks behind"),
    "gather": Cheat("", "S", "(n, *S) on the root, S elsewhere", "`scatter`"),
    "gatherv": Cheat(
        "", "(counts[r], *S)", "(sum(counts), *S) on the root, unchanged elsewhere", "`scatterv`"
    ),
    "halo_exchange": Cheat("", "S", "S", "ghost cells add to their originals (`halo_add`)"),
    "permute": Cheat("ppermute", "S", "S", "the pairs reversed"),
    "ragged_alltoall": Cheat("ragged_all_to_all", "(rows, *S)", "(capacity, *S)", "rows go back"),
    "recv": Cheat("", "S", "S", "is sent back"),
    "reduce": Cheat("", "S", "S", "SUM: `bcast`"),
    "reduce_scatter": Cheat("psum_scatter", "(n, *S)", "S", "SUM: `allgather`"),
    "reduce_scatterv": Cheat("", "(sum(counts), *S)", "(counts[r], *S)", "SUM: `allgatherv`"),
    "scan": Cheat("", "S", "S", "SUM: sum over this rank and those behind"),
    "scatter": Cheat("", "(n, *S) on the root, S elsewhere", "S", "`gather`"),
    "scatterv": Cheat(
        "",
        "(sum(counts), *S) on the root, (counts[r], *S) elsewhere",
        "(counts[r], *S)",
        "`gatherv`",
    ),
    "send": Cheat("", "S", "", "is received"),
    "sendrecv": Cheat("ppermute", "S", "S", "sent the other way"),
}
