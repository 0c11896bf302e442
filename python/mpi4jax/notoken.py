"""MPI collectives and messages for JAX arrays: ``import mpi4jax.notoken as mpi4jax``.

Each function returns its result alone (``None`` for ``send`` and ``barrier``); operations happen in
program order. All that is public is here; :mod:`mpi4jax` has the operations with tokens instead.

>>> import jax.numpy as jnp
>>> from mpi4py import MPI
>>> import mpi4jax.notoken as mpi4jax
>>> y = mpi4jax.allreduce(jnp.ones(3), op=MPI.SUM)
"""

from typing import TYPE_CHECKING

from jax import jit

from . import checkpoints, fft, ghosts, grids, linalg, ops
from ._functions import starts as _starts
from ._functions.argmax import argmax, argmin
from ._functions.assert_equal import assert_equal
from ._functions.halo_add import halo_add
from ._functions.neighbours import neighbor_allgather, neighbor_alltoall
from ._functions.pvary import ipvary, pvary
from ._functions.starts import *  # noqa: F403
from ._functions.with_status import Received, recv_with_status, sendrecv_with_status
from ._job.flush import flush
from ._job.time_limit import time_limit
from ._numerics.blocks import gather_blocks, scatter_blocks
from ._numerics.reproducible import reproducible_sum
from ._op.comm import MEAN, default_comm
from ._op.other_names import missing_from as _missing_from, public_names as _public_names
from ._setup.transport import (
    TransportInfo,
    has_cuda_support,
    has_hip_support,
    has_sycl_support,
    transport_info,
)
from ._spmd.mesh import Mesh
from ._spmd.shard_map import shard_map
from ._tokens.tokens import auto_tokenize
from .layouts import Layout, redistribute
from .ops import *  # noqa: F403

__all__ = [
    "MEAN",
    "Layout",
    "Mesh",
    "Received",
    "TransportInfo",
    "argmax",
    "argmin",
    "assert_equal",
    "auto_tokenize",
    "checkpoints",
    "default_comm",
    "fft",
    "flush",
    "gather_blocks",
    "ghosts",
    "grids",
    "halo_add",
    "has_cuda_support",
    "has_hip_support",
    "has_sycl_support",
    "ipvary",
    "jit",
    "linalg",
    "neighbor_allgather",
    "neighbor_alltoall",
    "pvary",
    "recv_with_status",
    "redistribute",
    "reproducible_sum",
    "scatter_blocks",
    "sendrecv_with_status",
    "shard_map",
    "sharding",
    "time_limit",
    "training",
    "transport_info",
]
__all__ += _public_names(ops)
__all__ += _public_names(_starts)

if TYPE_CHECKING:
    from . import sharding, training
else:  # to a type checker, a module with this function has all names
    __getattr__ = _missing_from(__name__, __all__)
