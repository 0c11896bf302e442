"""One order for all ordered effects of JAX, in functions with operations.

JAX has a chain of tokens for each ordered effect. Here what one effect leaves is what the next one
takes, whichever it is: at the top, in loops and in branches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax._src.interpreters import mlir as _mlir
from jax.extend.mlir.dialects import stablehlo
from jax.interpreters import mlir

from .compat import Effect, replace_by


class _OneOrder(mlir.TokenSet):
    """Tokens of several effects, which are one and the same token."""

    __slots__ = ()

    def update_tokens(self, tokens: Any) -> Any:
        given = dict(self.items())
        new = [token for effect, token in tokens.items() if token is not given[effect]]
        return _one(self, new) if new else self


def _one(tokens: Any, new: list[Any]) -> _OneOrder:
    """Return the same effects after all of these tokens."""
    distinct = [t for i, t in enumerate(new) if all(t is not other for other in new[:i])]
    token = distinct[0] if len(distinct) == 1 else stablehlo.after_all(distinct)
    return _OneOrder({effect: token for effect, _ in tokens.items()})


def _apart(given: Any, one: Any) -> Any:
    """Return a token for each effect, because XLA aborts if one value is two results."""
    return mlir.TokenSet(
        {effect: stablehlo.after_all([one.get(effect), token]) for effect, token in given.items()}
    )


def share(effect: Effect) -> None:
    """Give the ordered effects of a function one order, if ``effect`` is one of them."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def lower(ctx: Any, jaxpr: Any, names: Any, tokens: Any, *args: Any, **kwargs: Any) -> Any:
            if len(tokens) < 2 or effect not in tokens.effects():
                return original(ctx, jaxpr, names, tokens, *args, **kwargs)
            one = _one(tokens, [token for _, token in tokens.items()])
            out, one = original(ctx, jaxpr, names, one, *args, **kwargs)
            return out, _apart(tokens, one)

        return lower

    replace_by(_mlir, "jaxpr_subcomp", make)
