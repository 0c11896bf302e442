"""``jit``: ``jax.jit``, and the comparison of schedules."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun

from .._job.flush import flush
from . import schedule
from .replicated import comparing


def jit(fun: Callable[..., Any] | None = None, /, *, check: bool = False, **kwargs: Any) -> Any:
    """:func:`jax.jit`, with a comparison of the ranks' schedules if wanted.

    Functions that communicate are compiled by ``jax.jit``, and by whatever calls it, just as well.

    Args:
        fun: function to compile. Without it, a decorator is returned.
        check: whether the ranks compare their schedules of collectives when the function is
            traced, which is before it first runs (with these shapes). All ranks of the
            communicators in it must then trace it at the same point of the program. Derivatives
            that are taken in it also compare the cotangents of results that are the same on all
            ranks, when it runs: a warning names the line that seems to lack a :func:`pvary`.
        **kwargs: as for :func:`jax.jit` (``static_argnums``, ``donate_argnames``, ...).

    Returns:
        The function as ``jax.jit`` compiles it.

    Raises:
        RuntimeError: with ``check``, when it is called: the schedules of the ranks differ.

    Example:
        >>> import jax.numpy as jnp
        >>> from mpi4py import MPI
        >>> import mpi4jax
        >>> from mpi4jax import notoken
        >>> mean = mpi4jax.jit(lambda x: notoken.allreduce(x, mpi4jax.MEAN))
        >>> float(mean(jnp.float32(3)))
        3.0
    """
    if fun is None:
        return functools.partial(jit, check=check, **kwargs)
    return jax.jit(_Checked(fun) if check else fun, **kwargs)


class _Checked:
    """A function whose schedule the ranks compare when it is traced.

    A class, so that it is pickled as the function is.
    """

    def __init__(self, fun: Callable[..., Any]):
        functools.update_wrapper(self, fun)
        self.fun = fun

    def __repr__(self) -> str:
        return repr(self.fun)

    def __reduce__(self) -> Any:
        return _Checked, (self.fun,)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if jax.config.jax_disable_jit:
            return self.fun(*args, **kwargs)
        # Of no arguments: those that are traced become constants, the others may be static.
        with comparing():
            jaxpr, shape = jax.make_jaxpr(lambda: self.fun(*args, **kwargs), return_shape=True)()
        with jax.ensure_compile_time_eval():
            flush()  # what is under way must not mix with the comparison
        schedule.compare(getattr(self.fun, "__name__", repr(self.fun)), jaxpr)
        out = jaxpr_as_fun(jaxpr)()
        return jax.tree.unflatten(jax.tree.structure(shape), out)
