"""The operations without tokens.

Each function is the one of the same name in :mod:`mpi4jax`, takes no token and returns its
result alone (``None`` for ``send`` and ``barrier``). Order is the same: program order. The rest of
the interface is here too, so that ``import mpi4jax.notoken as mpi4jax`` runs programs written for
packages of this kind without tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import ops
from ._check.jit import jit
from ._functions import assert_equal as _assert_equal
from ._functions import blocks as _blocks
from ._functions import neighbours as _neighbours
from ._functions import nonblocking as _nonblocking
from ._functions.nonblocking import *  # noqa: F403
from ._functions.pvary import pvary
from ._functions.reduce_local import reduce_local
from ._job.flush import flush
from ._job.time_limit import time_limit
from ._op.comm import MEAN, default_comm
from ._setup.transport import has_cuda_support, has_hip_support, has_sycl_support, transport_info
from ._tokens.tokens import auto_tokenize, without_token

if TYPE_CHECKING:  # they see the arguments, and `token` among them: no type takes one away
    from ._functions.assert_equal import assert_equal
    from ._functions.blocks import gather_blocks, scatter_blocks
    from ._functions.neighbours import neighbor_allgather, neighbor_alltoall
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
__all__ += _nonblocking.__all__
