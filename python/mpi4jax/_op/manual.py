"""Operations in :func:`mpi4jax.shard_map`: the axes of the mesh over which values vary.

JAX follows there, in the type of each value, over which axes ranks have values of their own. A
collective's operand varies over all axes of its communicator, and its result too, but for the one
global value of allreduce, allgather and bcast, whose adjoint goes the other way. An axis that a
communicator has not got changes nothing. If the ranks of a communicator are not the ranks along
some axes, all values are taken to vary over all axes, and the global value is followed by its
`pvary`.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from jax.core import ShapedArray

from .._jax import compat
from .._jax.named_axes import current_world
from .operation import Operation


class Axes(NamedTuple):
    """The axes of the mesh of a `shard_map`."""

    # The axes whose ranks a communicator has; None if there are no such axes.
    of: Callable[[Any], frozenset[str] | None]
    every: frozenset[str]
    of_one_rank: frozenset[str]  # a value that varies only over axes of one rank is global, too


class _State(threading.local):
    spmd: bool | str = False

    @property
    def axes(self) -> Axes | None:
        """The axes of the `shard_map` over ranks that encloses the current call, or None."""
        world = current_world()
        return None if world is None else world.axes


_state = _State()


def of_all_ranks(f: Callable[..., Any], spmd: str | bool = True) -> Callable[..., Any]:
    """Return a function whose operations all ranks have, in one program: their `How.spmd` is
    ``spmd``.

    Then an operand is perturbed, or batched, on all ranks or on none, and JAX differentiates and
    batches the op as its own primitives.
    """

    @functools.wraps(f)
    def collective(*args: Any, **how: Any) -> Any:
        before, _state.spmd = _state.spmd, spmd
        try:
            return f(*args, **how)
        finally:
            _state.spmd = before

    return collective


def current_spmd() -> str | bool:
    """Return `How.spmd` of an operation that is called now: false outside of such functions."""
    return _state.spmd


def _axes(op: Operation) -> tuple[frozenset[str], bool] | None:
    """Return the axes of a collective and whether they are its communicator's, or None."""
    axes = _state.axes
    if axes is None:
        return None
    found = axes.of(op.comm)
    if found is None:
        return axes.every, False
    return found | axes.of_one_rank if op.is_uniform else found, True


def _is_global(op: Operation) -> bool:
    return op.is_uniform and not op.adjoint


def varying_operands(op: Operation, arrays: list[Any]) -> list[Any]:
    """Return the operands as varying values, except for adjoints of a global value."""
    axes = _axes(op)
    if axes is None or (op.is_uniform and op.adjoint):
        return arrays
    return [compat.vary_over(x, axes[0]) for x in arrays]


def needs_pvary(op: Operation) -> bool:
    """Return whether a value is global to the operation, but varying to JAX."""
    axes = _axes(op)
    return axes is not None and not axes[1] and _is_global(op)


def handle_type(op: Operation, aval: ShapedArray) -> Any:
    """Return the type of a handle, which varies between ranks."""
    axes = _axes(op)
    return aval if axes is None else compat.varying_type(aval, add=axes[0])


def result_type(op: Operation, aval: ShapedArray) -> Any:
    """Return the type of a result, from the type of the operands."""
    axes = _axes(op)
    if axes is None:
        return aval
    if _is_global(op) and axes[1]:
        return compat.varying_type(aval, remove=axes[0])
    return compat.varying_type(aval, add=axes[0])


def is_inside() -> bool:
    """Return whether a `shard_map` is being traced."""
    return _state.axes is not None


def pvary(comm: Any, x: Any) -> Any:
    """Return JAX's cast of a value to varying, inside of a `shard_map`; elsewhere None.

    A value that is each rank's own stays as it is: all are, where JAX does not follow it.
    """
    axes = _state.axes
    if axes is None:
        return None
    found = axes.of(comm)
    return compat.vary_over(x, axes.every if found is None else found)
