"""MPI collectives for JAX arrays, inside ``jax.jit``, differentiable, from a Rust core.

>>> import jax.numpy as jnp
>>> from mpi4py import MPI
>>> import mpi4jax
>>> y, token = mpi4jax.allreduce(jnp.ones(3), op=MPI.SUM)
"""

import atexit
import os

from jax import jit

from ._setup import loader as _loader

_loader.load()  # what is imported below needs the native module

from ._job import watch as _watch
from ._setup import transport as _transport

_watch.set_check()
_transport.start()

# Imported also for what they register: rules of primitives, and wrappers of JAX's functions.
from . import (
    _native,
    experimental,
    fft,
    ghosts,
    grids,
    linalg,
    notoken,
    ops,  # noqa: F401
)
from ._compile import scope as _scope  # noqa: F401
from ._diff import ad as _ad  # noqa: F401
from ._functions import nonblocking as _nonblocking
from ._functions.nonblocking import *  # noqa: F403
from ._functions.pvary import pvary
from ._job import abort as _abort, flush as _flush
from ._job.flush import flush
from ._job.time_limit import time_limit
from ._numerics.reproducible import reproducible_sum
from ._op import comm as _comm
from ._op.comm import MEAN, default_comm
from ._requests import (
    lowering as _requests_lowering,  # noqa: F401
    rules as _requests_rules,  # noqa: F401
)
from ._setup.transport import (
    TransportInfo,
    has_cuda_support,
    has_hip_support,
    has_sycl_support,
    transport_info,
)
from ._tokens import functions as _functions_with_tokens
from ._tokens.functions import *  # noqa: F403
from ._tokens.tokens import auto_tokenize, create_token
from .layouts import Layout, redistribute

gen_token = create_token

if os.environ.get("MPI4JAX_NOTOKEN", "0") not in ("", "0"):
    # For programs written for packages whose functions at this level return no tokens.
    globals().update({name: getattr(notoken, name) for name in _functions_with_tokens.__all__})


# At exit, what is under way ends.
atexit.register(_flush.finish)
_watch.start()


def _at_finalize() -> None:
    # A program may call MPI.Finalize itself, before Python's end.
    _flush.flush_own()
    _comm.forget_all()


_native.at_finalize(_at_finalize)


def _forked() -> None:
    # A forked child is no rank: it waits for nothing at its end, and its errors are its own.
    for function in (_flush.finish, _native.stop_transports):
        atexit.unregister(function)
    _abort.uninstall()


os.register_at_fork(after_in_child=_forked)

__version__ = _native.__version__

__all__ = [
    "MEAN",
    "Layout",
    "TransportInfo",
    "auto_tokenize",
    "create_token",
    "default_comm",
    "experimental",
    "fft",
    "flush",
    "gen_token",
    "ghosts",
    "grids",
    "has_cuda_support",
    "has_hip_support",
    "has_sycl_support",
    "jit",
    "linalg",
    "notoken",
    "pvary",
    "redistribute",
    "reproducible_sum",
    "time_limit",
    "transport_info",
]
__all__ += _functions_with_tokens.__all__
__all__ += _nonblocking.__all__
