"""MPI collectives and messages for JAX arrays: ``import mpi4jax.notoken as mpi4jax``.

Each function returns its result alone (``None`` for ``send`` and ``barrier``); operations happen in
program order. All that is public is here; :mod:`mpi4jax` has the operations with tokens instead.

>>> import jax.numpy as jnp
>>> from mpi4py import MPI
>>> import mpi4jax.notoken as mpi4jax
>>> y = mpi4jax.allreduce(jnp.ones(3), op=MPI.SUM)
"""

from typing import TYPE_CHECKING

from . import _common, ops
from ._common import *  # noqa: F403
from ._functions.assert_equal import assert_equal
from ._functions.halo_add import halo_add
from ._functions.maxloc import maxloc, minloc
from ._functions.neighbours import neighbor_allgather, neighbor_alltoall
from ._functions.with_status import recv_with_status, sendrecv_with_status
from ._numerics.blocks import gather_blocks, scatter_blocks
from ._op.other_names import missing_from as _missing_from, public_names as _public_names
from .ops import *  # noqa: F403

__all__ = [
    "assert_equal",
    "gather_blocks",
    "halo_add",
    "maxloc",
    "minloc",
    "neighbor_allgather",
    "neighbor_alltoall",
    "output",
    "recv_with_status",
    "scatter_blocks",
    "sendrecv_with_status",
    "sharding",
    "training",
]
__all__ += _public_names(_common)
__all__ += _public_names(ops)

if TYPE_CHECKING:
    from . import output, sharding, training
else:  # to a type checker, a module with __getattr__ has every name
    __getattr__ = _missing_from(__name__, __all__)
