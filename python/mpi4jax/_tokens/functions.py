"""The functions of :mod:`mpi4jax` with tokens, each made of the one without tokens.

Every public name of this module is one of them, or a nonblocking operation, which has no token.
"""

from .. import ops as _ops
from .._functions import (
    assert_equal as _assert_equal,
    halo_add as _halo_add,
    maxloc as _maxloc,
    neighbours as _neighbours,
    with_status as _with_status,
)
from .._numerics import blocks as _blocks
from .tokens import with_token as _with_token

allgather = _with_token(_ops.allgather)
iallgather = _ops.iallgather
allgatherv = _with_token(_ops.allgatherv)
iallgatherv = _ops.iallgatherv
allreduce = _with_token(_ops.allreduce)
iallreduce = _ops.iallreduce
alltoall = _with_token(_ops.alltoall)
ialltoall = _ops.ialltoall
alltoallv = _with_token(_ops.alltoallv)
ialltoallv = _ops.ialltoallv
barrier = _with_token(_ops.barrier)
ibarrier = _ops.ibarrier
bcast = _with_token(_ops.bcast)
ibcast = _ops.ibcast
exscan = _with_token(_ops.exscan)
iexscan = _ops.iexscan
gather = _with_token(_ops.gather)
igather = _ops.igather
gatherv = _with_token(_ops.gatherv)
igatherv = _ops.igatherv
halo_exchange = _with_token(_ops.halo_exchange)
ihalo_exchange = _ops.ihalo_exchange
permute = _with_token(_ops.permute)
ipermute = _ops.ipermute
ragged_alltoall = _with_token(_ops.ragged_alltoall)
iragged_alltoall = _ops.iragged_alltoall
recv = _with_token(_ops.recv)
irecv = _ops.irecv
reduce = _with_token(_ops.reduce)
ireduce = _ops.ireduce
reduce_scatter = _with_token(_ops.reduce_scatter)
ireduce_scatter = _ops.ireduce_scatter
reduce_scatterv = _with_token(_ops.reduce_scatterv)
ireduce_scatterv = _ops.ireduce_scatterv
scan = _with_token(_ops.scan)
iscan = _ops.iscan
scatter = _with_token(_ops.scatter)
iscatter = _ops.iscatter
scatterv = _with_token(_ops.scatterv)
iscatterv = _ops.iscatterv
send = _with_token(_ops.send)
isend = _ops.isend
sendrecv = _with_token(_ops.sendrecv)
isendrecv = _ops.isendrecv

maxloc = _with_token(_maxloc.maxloc)
minloc = _with_token(_maxloc.minloc)
assert_equal = _with_token(_assert_equal.assert_equal)
gather_blocks = _with_token(_blocks.gather_blocks)
halo_add = _with_token(_halo_add.halo_add)
neighbor_allgather = _with_token(_neighbours.neighbor_allgather)
neighbor_alltoall = _with_token(_neighbours.neighbor_alltoall)
recv_with_status = _with_token(_with_status.recv_with_status)
scatter_blocks = _with_token(_blocks.scatter_blocks)
sendrecv_with_status = _with_token(_with_status.sendrecv_with_status)
