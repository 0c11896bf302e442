"""The equations of `jax.shard_map` and its collectives, and JAX's internals for them.

JAX traces a function for one device of a mesh that has no devices (`AbstractMesh`), with all its
checks; `rewriting.py` puts other collectives in the place of these.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax._src import dtypes, mesh as mesh_lib
from jax.core import ShapedArray
from jax.extend.core import Literal
from jax.sharding import AbstractMesh, AxisType

from . import compat

shard_map_p = compat.shard_map_p


def abstract_mesh(shapes: tuple[int, ...], names: tuple[str, ...]) -> AbstractMesh:
    """Return a mesh without devices.

    From JAX 0.12 on, axes are explicit by default, and the type of an array would have to say how
    it is sharded.
    """
    return AbstractMesh(shapes, names, axis_types=(AxisType.Auto,) * len(names))


def axes_of(params: dict[str, Any]) -> tuple[Any, ...]:
    """Return the names of axes in an equation; for a collective, the axes that it runs over."""
    found = params.get("axes", params.get("axis_name", ()))
    found = found if isinstance(found, (tuple, list, frozenset, set)) else (found,)
    return tuple(name for name in found if isinstance(name, str))


def world_of(mesh: Any) -> Any:
    """Return what a mesh of ranks was made with (`ranks.py`), or None for another mesh."""
    return getattr(getattr(mesh, "abstract_device", None), "world", None)


def current_world() -> Any:
    """Return the world of the `shard_map` around the call that is traced now, or None."""
    mesh = mesh_lib.get_abstract_mesh()
    return world_of(mesh) if mesh.manual_axes else None


def manual_axes() -> tuple[str, ...]:
    """The axes of a `jax.shard_map` that what is called now is inside of."""
    return tuple(mesh_lib.get_abstract_mesh().manual_axes)


def mesh_of_devices() -> dict[str, int]:
    """Return the axes and sizes of the mesh that `jax.set_mesh` has set; none without one."""
    return dict(mesh_lib.get_abstract_mesh().shape)


@contextlib.contextmanager
def refuse_devices(advice: str) -> Iterator[None]:
    """Context: the error of a `jax.shard_map` over devices inside says what to do instead."""
    try:
        yield
    except ValueError as error:
        if "context mesh" not in str(error).lower():
            raise
        raise NotImplementedError(
            "a jax.shard_map over devices inside of mpi4jax.shard_map, which is over ranks: "
            f"{advice}. {error}"
        ) from None


@contextlib.contextmanager
def name_axes(axes: tuple[str, ...]) -> Iterator[None]:
    """Context: an error about an axis that the mesh does not have names the axis and the mesh's,
    or says what the axis of a `vmap` needs.

    JAX's own is an AssertionError without a message, a NameError without the mesh's axes, a
    ValueError about the types of values if other axes are known, or, in 0.7, a KeyError. JAX
    raises the same errors for the axis of a `vmap`, which the types of its values cannot name. The
    axis is an argument of the function of `jax.lax` that has raised it.
    """
    try:
        yield
    except (AssertionError, KeyError, NameError, ValueError) as error:
        about_axes = "axis name" in str(error) or "axis_name" in str(error)
        if str(error) and not about_axes and not isinstance(error, KeyError):
            raise
        of_vmap: set[Any] = set()
        for frame, _ in traceback.walk_tb(error.__traceback__):
            function, given = frame.f_code.co_name, frame.f_locals.get("axis_name")
            if function == "vmap_f":  # JAX's call of a function that `jax.vmap` has returned
                of_vmap.add(given)
            given = given if isinstance(given, (tuple, list)) else (given,)
            unknown = [name for name in given if isinstance(name, str) and name not in axes]
            if unknown and hasattr(jax.lax, function):
                words = f"{function} over {', '.join(map(repr, unknown))}"
                if of_vmap.issuperset(unknown):
                    raise NotImplementedError(
                        f"{words}: JAX runs a collective over the axis of a jax.vmap inside of a "
                        "shard_map only with check_vma=False; pass it to mpi4jax.shard_map"
                    ) from error
                raise NameError(f"{words}: the mesh has the axes {axes}") from error
        raise


def plain(aval: Any) -> Any:
    """Return the type of a value outside of every `shard_map`."""
    if type(aval) is not ShapedArray:
        return aval
    return ShapedArray(aval.shape, aval.dtype, weak_type=aval.weak_type)


def is_plain(aval: Any) -> bool:
    if type(aval) is not ShapedArray:
        return True
    return aval.sharding.mesh.empty and not compat.varying_axes(aval)


def value_of(literal: Literal) -> Any:
    """Return a number as a literal of a jaxpr, without a mesh."""
    if is_plain(jax.typeof(literal.val)):
        return literal.val
    # JAX takes neither numbers of Python nor arrays of NumPy for constants of a trace.
    if literal.aval.weak_type:
        number = literal.val.item()
        return (
            dtypes.canonicalize_value(number) if hasattr(dtypes, "canonicalize_value") else number
        )
    return np.asarray(literal.val)[()]
