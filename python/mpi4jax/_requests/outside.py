"""A start or a wait outside of any function that is traced: of a derivative, or under `vmap`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from .._call.eager import run_program, take_peers
from .._jax import compat
from .._job.flush import started_here
from .._op.primitive import split, split_wait, start_p, wait_p
from .._op.spec import SPECS, Params, Spec


def _evaluate(primitive: Any, tell: Any, program: Callable[..., Any]) -> None:
    def run(*args: Any, **p: Any) -> Any:
        if jax.config.jax_disable_jit:  # then the program below would come here again
            return compat.eval_primitive(primitive)(*args, **p)
        started_here()
        arrays, numbers, token = tell(p, args)
        of, given = p.pop("of"), p.pop("given", None)
        counts = numbers[: SPECS[of].is_ragged]
        take_peers(p, numbers[len(counts) :])
        q = {**p, "given": given}
        return run_program(program, SPECS[of], q, [*arrays, *counts], token)

    primitive.def_impl(run)


def _bound_start(spec: Spec, p: Params) -> Callable[..., Any]:
    q = {k: v for k, v in p.items() if k != "given"}
    return jax.jit(lambda *args: start_p.bind(*args, of=spec.name, **q))


def _bound_wait(spec: Spec, p: Params) -> Callable[..., Any]:
    return jax.jit(lambda *args: wait_p.bind(*args, of=spec.name, **p))


_evaluate(start_p, lambda p, args: split(SPECS[p["of"]], p, args), _bound_start)
_evaluate(wait_p, split_wait, _bound_wait)
