"""Tokens: what programs for earlier packages pass from op to op.

Operations happen in program order, which needs no tokens. The functions here take one and return
a new one.
"""

from __future__ import annotations

import functools
import inspect
import linecache
import os
import re
import sys
import warnings
from collections.abc import Callable
from types import CodeType, FrameType, TracebackType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._jax import compat
from .._job.abort import ADVISERS
from .._job.bytecode import takes_an_item
from .._job.flush import last
from .._op.spec import SPECS


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

# Ops that were called without one although they return one; None once any was given one.
_untokenized: set[str] | None = set()

_ADVICE = (
    "mpi4jax: {op} returns a tuple here, (result, token). For the result alone, as in mpi4jax 0.8 "
    "and 0.9, write `import mpi4jax.notoken as mpi4jax`, or set MPI4JAX_NOTOKEN=1."
)


_ITEM = (
    "mpi4jax: {op} returns a tuple here, (result, token), of which {line} takes one item. For an "
    "item of the result, as in mpi4jax 0.8 and 0.9, write `import mpi4jax.notoken as mpi4jax`, or "
    "set MPI4JAX_NOTOKEN=1. To silence this warning, set MPI4JAX_NOTOKEN=0"
)
# Calls without a token that have been looked at; None once a token is passed, or it was said.
_seen: set[tuple[CodeType, int]] | None = None if "MPI4JAX_NOTOKEN" in os.environ else set()


def _note_call(name: str, token: Any) -> None:
    """Remember how an op that returns a token was called."""
    global _untokenized, _seen
    if token is not None:
        _untokenized = _seen = None
    elif _untokenized is not None:
        _untokenized.add(name)
        if _seen is not None:
            _look(name, sys._getframe(2))


def _look(name: str, frame: FrameType) -> None:
    """Warn once, if it is the first or second item of a tuple that a line takes for a row."""
    global _seen
    call = (frame.f_code, frame.f_lasti)
    if _seen is None or call in _seen:
        return
    _seen.add(call)
    if takes_an_item(frame):
        _seen = None
        line = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        warnings.warn(_ITEM.format(op=name, line=line), stacklevel=4)


def _is_pair(value: Any) -> bool:
    """Whether this can be what an op returned, as a whole."""
    return type(value) is tuple and len(value) == 2 and _is_token(value[1])


def _is_token(value: Any) -> bool:
    return getattr(value, "shape", None) == () and getattr(value, "dtype", None) == np.float32


def _advise(error: BaseException, trace: TracebackType | None) -> None:
    """Add a note to an error about a tuple that comes from taking an op's result for an array.

    For programs that have never passed a token. A frame has such a tuple or calls an op, or a
    function that is gone has returned it to JAX (an error about pytrees).
    """
    words, kinds = str(error), (TypeError, ValueError, AttributeError)
    if not _untokenized or not isinstance(error, kinds) or not re.search(r"tuple|sequence", words):
        return
    call = re.compile(rf"\b({'|'.join(sorted(_untokenized))})\(")
    op = min(_untokenized) if "pytree" in words else None
    while trace is not None and op is None:
        code = trace.tb_frame.f_code
        if line := call.search(linecache.getline(code.co_filename, trace.tb_lineno)):
            op = line[1]
        elif any(map(_is_pair, trace.tb_frame.f_locals.values())):
            op = min(_untokenized)
        trace = trace.tb_next
    if op is not None:
        error.add_note(_ADVICE.format(op=op))


ADVISERS.append(_advise)

_ALONE = (
    "mpi4jax: {op} returns the result alone here, and takes no token (mpi4jax.notoken, or "
    "MPI4JAX_NOTOKEN=1). For (result, token), as in mpi4jax up to 0.7, call mpi4jax.{op} without "
    "MPI4JAX_NOTOKEN."
)
_PAIR = re.compile(rf"^\s*\w+\s*,\s*\w+\s*=.*\b({'|'.join(SPECS)})\(")


def _advise_notoken(error: BaseException, trace: TracebackType | None) -> None:
    """Add a note to an error that comes from passing a token to a function without, or from
    unpacking its result."""
    words, op = str(error), None
    if found := re.search(r"(\w+)\(\) got an unexpected keyword argument 'token'", words):
        op = found[1] if found[1] in SPECS else None
    elif re.search(r"values to unpack \(expected 2|over a 0-d array", words):
        while trace is not None:
            file, line = trace.tb_frame.f_code.co_filename, trace.tb_lineno
            found = _PAIR.search(linecache.getline(file, line))
            op, trace = found[1] if found else op, trace.tb_next
    if op is not None:
        error.add_note(_ALONE.format(op=op))


ADVISERS.append(_advise_notoken)


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
