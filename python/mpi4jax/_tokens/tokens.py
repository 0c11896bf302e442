"""Tokens, which programs for older packages pass from operation to operation.

Operations happen in program order, which needs no tokens. The functions here take one and return
a new one.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from .._call.call import run
from .._jax import compat
from .._job.flush import last
from .._op.operation import OPERATIONS
from .._op.other_names import check_call

F = TypeVar("F", bound=Callable[..., Any])


def create_token(*args: Any) -> jax.Array:
    """Make a token, a float32 scalar.

    Operations run in program order with or without tokens. Programs for earlier packages pass a
    token from operation to operation.

    Args:
        *args: ignored; accepted because earlier packages took an array here.

    Returns:
        jax.Array: a scalar of dtype float32.

    Example:
        >>> import mpi4jax
        >>> token = mpi4jax.create_token()
        >>> token = mpi4jax.barrier(token=token)
        >>> token.shape, str(token.dtype)
        ((), 'float32')
    """
    return jnp.zeros((), np.float32)


def _check_token(op: str, token: Any) -> bool:
    """Return whether it is a token of JAX's own (``jax.lax.create_token``). Raise an error if it is
    not a token."""
    aval = getattr(token, "aval", token)
    if isinstance(token, compat.Token) or isinstance(aval, compat.AbstractToken):
        return True
    if getattr(aval, "shape", None) != () or getattr(aval, "dtype", None) != np.float32:
        raise TypeError(
            f"{op}: argument 'token' must be a token (a float32 scalar, from create_token() or "
            f"from another op) or None, got {type(token).__name__}: {token!r}"
        )
    return False


def _new_token(result: Any) -> jax.Array:
    """Return a token, which is ready when all earlier operations of this thread have completed.

    It is on the device of the result, as the token of an operation is.
    """
    if not compat.trace_state_clean():
        return create_token()
    leaves = jax.tree.leaves(result)
    committed = (leaf for leaf in leaves if isinstance(leaf, jax.Array) and leaf.committed)
    return last(next((device for leaf in committed for device in leaf.devices()), None))


def with_token(op: Callable[..., Any]) -> Callable[..., Any]:
    """Return the form with a token of a function of :mod:`mpi4jax.notoken`."""
    name = op.__name__
    # Only operations have `prepare`; functions that are made of several operations do not.
    prepare = OPERATIONS[name].prepare if name in OPERATIONS else None

    @functools.wraps(op)
    def call(*args: Any, token: Any = None, **kwargs: Any) -> Any:
        if token is not None and _check_token(name, token):
            result, new = op(*args, **kwargs), token
        elif prepare is None:
            result = op(*args, **kwargs)
            new = _new_token(result)
        else:
            try:
                prepared = prepare(*args, **kwargs)
            except TypeError:
                check_call(name, signature, args, kwargs)
                raise
            result, new = run(prepared, with_token=True)
        return new if returns_nothing else (result, new)

    signature = inspect.signature(op)
    returns_nothing = signature.return_annotation in (None, "None")
    parameter = inspect.Parameter("token", inspect.Parameter.KEYWORD_ONLY, default=None)
    call.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*signature.parameters.values(), parameter], return_annotation=Any
    )
    summary = (op.__doc__ or "").partition("\n")[0]
    returns = "jax.Array: the new token." if returns_nothing else "tuple: its result; a new token."
    call.__doc__ = f"""{summary}

    Takes what :func:`mpi4jax.notoken.{name}` takes, and a token.

    Args:
        token: token from another op or from :func:`create_token`, or None. Operations happen in
            program order with or without one.

    Returns:
        {returns}

    Raises:
        TypeError: if ``token`` has the wrong type.

    See also: :func:`mpi4jax.notoken.{name}`.
    """
    call.__module__ = "mpi4jax"
    return call


def auto_tokenize(f: F) -> F:
    """Return ``f`` unchanged: operations need no tokens.

    Earlier packages needed this decorator for operations without tokens. Here, JAX's effect system
    keeps the order, also under differentiation. The decorator exists so that programs which use it
    run unchanged.

    Example:
        >>> import mpi4jax
        >>> @mpi4jax.auto_tokenize
        ... def f(x):
        ...     return x
        >>> f(1)
        1
    """
    return f
