"""Names under which earlier packages of this kind offered what is now in :mod:`mpi4jax`."""

from .. import notoken
from .._tokens.tokens import auto_tokenize

__all__ = ["auto_tokenize", "notoken"]
