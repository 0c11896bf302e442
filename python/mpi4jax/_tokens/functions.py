"""The functions of :mod:`mpi4jax` that take and return tokens, each made of the one without."""

from .. import ops
from .._functions import assert_equal as _assert_equal, neighbours
from .._numerics import blocks
from .tokens import with_token

allgather = with_token(ops.allgather)
allgatherv = with_token(ops.allgatherv)
allreduce = with_token(ops.allreduce)
alltoall = with_token(ops.alltoall)
alltoallv = with_token(ops.alltoallv)
barrier = with_token(ops.barrier)
bcast = with_token(ops.bcast)
exscan = with_token(ops.exscan)
gather = with_token(ops.gather)
gatherv = with_token(ops.gatherv)
halo_exchange = with_token(ops.halo_exchange)
permute = with_token(ops.permute)
ragged_alltoall = with_token(ops.ragged_alltoall)
recv = with_token(ops.recv)
reduce = with_token(ops.reduce)
reduce_scatter = with_token(ops.reduce_scatter)
reduce_scatterv = with_token(ops.reduce_scatterv)
scan = with_token(ops.scan)
scatter = with_token(ops.scatter)
scatterv = with_token(ops.scatterv)
send = with_token(ops.send)
sendrecv = with_token(ops.sendrecv)

assert_equal = with_token(_assert_equal.assert_equal)
gather_blocks = with_token(blocks.gather_blocks)
neighbor_allgather = with_token(neighbours.neighbor_allgather)
neighbor_alltoall = with_token(neighbours.neighbor_alltoall)
scatter_blocks = with_token(blocks.scatter_blocks)

# Written out: a type checker does not find the names of another module's list here.
__all__ = [
    "allgather",
    "allgatherv",
    "allreduce",
    "alltoall",
    "alltoallv",
    "assert_equal",
    "barrier",
    "bcast",
    "exscan",
    "gather",
    "gather_blocks",
    "gatherv",
    "halo_exchange",
    "neighbor_allgather",
    "neighbor_alltoall",
    "permute",
    "ragged_alltoall",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatterv",
    "scan",
    "scatter",
    "scatter_blocks",
    "scatterv",
    "send",
    "sendrecv",
]
