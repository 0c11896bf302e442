"""Linear solves by functions on the host, such as solvers of other libraries."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.experimental import io_callback
from jax.flatten_util import ravel_pytree
from mpi4py import MPI

from .arrays import T
from .base import as_comm
from .krylov import check, check_result, inexact


def host_solve(
    solve: Callable[..., Any],
    b: T,
    *args: Any,
    A: Callable[[Any], Any] | None = None,
    transpose_solve: Callable[..., Any] | None = None,
    comm: MPI.Intracomm | None = None,
) -> T:
    """Solve a linear equation by a function on the host, such as one of SciPy, PyAMG or PETSc.

    All ranks call it together. The function runs in the order of mpi4jax's operations, also in
    :func:`jax.jit`, and may communicate by mpi4py, on a communicator of its own. It must not call
    JAX, which may wait for the result. :func:`jax.vmap` does not support it.

    Args:
        solve: function of NumPy arrays, called as ``solve(b, *args)`` on each rank. It returns this
            rank's elements of the solution, like ``b``, and must be linear in ``b``.
        b: this rank's elements of the right-hand side, in an array of any shape, which may differ
            between ranks; or a pytree of arrays.
        args: arrays or pytrees of arrays that ``solve`` needs, such as the coefficients of the
            matrix. They may be traced.
        A: the operator that ``solve`` inverts, as for :func:`cg`: a function of JAX that takes and
            returns this rank's elements. It is needed only for derivatives with respect to what it
            closes over; by default, there are derivatives with respect to ``b`` only.
        transpose_solve: function like ``solve`` for the transposed equation, needed in reverse
            mode. If the operator is symmetric, pass ``solve``.
        comm: communicator of the ranks that call it; by default a duplicate of ``COMM_WORLD``.

    Returns:
        This rank's elements of the solution, with the shapes and dtypes of ``b``.

    Raises:
        TypeError: if ``solve``, ``transpose_solve`` or ``A`` is not a function.
        jax.errors.JaxRuntimeError, ValueError: when it runs, on all ranks: if ``solve`` raises an
            exception, or returns shapes that differ from ``b``, on any rank. The message contains
            the exception and its rank. Other ranks have to return from ``solve`` first: a ``solve``
            that communicates should raise errors on all ranks alike.

    Derivative:
        The derivative of the solution with respect to ``b``, and to everything that ``A`` closes
        over, but not to ``args``. It takes one more solve, in forward and in reverse mode.

    `Solvers of other libraries <solvers.md#direct-solvers-and-multigrid-of-other-libraries>`_ has
    examples. As a preconditioner: ``M=lambda v: linalg.host_solve(f, v)``.

    Example:
        >>> import jax, jax.numpy as jnp, mpi4jax.notoken as mpi4jax
        >>> diagonal = jnp.array([2.0, 4.0])
        >>> divide = lambda b, d: b / d  # of NumPy arrays
        >>> solve = jax.jit(lambda b, d: mpi4jax.linalg.host_solve(divide, b, d))
        >>> solve(jnp.ones(2), diagonal).tolist()
        [0.5, 0.25]

    See also: :func:`cg`, :func:`gmres`.
    """
    op = "host_solve"
    check(op, {"solve": solve, "transpose_solve": transpose_solve, "A": A}, None, None, None)
    if solve is None:
        raise TypeError(f"{op}: argument 'solve' must be a function of NumPy arrays, got None")
    comm = as_comm(op, comm).mpi
    b = inexact(op, "b", b)
    flat, tree = ravel_pytree(b)
    args = lax.stop_gradient(args)

    def by(name: str, function: Callable[..., Any] | None) -> Callable[..., Any] | None:
        if function is None:
            return None
        return lambda _, v: _called(op, name, function, tree(v), args, comm)

    def matvec(v: jax.Array) -> jax.Array:
        if A is None:
            return v  # has no derivative
        y = A(tree(v))
        check_result(op, "A", y, b, "'b'", flat.dtype)
        return ravel_pytree(y)[0]

    x = lax.custom_linear_solve(
        matvec,
        flat,
        by("solve", solve),
        transpose_solve=by("transpose_solve", transpose_solve),
    )
    return tree(x)


def _called(
    op: str, name: str, function: Callable[..., Any], b: Any, args: Any, comm: MPI.Intracomm
) -> jax.Array:
    """Call a function on the host, and return its result as one array."""
    flat, _ = ravel_pytree(b)
    expected = [leaf.shape for leaf in jax.tree.leaves(b)]

    def result_of(b: Any, args: Any) -> np.ndarray:
        as_numpy = jax.tree.map(np.asarray, (b, args))
        leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(function(as_numpy[0], *as_numpy[1]))]
        shapes = [leaf.shape for leaf in leaves]
        if shapes != expected:
            raise ValueError(
                f"{op}: argument '{name}' must return arrays of the shapes of 'b', {expected}, got "
                f"{shapes}"
            )
        return np.concatenate([leaf.astype(flat.dtype).ravel() for leaf in leaves])

    def call(b: Any, args: Any) -> np.ndarray:
        error, result = None, None
        try:
            result = result_of(b, args)
        except Exception as e:
            error = e
        has_failed = np.array([error is not None])
        comm.Allreduce(MPI.IN_PLACE, has_failed, MPI.LOR)
        if has_failed[0]:
            words = "".join(traceback.format_exception(error)) if error else None
            texts = enumerate(comm.allgather(words))
            known = "\n".join(f"on rank {rank}: {text}" for rank, text in texts if text)
            raise RuntimeError(f"{op}: argument '{name}' raised an exception {known}") from error
        assert result is not None
        return result

    like = jax.ShapeDtypeStruct(flat.shape, flat.dtype)
    return io_callback(call, like, b, args, ordered=True)
