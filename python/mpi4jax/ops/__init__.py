"""The operations, one file each.

Each takes and returns arrays or pytrees of arrays, blocks no Python (like every JAX operation),
and happens exactly once per execution, in program order, also if its results are unused.
"""

from .._spec import SPECS as SPECS
from .allgather import allgather as allgather
from .allreduce import allreduce as allreduce
from .alltoall import alltoall as alltoall
from .barrier import barrier as barrier
from .bcast import bcast as bcast
from .gather import gather as gather
from .halo_exchange import halo_exchange as halo_exchange
from .recv import recv as recv
from .reduce import reduce as reduce
from .scan import scan as scan
from .scatter import scatter as scatter
from .send import send as send
from .sendrecv import sendrecv as sendrecv

# In alphabetical order, as the modules above: `recv` takes from `send`.
for _name in sorted(SPECS):
    SPECS[_name] = SPECS.pop(_name)

__all__ = list(SPECS)
