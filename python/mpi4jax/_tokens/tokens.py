"""Tokens: what programs for earlier packages pass from op to op, and functions without them."""

from __future__ import annotations

import functools
import inspect
import linecache
import re
from collections.abc import Callable
from types import TracebackType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._jax import compat
from .._job.abort import ADVISERS


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
    if token is None or token is NO_TOKEN or isinstance(token, compat.Token):
        return
    aval = getattr(token, "aval", token)
    if isinstance(aval, compat.AbstractToken):
        return
    if getattr(aval, "shape", None) != () or getattr(aval, "dtype", None) != np.float32:
        raise TypeError(
            f"{op}: argument 'token' must be a token (a float32 scalar, from create_token() or "
            f"from another op) or None, got {type(token).__name__}: {token!r}"
        )


def token_operand(token: Any) -> list[Any]:
    """The token as an operand; JAX's own tokens are none, and order nothing here."""
    foreign = token is None or token is NO_TOKEN or isinstance(token, compat.Token)
    if foreign or isinstance(getattr(token, "aval", None), compat.AbstractToken):
        return []
    return [token]


def with_token(op: Any, token: Any, *args: Any, **kwargs: Any) -> Any:
    """The result of an op and the new token, which is NO_TOKEN if there is to be none."""
    out = op(*args, token=token, **kwargs)
    return (out, token) if token is NO_TOKEN else out


# ---- Programs that expect no token

# Ops that were called without one although they return one; None once any was given one.
_untokenized: set[str] | None = set()

_ADVICE = (
    "mpi4jax: {op} returns a tuple here, (result, token). For the result alone, as in packages of "
    "this name from 0.8 on, write `import mpi4jax.notoken as mpi4jax`, or set MPI4JAX_NOTOKEN=1."
)


def note_call(name: str, token: Any) -> None:
    """Remember how an op that returns a token was called."""
    global _untokenized
    if token is not None:
        _untokenized = None
    elif _untokenized is not None:
        _untokenized.add(name)


def _is_pair(value: Any) -> bool:
    """Whether this can be what an op returned, as a whole."""
    return type(value) is tuple and len(value) == 2 and _is_token(value[1])


def _is_token(value: Any) -> bool:
    return getattr(value, "shape", None) == () and getattr(value, "dtype", None) == np.float32


def advise(error: BaseException, trace: TracebackType | None) -> None:
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


ADVISERS.append(advise)


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


# What docstrings say of tokens, and what they say without: a test looks for what this misses.
_WITHOUT = (
    (r"^ *token: .*\n", ""),
    (r",\s+``token`` or ", " or "),
    (r"(?:,\s+(``\w+``))?\s+or\s+``token``", lambda m: f" or {m[1]}" if m[1] else ""),
    (r"tuple: (.*);\s+and\s+the\s+new\s+token\.", r"jax.Array, or pytree: \1."),
    (r"jax\.Array: the new token\.", "None."),
    (r"(>>> \w+), token = mpi4jax\.", r"\1 = notoken."),
    (r">>> token = mpi4jax\.", ">>> notoken."),
    (r"( *>>> import .*mpi4jax)$", r"\1\n        >>> from mpi4jax import notoken"),
)


def _doc_without_token(doc: str) -> str:
    for pattern, replacement in _WITHOUT:
        flags = re.MULTILINE | (re.DOTALL if pattern.startswith("tuple") else 0)
        doc = re.sub(pattern, replacement, doc, flags=flags)  # type: ignore[call-overload]
    return doc


def without_token(op: Callable[..., Any], module: str) -> Callable[..., Any]:
    """A function of :mod:`mpi4jax` as the one of ``module`` that takes and returns no token."""

    @functools.wraps(op)
    def call(*args: Any, **kwargs: Any) -> Any:
        return op(*args, token=NO_TOKEN, **kwargs)

    call.__doc__ = _doc_without_token(op.__doc__ or "")
    call.__module__ = module
    signature = inspect.signature(op)
    call.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[p for name, p in signature.parameters.items() if name != "token"]
    )
    return call
