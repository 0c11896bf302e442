"""The definition of an operation: its row, and a JAX primitive with all its rules."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from .._compile.lowering import lowering, register
from .._diff.derivative import jvp, transpose
from .._jax import traces
from .._op import spec as _spec
from .._op.other_names import check_keywords
from .._op.primitive import OPERANDS, PRIMITIVES, abstract_eval, batch, split
from .._op.spec import Spec
from .call import run
from .eager import implementation

F = TypeVar("F", bound=Callable[..., Any])


def define(**fields: Any) -> Callable[[F], F]:
    """Register an operation, named after the function: its row of the table, and its primitive.

    The function checks its arguments and makes a :class:`_op.spec.Call` of them. Decorated, it runs
    the call and returns the result.

    Args:
        **fields: fields of :class:`_op.spec.Spec`.

    Raises:
        ImportError: if the native module does not have it.
    """

    def decorate(function: F) -> F:
        name = function.__name__
        _register(_spec.add(name, prepare=function, **fields))

        @functools.wraps(function)
        def operation(*args: Any, **kwargs: Any) -> Any:
            try:
                call = function(*args, **kwargs)
            except TypeError:
                check_keywords(name, kwargs)
                raise
            return run(call)

        return cast(F, operation)

    return decorate


def _register(spec: Spec) -> None:
    name = spec.name
    primitive = PRIMITIVES[name] = Primitive(f"mpi4jax_{name}")
    primitive.multiple_results = True
    OPERANDS[primitive] = functools.partial(split, spec)
    primitive.def_impl(implementation(primitive, spec))
    primitive.def_effectful_abstract_eval(functools.partial(abstract_eval, spec))
    register(primitive, functools.partial(lowering, spec=spec))
    # The "fancy" rules are called also where no operand is batched.
    batching.fancy_primitive_batchers[primitive] = functools.partial(batch, spec)
    ad.primitive_jvps[primitive] = functools.partial(jvp, spec)
    traces.treat_as_pure(primitive, lambda params: params.get("spmd"))
    ad.primitive_transposes[primitive] = functools.partial(transpose, spec)
