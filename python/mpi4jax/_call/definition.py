"""An op: its row of the table, and a JAX primitive with all its rules."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from .. import _native
from .._compile.lowering import lowering
from .._diff.derivative import jvp, transpose
from .._op import spec as _spec
from .._op.primitive import PRIMITIVES, abstract_eval, batch, split
from .eager import implementation, run

F = TypeVar("F", bound=Callable[..., Any])


def define(**known: Any) -> Callable[[F], F]:
    """Make an op of a function that makes the :class:`_op.spec.Call` of its arguments: the
    function that calls it.

    Args:
        **known: fields of :class:`_op.spec.Spec`; the name is that of the function.

    Raises:
        ImportError: the native module does not have it.
    """

    def decorate(prepare: F) -> F:
        name = prepare.__name__
        spec = _spec.add(name, prepare=prepare, **known)
        primitive = PRIMITIVES[name] = Primitive(f"mpi4jax_{name}")
        primitive.multiple_results = True
        primitive.def_impl(implementation(primitive, functools.partial(split, spec), spec))
        primitive.def_effectful_abstract_eval(functools.partial(abstract_eval, spec))
        # Not cached: equal ops on different lines are one lowering to JAX, and it would name one
        # line.
        for platform, on_gpu in (("cpu", _native.is_gpu_on_cpu()), ("cuda", True)):
            rule = functools.partial(lowering, spec, on_gpu)
            mlir.register_lowering(primitive, rule, platform=platform, cacheable=False)
        # The "fancy" rules are called also where no operand is batched.
        batching.fancy_primitive_batchers[primitive] = functools.partial(batch, spec)
        ad.primitive_jvps[primitive] = functools.partial(jvp, spec)
        ad.primitive_transposes[primitive] = functools.partial(transpose, spec)

        @functools.wraps(prepare)
        def call(*args: Any, **kwargs: Any) -> Any:
            if "token" in kwargs:
                raise TypeError(
                    f"{name}: there is no argument 'token' here: operations without tokens run in "
                    f"program order. Leave it out, and expect no token with the result; or call "
                    f"mpi4jax.{name}, which has tokens unless MPI4JAX_NOTOKEN=1 is set"
                )
            return run(prepare(*args, **kwargs))

        return cast(F, call)

    return decorate
