"""Tokens: what programs for earlier packages pass from op to op, and functions without them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import _compat


class _NoToken:
    """Passed as token by the functions of `notoken`: no token is returned."""

    def __repr__(self) -> str:
        return "<no token>"


NO_TOKEN = _NoToken()
ZERO_TOKEN = np.zeros((), np.float32)


def create_token(*args: Any) -> jax.Array:
    """Make a token, a float32 scalar.

    Ops happen in program order with or without tokens. A token passed from op to op makes this
    order visible in the data flow, as earlier packages of this kind required.

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


def check_token(op: str, token: Any) -> None:
    if token is None or token is NO_TOKEN or isinstance(token, _compat.Token):
        return
    aval = getattr(token, "aval", token)
    if isinstance(aval, _compat.AbstractToken):
        return
    if getattr(aval, "shape", None) != () or getattr(aval, "dtype", None) != np.float32:
        raise TypeError(
            f"{op}: argument 'token' must be a token (a float32 scalar, from create_token() or "
            f"from another op) or None, got {type(token).__name__}: {token!r}"
        )


def token_operand(token: Any) -> list[Any]:
    """The token as an operand; JAX's own tokens are none, and order nothing here."""
    foreign = token is None or token is NO_TOKEN or isinstance(token, _compat.Token)
    if foreign or isinstance(getattr(token, "aval", None), _compat.AbstractToken):
        return []
    return [token]


def with_token(op: Any, token: Any, *args: Any, **kwargs: Any) -> Any:
    """The result of an op and the new token, which is NO_TOKEN if there is to be none."""
    out = op(*args, token=token, **kwargs)
    return (out, token) if token is NO_TOKEN else out


def auto_tokenize(f: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``f``: ops keep their order without tokens.

    Earlier packages of this kind needed this decorator where ops were used without tokens. Here
    order comes from JAX's effect system, also under differentiation; the decorator is kept so
    that programs that use it run unchanged.

    Example:
        >>> import mpi4jax
        >>> @mpi4jax.auto_tokenize
        ... def f(x):
        ...     return x
        >>> f(1)
        1
    """
    return f


def without_token(op: Callable[..., Any], module: str) -> Callable[..., Any]:
    """An op of :mod:`mpi4jax` as the function of ``module`` that takes and returns no token."""

    @functools.wraps(op)
    def call(*args: Any, **kwargs: Any) -> Any:
        return op(*args, token=NO_TOKEN, **kwargs)

    summary = (op.__doc__ or "").split("\n", 1)[0]
    call.__doc__ = (
        f"{summary}\n\n    Like :func:`mpi4jax.{op.__name__}`, without tokens: returns the result "
        "alone.\n    "
    )
    call.__module__ = module
    signature = inspect.signature(op)
    call.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[p for name, p in signature.parameters.items() if name != "token"]
    )
    return call
