"""The operations, one file each.

Each takes and returns arrays or pytrees of arrays, blocks no Python (like every JAX operation),
and happens exactly once per execution, in program order, also if its results are unused.
"""

from .._op.spec import SPECS as SPECS
from .allgather import allgather
from .allgatherv import allgatherv
from .allreduce import allreduce
from .alltoall import alltoall
from .alltoallv import alltoallv
from .barrier import barrier
from .bcast import bcast
from .exscan import exscan
from .gather import gather
from .gatherv import gatherv
from .halo_exchange import halo_exchange
from .permute import permute
from .ragged_alltoall import ragged_alltoall
from .recv import recv
from .reduce import reduce
from .reduce_scatter import reduce_scatter
from .reduce_scatterv import reduce_scatterv
from .scan import scan
from .scatter import scatter
from .scatterv import scatterv
from .send import send
from .sendrecv import sendrecv

__all__ = [
    "allgather",
    "allgatherv",
    "allreduce",
    "alltoall",
    "alltoallv",
    "barrier",
    "bcast",
    "exscan",
    "gather",
    "gatherv",
    "halo_exchange",
    "permute",
    "ragged_alltoall",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatterv",
    "scan",
    "scatter",
    "scatterv",
    "send",
    "sendrecv",
]

for _name in __all__:
    # In alphabetical order, too: `recv` takes from `send`.
    SPECS[_name] = SPECS.pop(_name)
