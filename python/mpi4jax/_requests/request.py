"""Requests, which are pytrees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import jax
from jax.core import ShapedArray

from .._op.operation import Operation
from .._op.packing import TreeType

R = TypeVar("R")  # what an operation that was started gives


@dataclass(frozen=True)
class RequestKind:
    """Everything about a request except for its handles.

    Equal requests have equal kinds: a loop may carry a request that is initiated on one line before
    the loop and on another one in it.

    Attributes:
        op: the operation.
        tree_type: of the argument; None: it takes no array.
        buffers: the types of what is sent, or of the templates of what is received, for each
            handle.
    """

    op: Operation
    tree_type: TreeType | None
    buffers: tuple[tuple[ShapedArray, ...], ...]

    @property
    def name(self) -> str:
        return self.op.name


@jax.tree_util.register_pytree_node_class
class Request(Generic[R]):
    """A pending nonblocking operation: :func:`wait` returns its result.

    To type checkers, ``iallreduce`` of a ``jax.Array`` returns a ``Request[jax.Array]``.

    It is a pytree of a few numbers, which jitted functions can take and return, and loops can
    carry. The request of a halo exchange also has the block. Wait for each request once.
    """

    __slots__ = ("_children", "_kind")

    def __init__(self, children: Sequence[Any], kind: Any):
        self._children, self._kind = tuple(children), kind

    def tree_flatten(self) -> tuple[tuple[Any, ...], Any]:
        return self._children, self._kind

    @classmethod
    def tree_unflatten(cls, kind: Any, children: Sequence[Any]) -> Request[R]:
        return cls(children, kind)

    @property
    def _op(self) -> str:
        return str(self._kind.name)

    def _all_handles(self) -> tuple[Any, ...]:
        return self._children[: len(self._children) - self._kind.op.row.is_ragged]

    def _counts(self) -> tuple[Any, ...]:
        """Return the counts of an op that takes them; they follow the handles."""
        return self._children[len(self._all_handles()) :]

    def __repr__(self) -> str:
        return f"<request of i{self._op}>"

    def __iter__(self) -> Any:
        raise TypeError(
            f"i{self._op} returns a request, not a token; mpi4jax.wait(request) returns the result"
        )


@dataclass(frozen=True)
class CompositeKind:
    """An operation that consists of other operations.

    Attributes:
        name: the name of the operation.
        result: its result, from the results of those and from the arrays of its
            :class:`CompositeRequest`.
    """

    name: str
    result: Callable[[list[Any], tuple[Any, ...]], Any]


@jax.tree_util.register_pytree_node_class
class CompositeRequest(Request[R]):
    """A request that consists of other requests: ``(*requests, arrays)``."""

    __slots__ = ()

    @property
    def _requests(self) -> tuple[Request[Any], ...]:
        return self._children[:-1]

    def _all_handles(self) -> tuple[Any, ...]:
        return tuple(handle for request in self._requests for handle in request._all_handles())

    def _result(self, results: list[Any]) -> Any:
        return self._kind.result(results, self._children[-1])
