"""The operations without tokens: MPI collectives and messages for JAX arrays.

Each function returns its result alone (``None`` for ``send`` and ``barrier``); operations happen in
program order. The rest of the interface is here too, for ``import mpi4jax.notoken as mpi4jax``.
:mod:`mpi4jax` has the same functions with tokens.
"""

from jax import jit

from . import ops
from ._functions import nonblocking as _nonblocking
from ._functions.assert_equal import assert_equal
from ._functions.neighbours import neighbor_allgather, neighbor_alltoall
from ._functions.nonblocking import *  # noqa: F403
from ._functions.pvary import pvary
from ._job.flush import flush
from ._job.time_limit import time_limit
from ._numerics.blocks import gather_blocks, scatter_blocks
from ._numerics.reproducible import reproducible_sum
from ._op.comm import MEAN, default_comm
from ._setup.transport import has_cuda_support, has_hip_support, has_sycl_support, transport_info
from ._tokens.tokens import auto_tokenize
from .ops import *  # noqa: F403

__all__ = [
    "MEAN",
    "assert_equal",
    "auto_tokenize",
    "default_comm",
    "flush",
    "gather_blocks",
    "has_cuda_support",
    "has_hip_support",
    "has_sycl_support",
    "jit",
    "neighbor_allgather",
    "neighbor_alltoall",
    "pvary",
    "reproducible_sum",
    "scatter_blocks",
    "time_limit",
    "transport_info",
]
__all__ += ops.__all__
__all__ += _nonblocking.__all__
