"""Warnings about programs that do what they say, which is hardly what was meant."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

from jax.extend.core import ClosedJaxpr, Literal, Primitive, primitives
from jax.interpreters import batching, mlir
from mpi4py import MPI

from .._jax import compat
from .._job.bytecode import next_instruction
from .._op.primitive import start_p, wait_p
from .._op.spec import SPECS, Spec, is_root, op_of

agreed_p = Primitive("mpi4jax_agreed")
agreed_p.def_impl(lambda x: x)
agreed_p.def_abstract_eval(lambda x: x)
mlir.register_lowering(agreed_p, lambda ctx, x: [x])
batching.defvectorized(agreed_p)


def agreed(x: Any) -> Any:
    """The condition of a loop, that comes from what all ranks have in common."""
    return agreed_p.bind(x)


_DROPPED = (
    "the result of {op} is not used: {op} returns a new array and leaves its argument unchanged"
)


def warn_of_discarded(jaxpr: ClosedJaxpr) -> None:
    """Warn of ops at the top of a function whose results nothing uses.

    Derivatives discard results of their own: those are left out.
    """
    eqns = jaxpr.jaxpr.eqns
    used = {id(v) for eqn in eqns for v in eqn.invars} | {id(v) for v in jaxpr.jaxpr.outvars}
    for eqn in eqns:
        name = op_of(eqn)
        if name is None or not SPECS[name].only_for_its_result(eqn.params):
            continue
        if id(eqn.outvars[0]) not in used and not _is_derived(eqn):
            where = compat.eqn_line(eqn)
            compat.warn(f"{where + ': ' if where else ''}{_DROPPED.format(op=name)}")


def warn_of_dropped(spec: Spec, p: dict[str, Any], caller: FrameType, line: str) -> None:
    """Warn of an eager op that is a statement, though its result is what it is called for: `recv`
    into its argument, say. An op that another function calls is that function's concern."""
    if spec.has_peer:
        is_needed = spec.returns and p.get("status") is None and p["source"] != MPI.PROC_NULL
    elif spec.has_root and not is_root(p):
        is_needed = spec.elsewhere[1] != "none"
    else:
        is_needed = spec.only_for_its_result(p)
    frame: Any = sys._getframe(1)
    while frame.f_back is not caller:
        frame, inner = frame.f_back, frame
    called = inner if frame.f_code.co_name == "call" else frame  # that with a token calls the other
    is_direct = called.f_code.co_name == spec.name
    if is_needed and is_direct and next_instruction(caller) == "POP_TOP":
        compat.warn(f"{line}: {_DROPPED.format(op=spec.name)}")


def refuse_lost_requests(jaxpr: ClosedJaxpr) -> None:
    """Refuse a function that starts an op at its top, and neither waits for it nor returns its
    request: nothing can wait for it any more; or that waits for a request twice.

    Raises:
        ValueError: there is one; names the line.
    """
    eqns = jaxpr.jaxpr.eqns
    used = {id(v) for eqn in eqns for v in eqn.invars} | {id(v) for v in jaxpr.jaxpr.outvars}
    waited: set[int] = set()
    for eqn in eqns:
        if _is_derived(eqn):
            continue
        where = compat.eqn_line(eqn)
        where = f"{where}: " if where else ""
        if eqn.primitive is start_p and id(eqn.outvars[0]) not in used:
            raise ValueError(
                f"{where}the request of i{eqn.params['of']} is never "
                "waited for; call mpi4jax.wait(request), or return the request"
            )
        if eqn.primitive is wait_p and id(eqn.invars[0]) in waited:
            raise ValueError(
                f"{where}wait: this request of i{eqn.params['of']} has been waited for before; "
                "wait for each request once"
            )
        if eqn.primitive is wait_p:
            waited.add(id(eqn.invars[0]))


def _is_derived(eqn: Any) -> bool:
    """Whether an equation is of a derivative, which discards results of its own."""
    stack = str(eqn.source_info.name_stack)
    return "jvp" in stack or "transpose" in stack


def _ops(jaxpr: Any) -> Iterator[tuple[str, Any]]:
    """Names and equations of the ops of a function, and of the functions that it calls."""
    for eqn in jaxpr.eqns:
        name = op_of(eqn)
        if name is not None:
            yield name, eqn
        for _, inner in compat.inner_jaxprs(eqn.params):
            yield from _ops(inner)


def _varying(closed: ClosedJaxpr, varying: Sequence[bool]) -> list[bool]:
    """Which results may differ between the ranks as these arguments do."""
    jaxpr = closed.jaxpr
    found = {id(v) for v, varies in zip(jaxpr.invars, varying, strict=True) if varies}

    def varies(v: Any) -> bool:
        return not isinstance(v, Literal) and id(v) in found

    for eqn in jaxpr.eqns:
        ins, inner = [varies(v) for v in eqn.invars], eqn.params.get("jaxpr")
        if eqn.primitive is primitives.jit_p and inner is not None:
            outs = _varying(inner, ins)
        else:
            name = eqn.params["of"] if eqn.primitive is wait_p else op_of(eqn)
            uniform = (name is not None and SPECS[name].is_uniform) or eqn.primitive is agreed_p
            outs = [any(ins) and not uniform] * len(eqn.outvars)
        found.update(id(v) for v, out in zip(eqn.outvars, outs, strict=True) if out)
    return [varies(v) for v in jaxpr.outvars]


def warn_of_batched_loop(params: dict[str, Any], batched: Sequence[bool]) -> None:
    """Warn of ops in a ``while_loop`` whose arguments are batched, if its condition is too.

    Not if the condition comes from results that all ranks have in common, the residual of a
    solver, say.
    """
    a, b = params["cond_nconsts"], params["body_nconsts"]
    cond_consts, body_consts, carry = batched[:a], batched[a : a + b], batched[a + b :]
    ever = [False] * len(carry)
    for _ in range(len(carry) + 1):  # rounds, until nothing new can depend on anything
        carry = _varying(params["body_jaxpr"], [*body_consts, *carry])
        ever = [x or y for x, y in zip(ever, carry, strict=True)]
    if not any(_varying(params["cond_jaxpr"], [*cond_consts, *ever])):
        return
    for loop in (params["body_jaxpr"], params["cond_jaxpr"]):
        for name, eqn in _ops(loop):
            where = compat.eqn_line(eqn)
            compat.warn(
                f"{where + ': ' if where else ''}{name} is in a while_loop under vmap whose "
                "condition differs between the elements of the batch. The loop runs until the "
                "condition of every element is false, which may take more rounds on one rank than "
                "on another. Make the condition equal on all ranks, for instance by an allreduce"
            )
            return


def _in_loops(primitive: Any, params: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The ops in the ``while_loop``s inside an equation, of which JAX makes linear functions."""
    inside = [jaxpr for _, jaxpr in compat.inner_jaxprs(params)]
    if primitive is primitives.linear_solve_p:
        inside = inside[:2]  # of what is solved, not of the solvers
    for jaxpr in inside:
        for eqn in jaxpr.eqns:
            if eqn.primitive is primitives.while_p:
                yield from _ops_inside(eqn.params)
            else:
                yield from _in_loops(eqn.primitive, eqn.params)


def _ops_inside(params: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for _, inner in compat.inner_jaxprs(params):
        yield from _ops(inner)


def check_linearized_loops(primitive: Any, params: dict[str, Any]) -> None:
    """Warn of ops in a ``while_loop``, or refuse, where JAX makes a linear function of it.

    It does not know how many residuals there will be, so it runs the whole loop again in the linear
    function. Of a ``jax.checkpoint`` around it, it makes none.
    """
    if primitive is primitives.jit_p:  # JAX comes to what is inside
        return
    is_loop = primitive is primitives.while_p
    name, eqn = next(_ops_inside(params) if is_loop else _in_loops(primitive, params), (None, None))
    if name is None:
        return
    where = compat.eqn_line(eqn)
    start = f"{where + ': ' if where else ''}{name} is in a while_loop"
    if primitive is compat.remat_p:
        raise NotImplementedError(
            f"mpi4jax: {start} in a jax.checkpoint, which JAX cannot linearize; use jax.jvp, "
            "remove the checkpoint, or write the loop as a lax.scan"
        )
    compat.warn(
        f"{start} that JAX linearizes (jax.linearize). Each call of the linear function runs the "
        "whole loop again, and all ranks must take part. Use jax.jvp, or write the loop as a "
        "lax.scan"
    )
