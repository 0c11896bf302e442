"""Make a nonblocking function from the blocking function of an operation."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ParamSpec

from .._op.operation import OPERATIONS, Call, Message
from .._op.other_names import check_call, rename
from .request import R, Request
from .start import start

P = ParamSpec("P")


def nonblocking(
    op: Callable[P, R],
    prepare_with_end: Callable[..., tuple[Call, Callable[..., Any]]] | None = None,
) -> Callable[P, Request[R]]:
    """Return the function that starts what ``op`` does, with the same arguments but for a status,
    and returns a :class:`Request`.

    Args:
        op: the function of an operation.
        prepare_with_end: for a function that is made of one operation: returns the call of that
            operation, given the arguments, and the function that makes the result of ``op`` of its
            result.
    """
    name = op.__name__
    given = inspect.signature(op)
    # A wildcard has no derivative here.
    changed = {"source": inspect.Parameter.empty, "tag": 0, "recvtag": 0}
    signature = inspect.Signature(
        [
            parameter.replace(default=changed.get(argument, parameter.default))
            for argument, parameter in given.parameters.items()
            if argument != "status"
        ]
    )

    def call(*args: P.args, **kwargs: P.kwargs) -> Request[R]:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:
            check_call(f"i{name}", signature, args, kwargs)
            raise
        bound.apply_defaults()
        try:
            if prepare_with_end is None:
                return start(OPERATIONS[name].prepare(**bound.arguments))
            prepared, end = prepare_with_end(**bound.arguments)
            return start(prepared).then(end, name=name)
        except (TypeError, ValueError, NotImplementedError) as error:
            rename(error, name, f"i{name}")
            raise

    call.__name__ = call.__qualname__ = f"i{name}"
    call.__module__ = "mpi4jax"
    call.__signature__ = signature  # type: ignore[attr-defined]
    call.__doc__ = _documentation(op)
    return call


def _documentation(op: Callable[..., Any]) -> str:
    name = op.__name__
    operation = OPERATIONS.get(name)
    is_message = operation is not None and issubclass(operation, Message)
    started = operation and operation.row.started
    # Operations without a nonblocking MPI function are made of messages.
    function = started or "MPI_Isend"
    line, *_ = (op.__doc__ or "").partition("\n")
    summary = line.partition(" (MPI_")[0].rstrip(".")
    first = summary[:1].lower() + summary[1:]
    section = "3.7" if started is None or is_message else "6.12"
    tag = ""
    if operation is not None and is_message and operation.returns:
        tag = " What it receives has tag 0 by default, not any tag: that has no derivative here."
    return f"""Start to {first}, without waiting ({function}; MPI-4.1, section {section}).

    Takes what :func:`{name}` takes, but for a status.{tag}

    Returns:
        Request: for :func:`wait`, which returns the result of :func:`{name}`.

    Raises:
        TypeError, ValueError: as :func:`{name}`.

    See also: :func:`{name}`, :func:`wait`, :func:`after`.
    """
