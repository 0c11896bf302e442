"""MPI collectives for JAX arrays, inside ``jax.jit``, differentiable, from a Rust core.

>>> import jax.numpy as jnp
>>> from mpi4py import MPI
>>> import mpi4jax
>>> y, token = mpi4jax.allreduce(jnp.ones(3), op=MPI.SUM)
"""

from ._loader import load as _load

_load()

from . import _spec  # noqa: E402

_spec.check()

import atexit  # noqa: E402

from . import (  # noqa: E402, F401
    _ad,
    _watch,
    experimental,
    notoken,
)
from ._comm import default_comm  # noqa: E402
from ._native import has_cuda_support  # noqa: E402
from ._ops import (  # noqa: E402
    allgather,
    allreduce,
    alltoall,
    auto_tokenize,
    barrier,
    bcast,
    create_token,
    gather,
    pvary,
    recv,
    reduce,
    scan,
    scatter,
    send,
    sendrecv,
)
from ._scope import flush, jit  # noqa: E402

gen_token = create_token
# At exit, in the opposite order: what is under way ends, then this rank says that it has finished.
atexit.register(_watch.finish)
atexit.register(flush)
_watch.start()

__version__ = "0.1.0"

__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "auto_tokenize",
    "barrier",
    "bcast",
    "create_token",
    "default_comm",
    "experimental",
    "flush",
    "gather",
    "gen_token",
    "has_cuda_support",
    "jit",
    "notoken",
    "pvary",
    "recv",
    "reduce",
    "scan",
    "scatter",
    "send",
    "sendrecv",
]
