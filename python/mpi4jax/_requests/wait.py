"""Waiting for nonblocking operations, and placing computation after their initiation."""

from __future__ import annotations

from typing import Any, cast, overload

import jax
import jax.numpy as jnp

from .._op.operation import PLAIN, How, T
from .._op.packing import arity_of
from .._op.primitive import pvary_results
from .order import behind, ready
from .primitives import HANDLE, wait_p
from .request import CompositeRequest, R, Request, RequestKind


def _handles(name: str, request: Any) -> tuple[Any, ...]:
    if not isinstance(request, Request):
        several = isinstance(request, (list, tuple)) and any(
            isinstance(each, Request) for each in request
        )
        raise TypeError(
            f"{name}: argument 'request' must be a request, from iallreduce or another "
            f"nonblocking operation; got {type(request).__name__}: {request!r}"
            f"{'; for several requests, use waitall' if several else ''}"
        )
    handles = request._all_handles()
    for handle in handles:
        if jnp.shape(handle) != HANDLE.shape or jnp.result_type(handle) != HANDLE.dtype:
            raise ValueError(
                f"{name}: argument 'request' has arrays of shape {jnp.shape(handle)} and dtype "
                f"{jnp.result_type(handle)}; expected {HANDLE.shape} and float32. Pass a request "
                "on unchanged, and wait inside the vmap in which the operation was started"
            )
    return handles


def wait(request: Request[R], *, after: Any = None) -> R:
    """Wait for a nonblocking operation, and return its result.

    Args:
        request: request of :func:`iallreduce` or another nonblocking operation. Wait for it once.
        after: pytree of arrays that are computed before the wait begins. Without it, XLA may wait
            first and compute afterwards.

    Returns:
        The result of the operation, or None for ``isend`` and ``ibarrier``.

    Raises:
        TypeError: if ``request`` is not a request.
        ValueError: if ``request`` was changed, or if the function that JAX traces has already
            waited for it.
        jax.errors.JaxRuntimeError: when it runs, if the program has already waited for ``request``,
            or if the operation was never initiated. A compiled function may raise a ValueError
            instead.

    Derivative:
        The transpose initiates the adjoint operation, and the transpose of the initiation waits for
        it, so the backward pass overlaps like the forward pass.

    Example:
        >>> import jax.numpy as jnp, mpi4jax.notoken as mpi4jax
        >>> request = mpi4jax.iallreduce(jnp.ones(3))
        >>> y = mpi4jax.wait(request)
        >>> float(y[0]) == mpi4jax.default_comm().size
        True

    See also: :func:`waitall`, :func:`after`.
    """
    _handles("wait", request)
    leaves = [jnp.asarray(x) for x in jax.tree.leaves(after)]
    return cast(R, _result(request, [ready(leaves)] if leaves else []))


def _result(request: Request[Any], dependences: list[Any]) -> Any:
    """Return what an operation gives, that is waited for after these dependences: handles of
    nothing. The wait is bound once per dtype, with the same counts."""
    if isinstance(request, CompositeRequest):
        return request._result([_result(each, dependences) for each in request._requests])
    kind: RequestKind = request._kind
    handles = [sum(dependences, handle) for handle in request._all_handles()]
    op = kind.op
    if kind.tree_type is None:
        wait_p.bind(*handles, op=op, how=PLAIN)
        return None
    results = {}
    for dtype, buffers, handle in zip(kind.tree_type.groups, kind.buffers, handles, strict=True):
        how = How(arity=arity_of([buffers]), buffers=buffers)
        out = wait_p.bind(handle, *request._counts(), op=op, how=how)
        results[dtype] = pvary_results(op, out)
    return kind.tree_type.from_results(op, results) if op.returns else None


@overload
def waitall(requests: list[Request[R]], *, after: Any = None) -> list[R]: ...
@overload
def waitall(requests: tuple[Request[R], ...], *, after: Any = None) -> tuple[R, ...]: ...
@overload
def waitall(requests: Any, *, after: Any = None) -> Any: ...
def waitall(requests: Any, *, after: Any = None) -> Any:
    """Wait for several nonblocking operations, by :func:`wait` for each.

    Args:
        requests: a list, a tuple or another pytree of requests.
        after: as in :func:`wait`.

    Returns:
        The results, in a pytree of the same structure.

    Raises:
        TypeError, ValueError, jax.errors.JaxRuntimeError: as for :func:`wait`.

    Example:
        >>> import jax.numpy as jnp, mpi4jax.notoken as mpi4jax
        >>> requests = [mpi4jax.iallreduce(jnp.full(3, i)) for i in range(2)]
        >>> a, b = mpi4jax.waitall(requests)
        >>> int(b[0]) == mpi4jax.default_comm().size
        True

    See also: :func:`wait`.
    """
    return jax.tree.map(
        lambda request: wait(request, after=after),
        requests,
        is_leaf=lambda leaf: isinstance(leaf, Request),
    )


def after(request: Request[Any], z: T) -> T:
    """Return ``z`` after an operation has been initiated: computation that uses it overlaps.

    Without it, XLA may compute first and initiate the operation afterwards.

    Args:
        request: request of :func:`iallreduce` or another nonblocking operation.
        z: array, or a pytree of arrays.

    Returns:
        ``z``, unchanged.

    Raises:
        TypeError: if ``request`` is not a request.

    Derivative:
        The identity. The backward pass waits for the adjoint operation after the cotangent of ``z``
        has been computed.

    Example:
        >>> import jax, jax.numpy as jnp, mpi4jax.notoken as mpi4jax
        >>> @jax.jit
        ... def f(x, a):
        ...     request = mpi4jax.iallreduce(x)
        ...     b = jnp.sin(mpi4jax.after(request, a))
        ...     return mpi4jax.wait(request, after=b) + b
        >>> f(jnp.ones(3), jnp.zeros(3)).shape
        (3,)

    See also: :func:`wait`.
    """
    handles = _handles("after", request)
    return cast(T, jax.tree.map(lambda x: behind(jnp.asarray(x), handles), z))
