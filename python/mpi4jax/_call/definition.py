"""The definition of an operation: its function, and a JAX primitive with all its rules."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, cast

from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from .._compile.lowering import lowering, register
from .._diff.derivative import jvp, transpose
from .._jax import traces
from .._op.operation import Operation, write_fields_at_once
from .._op.other_names import check_call
from .._op.primitive import OPERANDS, PRIMITIVES, abstract_eval, batch, split
from .call import run
from .eager import implementation

F = TypeVar("F", bound=Callable[..., Any])


def define(op: type[Operation]) -> Callable[[F], F]:
    """Define the function of an operation, and its primitive.

    The function checks its arguments and makes a :class:`_op.operation.Call` of them. Decorated, it
    runs the call and returns the result.
    """
    _register(op.name)
    write_fields_at_once(op)

    def decorate(function: F) -> F:
        op.prepare = staticmethod(function)
        signature = inspect.signature(function)

        @functools.wraps(function)
        def operation(*args: Any, **kwargs: Any) -> Any:
            try:
                call = function(*args, **kwargs)
            except TypeError:
                check_call(op.name, signature, args, kwargs)
                raise
            return run(call)

        return cast(F, operation)

    return decorate


def _register(name: str) -> None:
    primitive = PRIMITIVES[name] = Primitive(f"mpi4jax_{name}")
    primitive.multiple_results = True
    OPERANDS[primitive] = split
    primitive.def_impl(implementation(primitive))
    primitive.def_effectful_abstract_eval(abstract_eval)
    register(primitive, lowering)
    # The "fancy" rules are called also where no operand is batched.
    batching.fancy_primitive_batchers[primitive] = batch
    ad.primitive_jvps[primitive] = jvp
    traces.treat_as_pure(primitive, lambda params: params["how"].spmd)
    ad.primitive_transposes[primitive] = transpose
