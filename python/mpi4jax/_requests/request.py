"""Requests, which are pytrees."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import jax
from jax.core import ShapedArray

from .._op.operation import Operation
from .._op.packing import TreeType

R = TypeVar("R")  # the result of the operation
S = TypeVar("S")  # what a function makes of it


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

    def then(self, function: Callable[..., S], *arrays: Any, name: str = "") -> Request[S]:
        """Return a request for ``function(result, *arrays)``, which :func:`wait` computes.

        A nonblocking function of your own returns such a request. Wait for it in place of the
        request that it is made of.

        Args:
            function: takes the result of the operation. Two requests have the same type, so that a
                loop can carry one in place of the other, only if their functions are equal: a
                function of a module or a method, but not a ``lambda``.
            *arrays: arrays, or pytrees of arrays, that ``function`` takes after the result. They
                are part of the request.
            name: what the nonblocking function is called in errors, without the ``i`` before it; by
                default the name of the operation.
        """
        return CompositeRequest([self, arrays], CompositeKind(name or self._name, function))

    @property
    def _name(self) -> str:
        """The name of the operation."""
        return str(self._kind.name)

    def _all_handles(self) -> tuple[Any, ...]:
        return self._children[: len(self._children) - self._kind.op.row.is_ragged]

    def _counts(self) -> tuple[Any, ...]:
        """Return the counts of an op that takes them; they follow the handles."""
        return self._children[len(self._all_handles()) :]

    def __repr__(self) -> str:
        return f"<request of i{self._name}>"

    def __iter__(self) -> Any:
        raise TypeError(
            f"i{self._name} returns a request, not a token; mpi4jax.wait(request) returns the "
            "result"
        )


@dataclass(frozen=True)
class CompositeKind:
    """Everything about a request that consists of other requests, except for these and its arrays.

    Attributes:
        name: the name of the operation.
        result: function of the results of these requests, and then of the arrays, which returns the
            result.
    """

    name: str
    result: Callable[..., Any]


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
        return self._kind.result(*results, *self._children[-1])
