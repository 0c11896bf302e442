"""The same as :mod:`mpi4jax.notoken`."""

from ..notoken import *  # noqa: F403
from ..notoken import __all__ as __all__
