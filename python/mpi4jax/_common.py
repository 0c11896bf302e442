"""The names that :mod:`mpi4jax` and :mod:`mpi4jax.notoken` have in common.

Every public name of this module is one of them.
"""

from jax import jit as jit

from . import (
    checkpoints as checkpoints,
    fft as fft,
    ghosts as ghosts,
    grids as grids,
    linalg as linalg,
)
from ._functions.migrate import migrate as migrate
from ._functions.neighbours import (
    ineighbor_allgather as ineighbor_allgather,
    ineighbor_alltoall as ineighbor_alltoall,
)
from ._functions.pvary import ipvary as ipvary, pvary as pvary
from ._functions.with_status import Received as Received
from ._job.flush import flush as flush
from ._job.time_limit import time_limit as time_limit
from ._numerics.reproducible import reproducible_sum as reproducible_sum
from ._op.comm import MEAN as MEAN, default_comm as default_comm
from ._requests.request import Request as Request
from ._requests.wait import after as after, wait as wait, waitall as waitall
from ._setup.transport import (
    TransportInfo as TransportInfo,
    has_cuda_support as has_cuda_support,
    has_hip_support as has_hip_support,
    has_sycl_support as has_sycl_support,
    transport_info as transport_info,
)
from ._spmd.mesh import Mesh as Mesh
from ._spmd.shard_map import shard_map as shard_map
from ._tokens.tokens import auto_tokenize as auto_tokenize
from .layouts import Layout as Layout, redistribute as redistribute
