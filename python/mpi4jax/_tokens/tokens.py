"""Tokens: what programs for earlier packages pass from op to op.

Operations happen in program order, which needs no tokens. The functions here take one and return
a new one.
"""

from __future__ import annotations

import dis
import functools
import inspect
import os
import sys
import warnings
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._jax import compat
from .._job.flush import last


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


def _is_of_jax(token: Any) -> bool:
    """Whether it is a token of JAX's own (``jax.lax.create_token``)."""
    return isinstance(token, compat.Token) or isinstance(
        getattr(token, "aval", None), compat.AbstractToken
    )


def _check_token(op: str, token: Any) -> None:
    if token is None or _is_of_jax(token):
        return
    aval = getattr(token, "aval", token)
    if getattr(aval, "shape", None) != () or getattr(aval, "dtype", None) != np.float32:
        raise TypeError(
            f"{op}: argument 'token' must be a token (a float32 scalar, from create_token() or "
            f"from another op) or None, got {type(token).__name__}: {token!r}"
        )


def _new_token(given: Any) -> Any:
    """The token that an op returns: ready when the op has ended, as a result of it is."""
    if _is_of_jax(given):
        return given
    return last() if compat.trace_state_clean() else create_token()


def with_token(op: Callable[..., Any]) -> Callable[..., Any]:
    """A function of :mod:`mpi4jax.notoken` as the one of :mod:`mpi4jax`, with a token."""
    name = op.__name__

    @functools.wraps(op)
    def call(*args: Any, token: Any = None, **kwargs: Any) -> Any:
        _check_token(name, token)
        if not returns_nothing:
            _note_call(name, token)
        result = op(*args, **kwargs)
        return _new_token(token) if returns_nothing else (result, _new_token(token))

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
        TypeError: a wrong type of ``token``.

    See also: :func:`mpi4jax.notoken.{name}`.
    """
    call.__module__ = "mpi4jax"
    return call


# ---- Programs that expect no token

_WHOLE = (
    "mpi4jax: {op} returns a tuple here, (result, token), which {line} does not unpack. For the "
    "result alone, as in mpi4jax 0.8 and 0.9, write `import mpi4jax.notoken as mpi4jax`, or set "
    "MPI4JAX_NOTOKEN=1. To silence this warning, set MPI4JAX_NOTOKEN=0"
)
# Calls without a token that have been looked at; None once a token is passed, or it was said.
_seen: set[tuple[CodeType, int]] | None = None if "MPI4JAX_NOTOKEN" in os.environ else set()


def _note_call(name: str, token: Any) -> None:
    """Warn once of a call that takes the tuple for the result, in programs that pass no token.

    An item of the tuple would be the result, or the token, where a row of the result is meant.
    """
    global _seen
    if token is not None:
        _seen = None
    if _seen is None:
        return
    frame = sys._getframe(2)
    call, file = (frame.f_code, frame.f_lasti), frame.f_code.co_filename
    if call in _seen or file.startswith(compat.NOT_THE_USERS):
        return
    _seen.add(call)
    if _next_instruction(frame) not in ("UNPACK_SEQUENCE", "POP_TOP"):
        _seen = None
        line = f"{os.path.basename(file)}:{frame.f_lineno}"
        warnings.warn(_WHOLE.format(op=name, line=line), stacklevel=3)


def _next_instruction(frame: FrameType) -> str:
    """The name of the instruction behind the call that a frame is in.

    POP_TOP where the result is dropped, UNPACK_SEQUENCE where it is assigned to several names.
    """
    names = (
        instruction.opname
        for instruction in dis.get_instructions(frame.f_code)
        if instruction.offset > frame.f_lasti
        and instruction.opname not in ("CACHE", "EXTENDED_ARG", "NOP")
    )
    return next(names, "")


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
