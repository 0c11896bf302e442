"""JAX's primitives that hold functions, and which operands are the functions' arguments.

The arguments of a function are the last operands of its equation: constants first, in a loop then
what it carries from one turn to the next, which its first results are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from jax.extend.core import ClosedJaxpr, Jaxpr, Primitive, primitives

from . import compat


class Holds(NamedTuple):
    """The functions that the equations of a primitive hold."""

    key: str  # the parameter: a function (open or closed), or functions, one of which runs
    is_call: bool = False  # operands are the arguments, and nothing else needs them
    loop: Callable[[dict[str, Any]], tuple[int, int]] | None = None  # constants, carried values

    def functions(self, params: dict[str, Any]) -> tuple[Any, ...]:
        found = params[self.key]
        return tuple(found) if isinstance(found, (tuple, list)) else (found,)


def _while_counts(params: dict[str, Any]) -> tuple[int, int]:
    constants = params["body_nconsts"]
    return constants, len(params["body_jaxpr"].in_avals) - constants


# The condition of a while_loop passes its arguments on to the body unchanged.
HOLDS: dict[Primitive, Holds] = {
    primitives.jit_p: Holds("jaxpr", is_call=True),
    primitives.closed_call_p: Holds("call_jaxpr", is_call=True),
    compat.remat_p: Holds("jaxpr", is_call=True),
    primitives.custom_jvp_call_p: Holds("call_jaxpr", is_call=True),
    primitives.custom_vjp_call_p: Holds("call_jaxpr", is_call=True),
    primitives.cond_p: Holds("branches"),
    primitives.scan_p: Holds("jaxpr", loop=compat.scan_counts),
    primitives.while_p: Holds("body_jaxpr", loop=_while_counts),
}


def opened(jaxpr: Any) -> Jaxpr:
    return jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr


# ---- Of any primitive


FUNCTION = (ClosedJaxpr, Jaxpr)


def inner_jaxprs(params: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return the functions in an equation, open or closed, by the names of their parameters."""
    found: list[tuple[str, Any]] = []
    for name, value in params.items():
        if isinstance(value, FUNCTION):
            found.append((name, value))
        elif isinstance(value, (tuple, list)):
            for i, v in enumerate(value):
                if isinstance(v, FUNCTION):
                    found.append((f"{name}[{i}]", v))
    return found


def equations(jaxpr: Jaxpr) -> Iterator[Any]:
    """Yield all equations of a function, and of the functions inside."""
    for eqn in jaxpr.eqns:
        yield eqn
        for _, inner in inner_jaxprs(eqn.params):
            yield from equations(opened(inner))


def with_functions(params: dict[str, Any], by: Callable[[Any], Any]) -> dict[str, Any]:
    """Return the parameters with other functions in them."""

    def replaced(value: Any) -> Any:
        if isinstance(value, FUNCTION):
            return by(value)
        if isinstance(value, tuple) and any(isinstance(v, FUNCTION) for v in value):
            new = [by(v) if isinstance(v, FUNCTION) else v for v in value]
            return type(value)(*new) if hasattr(value, "_fields") else tuple(new)
        return value

    return {key: replaced(value) for key, value in params.items()}
