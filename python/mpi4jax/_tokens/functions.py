"""The functions of :mod:`mpi4jax` with tokens, each made of the one without tokens.

Every public name of this module is one of them.
"""

from .. import ops as _ops
from .._functions import (
    argmax as _argmax,
    assert_equal as _assert_equal,
    halo_add as _halo_add,
    neighbours as _neighbours,
    with_status as _with_status,
)
from .._numerics import blocks as _blocks
from .tokens import with_token as _with_token

allgather = _with_token(_ops.allgather)
allgatherv = _with_token(_ops.allgatherv)
allreduce = _with_token(_ops.allreduce)
alltoall = _with_token(_ops.alltoall)
alltoallv = _with_token(_ops.alltoallv)
barrier = _with_token(_ops.barrier)
bcast = _with_token(_ops.bcast)
exscan = _with_token(_ops.exscan)
gather = _with_token(_ops.gather)
gatherv = _with_token(_ops.gatherv)
halo_exchange = _with_token(_ops.halo_exchange)
permute = _with_token(_ops.permute)
ragged_alltoall = _with_token(_ops.ragged_alltoall)
recv = _with_token(_ops.recv)
reduce = _with_token(_ops.reduce)
reduce_scatter = _with_token(_ops.reduce_scatter)
reduce_scatterv = _with_token(_ops.reduce_scatterv)
scan = _with_token(_ops.scan)
scatter = _with_token(_ops.scatter)
scatterv = _with_token(_ops.scatterv)
send = _with_token(_ops.send)
sendrecv = _with_token(_ops.sendrecv)

argmax = _with_token(_argmax.argmax)
argmin = _with_token(_argmax.argmin)
assert_equal = _with_token(_assert_equal.assert_equal)
gather_blocks = _with_token(_blocks.gather_blocks)
halo_add = _with_token(_halo_add.halo_add)
neighbor_allgather = _with_token(_neighbours.neighbor_allgather)
neighbor_alltoall = _with_token(_neighbours.neighbor_alltoall)
recv_with_status = _with_token(_with_status.recv_with_status)
scatter_blocks = _with_token(_blocks.scatter_blocks)
sendrecv_with_status = _with_token(_with_status.sendrecv_with_status)
