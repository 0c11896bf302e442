"""The operations, one file each.

Each takes and returns arrays or pytrees of arrays, blocks no Python (like every JAX operation),
and happens exactly once per execution, in program order, also if its results are unused.

This is the one list of them: a public name of this module is an operation, or its nonblocking
form.
"""

from .._op.operation import OPERATIONS as _OPERATIONS
from .._requests.nonblocking import nonblocking as _nonblocking
from .allgather import allgather as allgather
from .allgatherv import allgatherv as allgatherv
from .allreduce import allreduce as allreduce
from .alltoall import alltoall as alltoall
from .alltoallv import alltoallv as alltoallv
from .barrier import barrier as barrier
from .bcast import bcast as bcast
from .exscan import exscan as exscan
from .gather import gather as gather
from .gatherv import gatherv as gatherv
from .halo_exchange import halo_exchange as halo_exchange
from .permute import permute as permute
from .ragged_alltoall import ragged_alltoall as ragged_alltoall
from .recv import recv as recv
from .reduce import reduce as reduce
from .reduce_scatter import reduce_scatter as reduce_scatter
from .reduce_scatterv import reduce_scatterv as reduce_scatterv
from .scan import scan as scan
from .scatter import scatter as scatter
from .scatterv import scatterv as scatterv
from .send import send as send
from .sendrecv import sendrecv as sendrecv

iallgather = _nonblocking(allgather)
iallgatherv = _nonblocking(allgatherv)
iallreduce = _nonblocking(allreduce)
ialltoall = _nonblocking(alltoall)
ialltoallv = _nonblocking(alltoallv)
ibarrier = _nonblocking(barrier)
ibcast = _nonblocking(bcast)
iexscan = _nonblocking(exscan)
igather = _nonblocking(gather)
igatherv = _nonblocking(gatherv)
ihalo_exchange = _nonblocking(halo_exchange)
ipermute = _nonblocking(permute)
iragged_alltoall = _nonblocking(ragged_alltoall)
irecv = _nonblocking(recv)
ireduce = _nonblocking(reduce)
ireduce_scatter = _nonblocking(reduce_scatter)
ireduce_scatterv = _nonblocking(reduce_scatterv)
iscan = _nonblocking(scan)
iscatter = _nonblocking(scatter)
iscatterv = _nonblocking(scatterv)
isend = _nonblocking(send)
isendrecv = _nonblocking(sendrecv)

for _name in sorted(_OPERATIONS):
    # In alphabetical order, although `recv` imports from `send`.
    _OPERATIONS[_name] = _OPERATIONS.pop(_name)
