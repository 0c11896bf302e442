"""Nonblocking operations, and the functions that take their requests.

Every public name of this module is one of them.
"""

from .. import ops as _ops
from .._requests.request import Request as Request
from .._requests.wait import after as after, wait as wait, waitall as waitall
from . import neighbours as _neighbours
from .nonblocking import nonblocking as _nonblocking

iallgather = _nonblocking(_ops.allgather)
iallgatherv = _nonblocking(_ops.allgatherv)
iallreduce = _nonblocking(_ops.allreduce)
ialltoall = _nonblocking(_ops.alltoall)
ialltoallv = _nonblocking(_ops.alltoallv)
ibarrier = _nonblocking(_ops.barrier)
ibcast = _nonblocking(_ops.bcast)
iexscan = _nonblocking(_ops.exscan)
igather = _nonblocking(_ops.gather)
igatherv = _nonblocking(_ops.gatherv)
ihalo_exchange = _nonblocking(_ops.halo_exchange)
ineighbor_allgather = _nonblocking(_neighbours.neighbor_allgather)
ineighbor_alltoall = _nonblocking(_neighbours.neighbor_alltoall)
ipermute = _nonblocking(_ops.permute)
iragged_alltoall = _nonblocking(_ops.ragged_alltoall)
irecv = _nonblocking(_ops.recv)
ireduce = _nonblocking(_ops.reduce)
ireduce_scatter = _nonblocking(_ops.reduce_scatter)
ireduce_scatterv = _nonblocking(_ops.reduce_scatterv)
iscan = _nonblocking(_ops.scan)
iscatter = _nonblocking(_ops.scatter)
iscatterv = _nonblocking(_ops.scatterv)
isend = _nonblocking(_ops.send)
isendrecv = _nonblocking(_ops.sendrecv)
