"""MPI for JAX arrays, inside ``jax.jit``, differentiable: ``import mpi4jax.notoken as mpi4jax``.

>>> import jax.numpy as jnp
>>> from mpi4py import MPI
>>> import mpi4jax.notoken as mpi4jax
>>> y = mpi4jax.allreduce(jnp.ones(3), op=MPI.SUM)

:mod:`mpi4jax.notoken` has all that is public. The operations of :mod:`mpi4jax` itself return a
result and a token, as in mpi4jax 0.7 and older: ``y, token = mpi4jax.allreduce(x, op=MPI.SUM)``.
"""

import atexit
import os
from typing import TYPE_CHECKING

from ._setup import loader as _loader

_loader.load_mpi()

from ._job import abort as _abort

_abort.install()  # whatever fails from here on aborts the job
_loader.load()  # what is imported below needs the native module

from ._job import distributed as _distributed, settings as _settings, watch as _watch
from ._setup import gpus as _gpus, transport as _transport

_watch.check_settings()
_watch.set_check()
_watch.start()

from ._op import comm as _comm

_gpus.choose()
_distributed.start()
if _transport.asks_all_ranks():
    _comm.clone_world()  # if settings differ between ranks, this raises an error
_transport.start()

# These modules are also imported for their side effects: they register rules of primitives and wrap
# functions of JAX.
from . import _common, _native, experimental, notoken
from ._common import *  # noqa: F403
from ._compile import scope as _scope  # noqa: F401
from ._diff import ad as _ad  # noqa: F401
from ._job import flush as _flush
from ._op.other_names import missing_from as _missing_from, public_names as _public_names
from ._requests import (
    lowering as _requests_lowering,  # noqa: F401
    rules as _requests_rules,  # noqa: F401
)
from ._tokens import functions as _functions_with_tokens
from ._tokens.functions import *  # noqa: F403
from ._tokens.tokens import create_token

gen_token = create_token

if _settings.switch("MPI4JAX_NOTOKEN"):
    # This is for programs written for mpi4jax 0.8 and 0.9, whose functions at this level return no
    # tokens.
    globals().update(
        {name: getattr(notoken, name) for name in _public_names(_functions_with_tokens)}
    )


# At exit, operations under way are completed.
atexit.register(_flush.finish)
_abort.complete()


def _at_finalize() -> None:
    # A program may call MPI.Finalize itself, before Python exits.
    _flush.flush_own()
    _comm.forget_all()


_native.at_finalize(_at_finalize)


def _forked() -> None:
    # A forked child is not a rank: it does not flush at exit, and its errors do not abort the job.
    for function in (_flush.finish, _native.stop_transports):
        atexit.unregister(function)
    _abort.uninstall()


os.register_at_fork(after_in_child=_forked)

__version__ = _native.__version__

__all__ = [
    "create_token",
    "experimental",
    "gen_token",
    "notoken",
    "output",
    "sharding",
    "training",
]
__all__ += _public_names(_common)
__all__ += _public_names(_functions_with_tokens)

if TYPE_CHECKING:
    from . import output, sharding, training
else:  # to a type checker, a module with __getattr__ has every name
    __getattr__ = _missing_from(__name__, __all__)
