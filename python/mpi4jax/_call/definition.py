"""An op: its row of the table, and a JAX primitive with all its rules."""

from __future__ import annotations

import functools
from typing import Any

from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from .. import _native
from .._compile.lowering import lowering
from .._diff.derivative import jvp, transpose
from .._op import spec as _spec
from .._op.primitive import PRIMITIVES, abstract_eval, batch
from .eager import run_params


def define(name: str, **known: Any) -> None:
    """Define an op, of which these fields of :class:`_op.spec.Spec` are known.

    Raises:
        ImportError: the native module does not have it.
    """
    spec = _spec.add(name, **known)
    primitive = PRIMITIVES[name] = Primitive(f"mpi4jax_{name}")
    primitive.multiple_results = True
    primitive.def_impl(functools.partial(run_params, spec))
    primitive.def_effectful_abstract_eval(functools.partial(abstract_eval, spec))
    # Not cached: equal ops on different lines are one lowering to JAX, and it would name one line.
    for platform, on_gpu in (("cpu", _native.is_gpu_on_cpu()), ("cuda", True)):
        rule = functools.partial(lowering, spec, on_gpu)
        mlir.register_lowering(primitive, rule, platform=platform, cacheable=False)
    # The "fancy" rules are called also where no operand is batched.
    batching.fancy_primitive_batchers[primitive] = functools.partial(batch, spec)
    ad.primitive_jvps[primitive] = functools.partial(jvp, spec)
    ad.primitive_transposes[primitive] = functools.partial(transpose, spec)
