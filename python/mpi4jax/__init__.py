"""MPI collectives for JAX arrays, inside ``jax.jit``, differentiable, from a Rust core.

>>> import jax.numpy as jnp
>>> from mpi4py import MPI
>>> import mpi4jax
>>> y, token = mpi4jax.allreduce(jnp.ones(3), op=MPI.SUM)
"""

from ._loader import load as _load

_load()

import atexit  # noqa: E402
import os  # noqa: E402

from . import (  # noqa: E402, F401
    _abort,
    _ad,
    _comm,
    _flush,
    _jvp_rules,
    _native,
    _overlap,
    _scope,
    _watch,
    experimental,
    linalg,
    notoken,
    ops,
)
from ._assert_equal import assert_equal  # noqa: E402
from ._blocks import gather_blocks, scatter_blocks  # noqa: E402
from ._comm import MEAN, default_comm  # noqa: E402
from ._flush import flush  # noqa: E402
from ._jit import jit  # noqa: E402
from ._neighbours import neighbor_allgather, neighbor_alltoall  # noqa: E402
from ._overlap import *  # noqa: E402, F403
from ._pvary import pvary  # noqa: E402
from ._reduce_local import reduce_local  # noqa: E402
from ._time_limit import time_limit  # noqa: E402
from ._tokens import auto_tokenize, create_token  # noqa: E402
from ._transport import (  # noqa: E402
    TransportInfo,
    has_cuda_support,
    has_hip_support,
    has_sycl_support,
    transport_info,
)
from .ops import *  # noqa: E402, F403

gen_token = create_token

if os.environ.get("MPI4JAX_NOTOKEN", "0") not in ("", "0"):
    # For programs written for packages whose functions at this level return no tokens.
    globals().update({name: getattr(notoken, name) for name in notoken.WITHOUT_TOKENS})


# At exit, in the opposite order: what is under way ends, then this rank says that it has finished.
atexit.register(_watch.finish)
atexit.register(_flush.finish)
_watch.start()


def _at_finalize() -> None:
    # A program may call MPI.Finalize itself, before Python's end.
    _flush.flush_own()


_native.at_finalize(_at_finalize)


def _forked() -> None:
    # A forked child is no rank: it waits for nothing at its end, and its errors are its own.
    for function in (
        _watch.finish,
        _flush.finish,
        _native.stop_transports,
    ):
        atexit.unregister(function)
    _abort.uninstall()


os.register_at_fork(after_in_child=_forked)

__version__ = _native.__version__

__all__ = [
    "MEAN",
    "TransportInfo",
    "assert_equal",
    "auto_tokenize",
    "create_token",
    "default_comm",
    "experimental",
    "flush",
    "gather_blocks",
    "gen_token",
    "has_cuda_support",
    "has_hip_support",
    "has_sycl_support",
    "jit",
    "linalg",
    "neighbor_allgather",
    "neighbor_alltoall",
    "notoken",
    "pvary",
    "reduce_local",
    "scatter_blocks",
    "time_limit",
    "transport_info",
]
__all__ += ops.__all__
__all__ += _overlap.__all__
