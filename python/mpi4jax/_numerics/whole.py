"""Compiled functions of global arrays that each rank has whole (`mpi4jax.sharding.jit`)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax

from .._spmd.mesh import Mesh
from .base import check_whole, compares_before, look, manual


class OfWholeArrays:
    """A function of `jax.jit`, whose arguments should be the same on all ranks of a mesh.

    They are compared when the function is first called, and with `MPI4JAX_CHECK=1` at each call.
    A later call costs one more test in Python.

    Args:
        function: what `jax.jit` returns.
        mesh: function without arguments, which returns the mesh, or None if there is none.
    """

    def __init__(self, function: Any, mesh: Callable[[], Mesh | None]):
        functools.update_wrapper(self, function)
        self._function, self._mesh, self._is_done = function, mesh, False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_done:
            return self._function(*args, **kwargs)
        mesh, self._is_done = self._mesh(), not compares_before()
        if mesh is None or manual.is_inside():
            return self._function(*args, **kwargs)
        # A static argument may be anything.
        arrays = jax.tree.map(lambda x: x if hasattr(x, "dtype") else None, (*args, kwargs))
        name = getattr(self._function, "__name__", "a function")
        use = "computes with them on each rank: nothing is summed over ranks"
        compared = check_whole(mesh, name, arrays, "jit", use)
        result = self._function(*args, **kwargs)
        look(compared)
        return result

    def __get__(self, of: Any, kind: Any = None) -> Any:
        return self if of is None else functools.partial(self, of)

    if not TYPE_CHECKING:  # to a type checker, a class with __getattr__ has every name

        def __getattr__(self, name):
            return getattr(self._function, name)
