"""A start or a wait outside of any function that is traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Primitive

from .._call.eager import run_program, take_peers
from .._jax import compat
from .._job.flush import started_here
from .._op.primitive import split_start, split_wait, start_p, wait_p
from .._op.spec import SPECS, Params, Spec


def _run_by_programs(primitive: Primitive, split: Callable[..., Any]) -> None:
    """Run a primitive by the compiled function of its parameters."""

    def make(spec: Spec, p: Params) -> Callable[..., Any]:
        return jax.jit(lambda *args: primitive.bind(*args, of=spec.name, **p))

    def run(*args: Any, **p: Any) -> Any:
        if jax.config.jax_disable_jit:  # then the program below would come here again
            return compat.eval_primitive(primitive)(*args, **p)
        started_here()
        arrays, numbers, token = split(p, args)
        spec = SPECS[p.pop("of")]
        counts = numbers[: spec.is_ragged]
        take_peers(p, numbers[len(counts) :])
        return run_program(make, spec, dict(sorted(p.items())), [*arrays, *counts], token)

    primitive.def_impl(run)


_run_by_programs(start_p, split_start)
_run_by_programs(wait_p, split_wait)
