"""The operations without tokens.

Each function is the one of the same name in :mod:`mpi4jax`, takes no token and returns its
result alone (``None`` for ``send`` and ``barrier``). Order is the same: program order. The rest of
the interface is here too, so that ``import mpi4jax.notoken as mpi4jax`` runs programs written for
packages of this kind without tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import _assert_equal, _blocks, _neighbours, _overlap, ops
from ._comm import MEAN, default_comm
from ._flush import flush
from ._jit import jit
from ._overlap import *  # noqa: F403
from ._pvary import pvary
from ._reduce_local import reduce_local
from ._time_limit import time_limit
from ._tokens import auto_tokenize, without_token
from ._transport import has_cuda_support, has_hip_support, has_sycl_support, transport_info

if TYPE_CHECKING:  # they see the arguments, and `token` among them: no type takes one away
    from ._assert_equal import assert_equal
    from ._blocks import gather_blocks, scatter_blocks
    from ._neighbours import neighbor_allgather, neighbor_alltoall
    from .ops import *  # noqa: F403

_WITH_TOKENS = (
    _assert_equal.assert_equal,
    _blocks.gather_blocks,
    _blocks.scatter_blocks,
    _neighbours.neighbor_allgather,
    _neighbours.neighbor_alltoall,
)
WITHOUT_TOKENS = {
    op.__name__: without_token(op, __name__)
    for op in (*(getattr(ops, name) for name in ops.__all__), *_WITH_TOKENS)
}
globals().update(WITHOUT_TOKENS)

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
    "reduce_local",
    "scatter_blocks",
    "time_limit",
    "transport_info",
]
__all__ += ops.__all__
__all__ += _overlap.__all__
