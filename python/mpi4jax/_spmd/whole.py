"""Functions of global arrays, which each rank has whole: `jit` and `global_shard_map`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax

from .._check.whole_arrays import look, taken
from .._job.watch import compares_before
from .._op import manual
from .boundary import check_whole
from .mesh import Mesh, current, mesh_at_definition


class _OfWholeArrays:
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
        if mesh is None or not mesh.coordinates or manual.is_inside():
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


def jit(
    fun: Callable[..., Any] | None = None,
    /,
    *,
    in_shardings: Any = None,
    out_shardings: Any = None,
    **how: Any,
) -> Any:
    """Compile a function of global arrays with `jax.jit`.

    Args:
        fun, how: as for `jax.jit`; without a function, a decorator is returned.
        in_shardings, out_shardings: as for `jax.jit`. They distribute nothing: each rank has the
            global arrays whole, and only :func:`mpi4jax.sharding.global_shard_map` and
            :func:`mpi4jax.shard_map` distribute work over ranks. If a sharding is given, the ranks
            of its mesh compare the arguments. Arguments that differ, such as blocks, give a warning
            when the function is first called, and an error with `MPI4JAX_CHECK=1`.
    """
    if fun is None:
        return functools.partial(jit, in_shardings=in_shardings, out_shardings=out_shardings, **how)
    function = jax.jit(fun, **how)
    shardings = jax.tree.leaves((in_shardings, out_shardings))
    if not shardings:
        return function
    meshes = [getattr(given, "mesh", None) for given in shardings]
    ours = [mesh for mesh in meshes if isinstance(mesh, Mesh)]
    return _OfWholeArrays(function, lambda: ours[0] if ours else current())


def of_whole_arrays(
    on_blocks: Callable[..., Any],
    name: str,
    mesh: Mesh | None,
    cut: Callable[[Mesh, Any], Any],
    join: Callable[[Mesh, Any], Any],
) -> Callable[..., Any]:
    """Return a function of global arrays, which calls a function of blocks.

    Args:
        on_blocks: result of :func:`mpi4jax.shard_map`.
        name: its name, in errors.
        mesh: the mesh, or None for the current one.
        cut: function of the mesh and the tuple of global arguments, which returns this rank's
            blocks of them.
        join: function of the mesh and the blocks of the results, which returns the global results.
    """
    defined = mesh_at_definition(mesh)

    def mapped(*args: Any) -> Any:
        over = current() if defined is None else defined
        # Inside of another shard_map, arguments are what its function has.
        if manual.is_inside() or over is None or not over.coordinates:
            return on_blocks(*args)
        check_whole(over, name, args)
        blocks = cut(over, args)
        with taken():
            results = on_blocks(*blocks)
        return join(over, results)

    return mapped
